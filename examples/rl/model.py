"""The task and the model: write a word of four letters backwards, as a small transformer over characters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STAGES = 2
"""Pipeline stages of the trainer."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the task and of the model."""

    letters: int = 8
    word: int = 4
    width: int = 64
    heads: int = 4
    layers: int = 4

    @property
    def length(self) -> int:
        """Tokens of a prompt and its answer: the word, a bar, the word backwards."""
        return 2 * self.word + 1

    def layers_of(self, stage: int) -> range:
        """The layers of one pipeline stage."""
        each = self.layers // STAGES
        return range(stage * each, (stage + 1) * each)


def prompts(shape: Shape, count: int, generator: torch.Generator) -> Tensor:
    """Random words, each followed by the bar that asks for the answer."""
    words = torch.randint(shape.letters, (count, shape.word), generator=generator)
    return torch.cat([words, torch.full((count, 1), shape.letters)], dim=1)


def reward(shape: Shape, tokens: Tensor) -> Tensor:
    """For each row the share of letters that are right. It is computed, not learned."""
    wanted, answer = tokens[:, : shape.word].flip(1), tokens[:, shape.word + 1 :]
    return (wanted == answer).float().mean(dim=1)


def spelled(shape: Shape, row: Tensor) -> str:
    """A row as text, such as ``abca>acba``."""
    return "".join(">" if token == shape.letters else chr(ord("a") + token) for token in row.tolist())


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Some layers of the model: all of them in a sampler, one pipeline stage's in a trainer.

    The names of its parameters are those of the whole model. The first layers take tokens and embed them,
    the last ones give logits over the letters; all others take and give activations.
    """

    def __init__(self, shape: Shape, layers: range) -> None:
        super().__init__()
        self.first, self.last = layers.start == 0, layers.stop == shape.layers
        if self.first:
            self.token = nn.Embedding(shape.letters + 1, shape.width)
            self.position = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleDict({str(layer): Block(shape.width, shape.heads) for layer in layers})
        if self.last:
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.letters)
            nn.init.zeros_(self.head.weight)  # so that the first samples are uniform

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations to activations or logits."""
        if self.first:
            x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x
