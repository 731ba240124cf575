"""The trainer: one pipeline stage a process. Activations go forward and gradients back between them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dprims.synchronizer import ModuleSource
from dprims.synchronizer.rendezvous import join_store

from .model import STAGES, Shape, Transformer

MICRO_BATCHES = 4
LEARNING_RATE = 1.5e-3
MAX_RATIO = 2.0
LIMIT_S = 60.0


@dataclass(frozen=True)
class Batch:
    """What one step learns from, all on the CPU."""

    tokens: Tensor
    """(rows, length): prompts with the answers that were sampled."""
    logp: Tensor
    """(rows, word): the log-probability of each letter under the weights that sampled it."""
    advantage: Tensor
    """(rows,): how much better than the other answers to the same prompt."""


class Trainer(ModuleSource):
    """One pipeline stage: its layers, their optimiser, and the source of their weights for refits."""

    def __init__(self, stage: int, shape: Shape, seed: int, devices: Sequence[str]) -> None:
        torch.manual_seed(seed * STAGES + stage)
        self.stage, self.shape = stage, shape
        self.device = torch.device(devices[stage])
        self.model = Transformer(shape, shape.layers_of(stage)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        super().__init__(self.model)

    def connect(self, host: str, port: int) -> None:
        """Join the process group of the stages. Collective: call it on all of them before waiting for one."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # it is a matter of the thread, and this one trains
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=join_store(host, port),
            rank=self.stage,
            world_size=STAGES,
            timeout=timedelta(seconds=LIMIT_S),
        )

    def train(self, batch: Batch) -> float:
        """One step of policy gradient, GPipe-like: all micro-batches forward, then all back.

        Collective: call it on all stages before waiting for one. Returns the norm of the stage's gradient.
        """
        self.model.train()
        self.optimizer.zero_grad()
        rows = [part.to(self.device) for part in batch.tokens.chunk(MICRO_BATCHES)]
        if self.stage == 0:
            self._first(rows)
        else:
            self._last(rows, batch)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(norm)

    def _first(self, rows: Sequence[Tensor]) -> None:
        made, sent = [], []
        for tokens in rows:
            made.append(self.model(tokens[:, :-1]))
            sent.append(dist.isend(made[-1].detach(), self.stage + 1))
        for activations in made:
            gradient = torch.empty_like(activations)
            dist.recv(gradient, self.stage + 1)
            activations.backward(gradient)
        _wait(sent)

    def _last(self, rows: Sequence[Tensor], batch: Batch) -> None:
        received, losses = [], []
        logps, advantages = batch.logp.chunk(MICRO_BATCHES), batch.advantage.chunk(MICRO_BATCHES)
        for tokens, sampled, advantage in zip(rows, logps, advantages, strict=True):
            shape = (len(tokens), self.shape.length - 1, self.shape.width)
            activations = torch.empty(shape, device=self.device)
            dist.recv(activations, self.stage - 1)
            received.append(activations.requires_grad_())
            logits = self.model(activations)[:, self.shape.word :]
            logp = logits.log_softmax(-1).gather(-1, tokens[:, self.shape.word + 1 :, None]).squeeze(-1)
            # the samples are a version old: weigh them by how likely today's weights make them
            ratio = (logp.detach() - sampled.to(self.device)).exp().clamp(max=MAX_RATIO)
            losses.append(-(ratio * advantage.to(self.device)[:, None] * logp).sum() / batch.logp.numel())
        sent = []
        for activations, loss in zip(received, losses, strict=True):
            loss.backward()
            sent.append(dist.isend(activations.grad, self.stage - 1))
        _wait(sent)

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter of the stage."""
        return checksums(self.model)


def checksums(model: nn.Module) -> dict[str, str]:
    """SHA-256 of the bytes of each entry of a state dict, by name."""
    return {
        name: hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()
        for name, tensor in model.state_dict().items()
    }


def _wait(sent: Sequence[dist.Work | None]) -> None:
    for work in sent:
        if work is not None:
            work.wait()
