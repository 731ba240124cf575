"""Synthetic weights for tests and staging runs: a source that changes, and a sink that tells what it holds.

Both can be built in another process by name (``LocalPolicy(ToySource, ...)``), and both give checksums, so
that a test can say which whole version a shard is at, or that it is at none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..backend import need
from ..synchronizer import DictSink, DictSource

if TYPE_CHECKING:
    import torch
else:
    torch = need("torch", "torch")


def toy_tensors(stage: int, layers: int, width: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The zeros that a stage of *layers* square layers with biases has."""
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        tensors[f"stage{stage}.{layer}.weight"] = torch.zeros(width, width, device=device)
        tensors[f"stage{stage}.{layer}.bias"] = torch.zeros(width, device=device)
    return tensors


class ToySource(DictSource):
    """The weights of one stage; :meth:`step` makes the next version of them."""

    def __init__(self, stage: int, layers: int = 4, width: int = 128, device: str = "cpu") -> None:
        self.stage, self.steps = stage, 0
        self.tensors = toy_tensors(stage, layers, width, device)
        super().__init__(self.tensors)
        self.step()

    def step(self) -> str:
        """Change every weight, as an optimiser does; returns the new checksum."""
        self.steps += 1
        generator = torch.Generator().manual_seed(1000 * self.stage + self.steps)
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return self.checksum()

    def checksum(self) -> str:
        """SHA-256 of all bytes."""
        return checksum(self.tensors, self.stage)


class ToySink(DictSink):
    """Room for the weights of all *stages*; counts what it is told to do."""

    def __init__(
        self,
        shard: int,
        worker: int,
        stages: int,
        layers: int = 4,
        width: int = 128,
        in_place: bool = False,
        device: str = "cpu",
    ) -> None:
        self.stages, self.told = stages, list[str]()
        every: dict[str, torch.Tensor] = {}
        for stage in range(stages):
            every |= toy_tensors(stage, layers, width, device)
        super().__init__(every, in_place=in_place)

    def pause(self) -> None:
        """Stop serving."""
        self.told.append("pause")

    def commit(self, version: int) -> None:
        """Take the staged weights over."""
        self.told.append(f"commit {version}")
        super().commit(version)

    def after_commit(self) -> None:
        """Reset what depends on the weights."""
        self.told.append("after_commit")

    def resume(self) -> None:
        """Serve again."""
        self.told.append("resume")

    def checksums(self) -> list[str]:
        """SHA-256 of the bytes of each stage."""
        return [checksum(self.tensors, stage) for stage in range(self.stages)]

    def history(self) -> list[str]:
        """What this sink was told to do, in order."""
        return self.told


def checksum(tensors: Mapping[str, torch.Tensor], stage: int) -> str:
    """SHA-256 of a stage's bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if name.startswith(f"stage{stage}."):
            digest.update(bytes(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()))
    return digest.hexdigest()
