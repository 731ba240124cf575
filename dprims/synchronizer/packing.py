"""Moving tensors into a flat buffer, at the speed of the device's own copy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["dtype_of", "flat", "pack", "raw"]


def pack(buffer: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Copy `tensors` to their `offsets` in `buffer`, and fill the gaps with zeros.

    Neighbours of one dtype go in one `torch.cat`, one-byte types as 4-byte words where they fit: with
    elements of two bytes and more `torch.cat(out=)` packs at a GPU's own copy speed, with bytes at half of
    it.
    """
    if _uniform(tensors, offsets, buffer.numel()):
        torch.cat(list(tensors), out=buffer.view(tensors[0].dtype).view(-1, *tensors[0].shape[1:]))
        return
    run: list[Tensor] = []
    start = position = 0

    def flush() -> None:
        if run:
            target = buffer[start:position].view(run[0].dtype)
            torch.cat(run, out=target)
            run.clear()

    ends = [*offsets[1:], buffer.numel()]
    for tensor, offset, end in zip(tensors, offsets, ends, strict=True):
        nbytes = tensor.nbytes
        words = _as_words(tensor)
        if words is None:
            flush()
            if nbytes:
                buffer[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            buffer[offset + nbytes : end].zero_()
            start = position = end
            continue
        if run and run[0].dtype != words.dtype:
            flush()
        if not run:
            start = offset
        run.append(words)
        gap = end - offset - nbytes
        if gap:
            run.append(_zeros(words.dtype, buffer.device, gap // words.element_size()))
        position = end
    flush()


def _uniform(tensors: Sequence[Tensor], offsets: Sequence[int], nbytes: int) -> bool:
    """Whether tensors such as experts fill a buffer as they are: a view of each costs more than its copy."""
    if not tensors or tensors[0].dtype not in _CAT_DTYPES or not tensors[0].dim():
        return False
    shapes = [tensor.shape for tensor in tensors]
    sizes = {shape: shape.numel() * tensors[0].element_size() for shape in set(shapes)}
    return (
        len({shape[1:] for shape in sizes}) == 1
        and list(accumulate(map(sizes.__getitem__, shapes), initial=0)) == [*offsets, nbytes]
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(map(Tensor.is_contiguous, tensors))
        and nbytes > 0
    )


def _as_words(tensor: Tensor) -> Tensor | None:
    """The tensor flat, in elements that `torch.cat` packs fast; None when it has to be copied by itself."""
    if not tensor.is_contiguous() or not tensor.numel():
        return None
    if tensor.dtype in _CAT_DTYPES:
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    size = tensor.element_size()
    if tensor.nbytes % 4 or tensor.storage_offset() * size % 4:
        return None
    return flat(tensor).view(torch.int32)


_CAT_DTYPES = frozenset(
    (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.float64)
)
_DTYPES: dict[str, torch.dtype] = {}
_PADS: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _zeros(dtype: torch.dtype, device: torch.device, count: int) -> Tensor:
    pad = _PADS.get((dtype, device))
    if pad is None or pad.numel() < count:
        pad = _PADS[dtype, device] = torch.zeros(max(count, 256), dtype=dtype, device=device)
    return pad[:count]


def flat(tensor: Tensor) -> Tensor:
    """The tensor's bytes, one-dimensional; a copy only when it is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def raw(tensor: Tensor) -> bytes:
    """The tensor's bytes in host memory, without numpy, through which torch's own way goes."""
    host = tensor.detach().cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.nbytes)


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of that name."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        dtype = _DTYPES[name] = getattr(torch, name)
    return dtype
