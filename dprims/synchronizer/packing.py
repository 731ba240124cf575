"""Moving tensors into a flat buffer and seeing them there again, at the speed of the device's own copy.

With thousands of small tensors both sides wait for the host, which spends its time on a view of each.
Neighbours that differ in their first extent alone, such as the experts of a layer, are one tensor to torch,
which one call joins or cuts: these are *runs*, found once a plan.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .tables import PackTable

__all__ = ["Run", "dtype_of", "flat", "pack", "raw", "runs_of", "unpack"]


class Run(NamedTuple):
    """Tensors [first, last) of a buffer, without a gap between them, at its bytes [start, stop).

    They have one dtype, and the shape of the first one but for the first extent, which `rows` has of each;
    it is empty for a tensor by itself.
    """

    dtype: torch.dtype
    first: int
    last: int
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: tuple[int, ...]


def runs_of(
    dtypes: Iterable[torch.dtype], shapes: Sequence[Sequence[int]], offsets: Sequence[int]
) -> tuple[Run, ...]:
    """The runs of a buffer that holds such tensors at these offsets, in bytes; every tensor is in one."""
    runs: list[Run] = []
    kinds = list(dtypes)
    first = stop = 0

    def close(last: int) -> None:
        shape = tuple(shapes[first])
        rows = tuple(one[0] for one in shapes[first:last]) if last - first > 1 else ()
        runs.append(Run(kinds[first], first, last, offsets[first], stop, shape, _strides(shape), rows))

    for place, (dtype, shape, offset) in enumerate(zip(kinds, shapes, offsets, strict=True)):
        stacks = offset == stop and dtype == kinds[first] and _stack(shapes[first], shape)
        if place > first and not stacks:
            close(place)
            first = place
        stop = offset + math.prod(shape) * dtype.itemsize
    if kinds:
        close(len(kinds))
    return tuple(runs)


def _stack(first: Sequence[int], other: Sequence[int]) -> bool:
    """Whether tensors of these shapes can be parts of one, one behind the other along the first axis."""
    return bool(first and other and first[1:] == other[1:] and math.prod(first) and other[0])


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def unpack(buffer: Tensor, runs: Sequence[Run]) -> list[Tensor]:
    """The tensors of a buffer, flat uint8, as views of it."""
    views: list[Tensor] = []
    typed: dict[torch.dtype, tuple[Tensor, int]] = {}
    for run in runs:
        if run.rows:
            stack = buffer[run.start : run.stop].view(run.dtype).view(-1, *run.shape[1:])
            # unlike those of split, these may be written to while autograd records
            views += torch.unsafe_split_with_sizes(stack, run.rows)
            continue
        if run.dtype not in typed:
            base = buffer.view(run.dtype)
            typed[run.dtype] = base, int(base.storage_offset())
        base, offset = typed[run.dtype]
        views.append(base.as_strided(run.shape, run.strides, offset + run.start // run.dtype.itemsize))
    return views


@torch.no_grad()
def pack(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    offsets: Sequence[int],
    runs: Sequence[Run] | None = None,
    table: PackTable | None = None,
) -> None:
    """Copy `tensors` to their `offsets` in `buffer`, and fill the gaps with zeros.

    Neighbours of one dtype go in one `torch.cat`, one-byte types as 4-byte words where they fit: with
    elements of two bytes and more `torch.cat(out=)` packs at a GPU's own copy speed, with bytes at half of
    it. `runs` are those of the tensors, where they are known; `table` takes all of them at once.
    """
    if table is not None:
        _pack_by(table, buffer, tensors, offsets)
        return
    if runs is None:
        runs = runs_of([t.dtype for t in tensors], [t.shape for t in tensors], offsets)
    ends = [*offsets[1:], buffer.numel()]
    done = 0
    for run in runs:
        if not run.rows or run.dtype not in _CAT_DTYPES:
            continue
        _pack_singly(buffer, tensors[done : run.first], offsets[done : run.first], ends[done : run.first])
        stack = buffer[run.start : run.stop].view(run.dtype).view(-1, *run.shape[1:])
        torch.cat(list(tensors[run.first : run.last]), out=stack)
        done = run.last
        if run.stop < ends[done - 1]:
            buffer[run.stop : ends[done - 1]].zero_()
    _pack_singly(buffer, tensors[done:], offsets[done:], ends[done:])


def _pack_by(table: PackTable, buffer: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Pack by a table; what does not lie as it travels is copied there by torch, and then onto itself."""
    if not table.takes(tensors):
        tensors = list(tensors)
        for place, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
            if tensor.numel() and not table.takes([tensor]):
                packed = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                tensors[place] = packed.copy_(tensor)
    table.pack(buffer, tensors)


def _pack_singly(
    buffer: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], ends: Sequence[int]
) -> None:
    """Pack tensors that have nothing in common but where they go, and zeros up to the end of each."""
    run: list[Tensor] = []
    start = position = 0

    def flush() -> None:
        if run:
            torch.cat(run, out=buffer[start:position].view(run[0].dtype))
            run.clear()

    for tensor, offset, end in zip(tensors, offsets, ends, strict=True):
        nbytes = tensor.nbytes
        words = _as_words(tensor)
        if words is None:
            flush()
            if nbytes:
                buffer[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            buffer[offset + nbytes : end].zero_()
            continue
        if run and run[0].dtype != words.dtype:
            flush()
        if not run:
            start = offset
        run.append(words)
        gap = end - offset - nbytes
        if gap >= _LONG_GAP:
            position = end - gap
            flush()
            buffer[position:end].zero_()
            continue
        if gap:
            run.append(_zeros(words.dtype, buffer.device, gap // words.element_size()))
        position = end
    flush()


def _as_words(tensor: Tensor) -> Tensor | None:
    """The tensor flat, in elements that `torch.cat` packs fast; None when it has to be copied by itself."""
    if not tensor.is_contiguous():
        return None
    if tensor.dtype in _CAT_DTYPES:
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    if not tensor.numel() or tensor.nbytes % 4 or tensor.storage_offset() * tensor.element_size() % 4:
        return None
    return _row(tensor).view(torch.int32)


_CAT_DTYPES = frozenset(
    (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.float64)
)
_DTYPES: dict[str, torch.dtype] = {}
_PADS: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}
_LONG_GAP = 256
"""Bytes from which on a gap is none that an alignment leaves, and is zeroed where it is."""


def _zeros(dtype: torch.dtype, device: torch.device, count: int) -> Tensor:
    """Zeros to fill a short gap with, kept: there are not more lengths than it has elements."""
    pad = _PADS.get((dtype, device, count))
    if pad is None:
        pad = _PADS[dtype, device, count] = torch.zeros(count, dtype=dtype, device=device)
    return pad


def flat(tensor: Tensor) -> Tensor:
    """The tensor's bytes, one-dimensional; a copy only when they do not lie in memory like that."""
    return _row(tensor).view(torch.uint8)


def _row(tensor: Tensor) -> Tensor:
    """The tensor's elements one behind the other."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # one element is contiguous whatever its strides are
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))


def raw(tensor: Tensor) -> bytes:
    """The tensor's bytes in host memory, without numpy, through which torch's own way goes."""
    host = flat(tensor.detach().cpu())
    return ctypes.string_at(host.data_ptr(), host.nbytes)


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of that name."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        dtype = _DTYPES[name] = getattr(torch, name)
    return dtype
