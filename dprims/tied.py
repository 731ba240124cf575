"""Find parameters of a model that share memory: tied weights, whatever their names.

Pipeline parallelism puts parameters on separate ranks, where two that are one drift apart. Names do not
tell (``lm_head.weight`` may or may not be ``embed_tokens.weight``), and neither does object identity
(two parameters can be views of one storage), so this compares storages and the bytes in use of each.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


@dataclass(frozen=True, slots=True)
class TiedParameters:
    """Names of parameters that share memory, with the pipeline stage of each where it is known."""

    names: tuple[str, ...]
    stages: tuple[int, ...] | None = None

    @property
    def on_one_stage(self) -> bool:
        """Whether all are known to live on the same pipeline stage, where sharing does no harm."""
        return self.stages is not None and len(set(self.stages)) == 1

    def __str__(self) -> str:
        if self.stages is None:
            return " = ".join(self.names)
        return " = ".join(
            f"{name} (stage {stage})" for name, stage in zip(self.names, self.stages, strict=True)
        )


def find_tied_parameters(
    model: torch.nn.Module, *, stage_of: Callable[[str], int] | None = None
) -> tuple[TiedParameters, ...]:
    """Return every set of parameters of `model` that share memory, in the order of their first names.

    Two parameters are tied when they use the same bytes of one storage; two slices that do not overlap are
    not. Works on the meta device too, where nothing is allocated. `stage_of` maps a parameter's name to
    the pipeline stage that will hold it; without it stages are unknown. Local.

    Pass the model before it is split over stages: a rank that holds one stage cannot see the other.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    storages: list[torch.UntypedStorage] = []  # keeps the ids below from being used again
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensor = _local(parameter)
        if tensor.numel():
            storages.append(tensor.untyped_storage())
            by_storage[id(storages[-1])].append((name, tensor))
    tied = [names for shared in by_storage.values() for names in _overlapping(shared)]
    return tuple(TiedParameters(names, tuple(map(stage_of, names)) if stage_of else None) for names in tied)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a parameter: a DTensor's shard, or the parameter itself."""
    to_local = getattr(parameter, "to_local", None)
    return to_local() if to_local else parameter.detach()


def _overlapping(parameters: list[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, ...]]:
    """Return the names that use common bytes, joined transitively."""
    sets = {name: {name} for name, _ in parameters}
    for (first, one), (second, other) in combinations(parameters, 2):
        if sets[first] is not sets[second] and _share_bytes(one, other):
            sets[first] |= sets[second]
            for name in sets[second]:
                sets[name] = sets[first]
    order = [name for name, _ in parameters]
    distinct = {id(names): names for names in sets.values()}.values()
    return [tuple(sorted(names, key=order.index)) for names in distinct if len(names) > 1]


def _share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have a byte in common."""
    low, high = _span(one)
    other_low, other_high = _span(other)
    if high <= other_low or other_high <= low:
        return False
    if _is_dense(one) or _is_dense(other):
        return True
    return _marks_meet(one, other, min(low, other_low), max(high, other_high))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * size


def _is_dense(tensor: torch.Tensor) -> bool:
    low, high = _span(tensor)
    return high - low == tensor.numel() * tensor.element_size()


def _marks_meet(one: torch.Tensor, other: torch.Tensor, low: int, high: int) -> bool:
    """Compare two interleaved tensors byte by byte, on a map of the storage between `low` and `high`."""
    import torch

    used = torch.zeros(high - low, dtype=torch.bool, device="cpu")

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size()
        start = tensor.storage_offset() * size - low
        return used.as_strided(
            (*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1), start
        )

    bytes_of(one).fill_(True)
    return bool(bytes_of(other).any())
