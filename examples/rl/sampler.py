"""The sampler: a generation shard that serves the weights it was sent last."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dprims import RefitError
from dprims.synchronizer import ModuleSink

from .model import Shape, Transformer
from .trainer import checksums

LIMIT_S = 20.0


@dataclass(frozen=True)
class Samples:
    """Answers to some prompts, and the version of the weights that gave them."""

    tokens: Tensor
    """(rows, length): each prompt as often as it was to be answered, with an answer each."""
    logp: Tensor
    """(rows, word): the log-probability of each letter of the answer."""
    version: int
    shard: int


class Sampler(ModuleSink):
    """One generation rank: the whole model, and the sink of its weights."""

    def __init__(self, shard: int, worker: int, shape: Shape, devices: Sequence[str]) -> None:
        self.shard, self.shape = shard, shape
        self.device = torch.device(devices[shard])
        self.model = Transformer(shape, range(shape.layers)).to(self.device).eval()
        self._free = threading.Lock()  # held while sampling, and while paused
        self._paused = False
        super().__init__(self.model)

    def pause(self) -> None:
        """The refit is about to commit: wait for the samples in flight, and begin no others."""
        if not self._paused and not self._free.acquire(timeout=LIMIT_S):
            raise RefitError(f"shard {self.shard} still samples after {LIMIT_S:g} s")
        self._paused = True

    def resume(self) -> None:
        """Serve again, from the weights that were committed."""
        if self._paused:
            self._paused = False
            self._free.release()

    @torch.no_grad()
    def sample(self, prompts: Tensor, answers: int, seed: int) -> Samples:
        """*answers* answers to each prompt, all from one version of the weights."""
        if not self._free.acquire(timeout=LIMIT_S):
            raise RefitError(f"shard {self.shard} has been paused for {LIMIT_S:g} s")
        try:
            if self.version is None:
                raise RefitError(f"shard {self.shard} was never sent any weights")
            generator = torch.Generator(self.device).manual_seed(seed)
            tokens, logps = prompts.repeat_interleave(answers, 0).to(self.device), []
            for _ in range(self.shape.word):
                logp = self.model(tokens)[:, -1].log_softmax(-1)
                letter = torch.multinomial(logp.exp(), 1, generator=generator)
                tokens = torch.cat([tokens, letter], dim=1)
                logps.append(logp.gather(1, letter))
            return Samples(tokens.cpu(), torch.cat(logps, dim=1).cpu(), self.version, self.shard)
        finally:
            self._free.release()

    def pid(self) -> int:
        """The process to send a signal to."""
        return os.getpid()

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter."""
        return checksums(self.model)
