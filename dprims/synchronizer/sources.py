"""Where a sender's weights come from: a dict, a module (sharded or not), or a safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backend import need
from ..exceptions import RefitError
from .gathering import gather, is_sharded
from .interfaces import BatchedSource, WeightSource
from .packing import dtype_of
from .plan import Plan, TensorMeta

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["DictSource", "ModuleSource", "SafetensorsSource", "in_plan_order", "state_of", "ties_of"]


class DictSource:
    """The tensors of a mapping, in its order. Entries that are the same memory travel once.

    Args:
        tensors: name -> tensor; read anew at each refit, so entries may be replaced between two.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        check_tensors("DictSource", tensors, Mapping)
        self.tensors = tensors
        self._known: dict[str, TensorMeta] = {}

    def metadata(self) -> Sequence[TensorMeta]:
        """See `WeightSource`."""
        self._known = _describe(self.tensors, self._known)
        return tuple(self._known.values())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        shared = _still_tied(self.tensors, self._known)
        return ((name, tensor) for name, tensor in self.tensors.items() if name not in shared)


class ModuleSource:
    """The state dict of a module: parameters and persistent buffers. Tied parameters travel once.

    DTensors (FSDP2, tensor parallel) are gathered bucket by bucket in the order of the plan, a collective of
    all ranks that hold a shard: the sender iterates in `send`, the others in `participate`. While a bucket is
    gathered the one before is on the wire. Offloaded tensors are brought to `device`, on a GPU by copies that
    the wire does not wait for.

    Args:
        module: its state dict is read anew at each refit.
        names: the name under which a state-dict entry travels, None to leave it out; by default all, as is.
        device: where tensors are to be; by default where they are.
        dtype: floating-point tensors of two bytes an element and more are cast to it; by default not.
    """

    def __init__(
        self,
        module: Module,
        *,
        names: Callable[[str], str | None] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_module("ModuleSource", module, names)
        self._module = module
        self._names = names
        self._device = torch.device(device) if device is not None else None
        self._dtype = dtype
        self._known: dict[str, TensorMeta] = {}

    def metadata(self) -> Sequence[TensorMeta]:
        """See `WeightSource`. Shapes are the full ones."""
        self._known = _describe(self._entries(), self._known, self._dtype)
        return tuple(self._known.values())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        entries = self._entries()
        names = self._untied(entries)
        ones = self._whole(entries, [[name] for name in names])
        return zip(names, (one[0].detach() for one in ones), strict=True)

    def in_batches(self, batches: Sequence[Sequence[str]]) -> Iterator[Sequence[Tensor]]:
        """See `BatchedSource`."""
        entries = self._entries()
        asked = [name for batch in batches for name in batch]
        for due, name in zip_longest(self._untied(entries), asked):
            if due != name:
                raise RefitError(f"the module's next tensor is {due!r}, the plan's is {name!r}: plan again")
        return self._whole(entries, batches)

    def _whole(
        self, entries: Mapping[str, Tensor], batches: Sequence[Sequence[str]]
    ) -> Iterator[Sequence[Tensor]]:
        for batch in batches:
            with torch.no_grad():
                whole = gather([entries[name] for name in batch], self._device)
                unchanged = self._device is None and self._dtype is None
                brought = whole if unchanged else [self._brought(tensor) for tensor in whole]
            yield brought

    def _brought(self, tensor: Tensor) -> Tensor:
        device, dtype = self._device or tensor.device, _cast(tensor.dtype, self._dtype)
        # a copy to the host that is not waited for may be read before it is done
        return tensor.to(device=device, dtype=dtype, non_blocking=device.type == "cuda")

    def _entries(self) -> dict[str, Tensor]:
        return state_of(self._module, self._names)

    def _untied(self, entries: Mapping[str, Tensor]) -> list[str]:
        """The names whose bytes travel."""
        shared = _still_tied(entries, self._known)
        return [name for name in entries if name not in shared]


class SafetensorsSource:
    """The tensors of a safetensors file, read from its memory map when they are sent.

    Args:
        path: the file.
        names: which tensors, by name; by default all.
        device: where they are sent from.

    Raises:
        RefitError: the file is missing, truncated, or no safetensors file.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        names: Callable[[str], bool] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._path = Path(path)
        self._names = names
        self._device = str(device)
        self._metas = self._read_header()

    def metadata(self) -> Sequence[TensorMeta]:
        """See `WeightSource`."""
        return self._metas

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with self._open() as file:
            for meta in self._metas:
                yield meta.name, file.get_tensor(meta.name)

    def _open(self) -> Any:
        safetensors = need("safetensors", "demo")
        try:
            return safetensors.safe_open(self._path, framework="pt", device=self._device)
        except (OSError, safetensors.SafetensorError) as error:
            raise RefitError(f"{self._path} cannot be read as a safetensors file: {error}") from error

    def _read_header(self) -> list[TensorMeta]:
        metas = []
        with self._open() as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if self._names is None or self._names(name):
                    part = file.get_slice(name)
                    dtype = _SAFETENSORS.get(part.get_dtype(), part.get_dtype())
                    metas.append(TensorMeta(name, tuple(part.get_shape()), dtype))
        return metas


_SAFETENSORS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32":
    "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64":
    "float64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64":
    "complex64",
}  # fmt: skip


def check_tensors(who: str, tensors: object, kind: type) -> None:
    """RefitError unless *who* was given a mapping of tensors. Only a dict's values are looked at.

    Another mapping may make them when it is asked.
    """
    if not isinstance(tensors, kind):
        raise RefitError(f"{who} was given a {type(tensors).__name__}; expected a mapping of name -> tensor")
    for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise RefitError(
                f"{who} was given a {type(tensor).__name__} as {name!r}; expected name -> tensor"
            )


def check_module(who: str, module: object, names: object) -> None:
    """RefitError unless *who* was given something with a state dict, and *names* to call, or none."""
    if not callable(getattr(module, "state_dict", None)):
        raise RefitError(f"{who} was given a {type(module).__name__}; expected a torch.nn.Module")
    if names is not None and not callable(names):
        raise RefitError(
            f"{who}: names is a {type(names).__name__}; expected a function of the name, or None"
        )


def state_of(module: Module, names: Callable[[str], str | None] | None) -> dict[str, Tensor]:
    """The tensors of a module's state dict themselves, under the names that `names` gives them.

    Raises RefitError where two of them would have one name.
    """
    entries: dict[str, Tensor] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        name = names(key) if names is not None else key
        if name is None or not isinstance(value, Tensor):
            continue
        if entries.setdefault(name, value) is not value:
            raise RefitError(f"names gives {name!r} to {key!r}, and to another entry of the state dict")
    return entries


def in_plan_order(
    source: WeightSource, plan: Plan, device: torch.device, kv_scales: Mapping[str, float]
) -> Iterator[Tensor]:
    """The source's tensors, each held against the plan. For use where autograd records nothing."""
    expected = plan.tensors[: len(plan.tensors) - bool(plan.kv_scales)]
    dtypes = {dtype: dtype_of(dtype) for dtype in {meta.dtype for meta in expected}}
    count = 0
    for name, tensor in _pull(source, plan, len(expected)):
        meta = expected[count] if count < len(expected) else None
        if meta is None or name != meta.name:
            raise RefitError(_astray(name, count, plan, meta))
        if tensor.shape != meta.shape or tensor.dtype is not dtypes[meta.dtype]:
            raise RefitError(f"the source yields {tensor.dtype}{list(tensor.shape)} for {meta}: plan again")
        if tensor.device != device:
            raise RefitError(f"{meta} is on {tensor.device}, the group is on {device}")
        yield tensor
        count += 1
    if count < len(expected):
        left = len(expected) - count
        raise RefitError(f"the source ended before {expected[count]}: {left} of {len(expected)} are missing")
    if plan.kv_scales:
        missing = [name for name in plan.kv_scales if name not in kv_scales]
        if missing:
            raise RefitError(f"no value for the scale {missing[0]!r}, one of {len(plan.kv_scales)}")
        yield torch.tensor([kv_scales[n] for n in plan.kv_scales], dtype=torch.float32, device=device)


def _pull(source: WeightSource, plan: Plan, count: int) -> Iterator[tuple[str, Tensor]]:
    """The first `count` tensors of a plan: bucket by bucket from a source that can, else one by one."""
    if not isinstance(source, BatchedSource):
        yield from source
        return
    # a bucket's tensors begin behind those of the bucket before, empty ones included
    stops = [min(bucket.pieces[-1].tensor + 1, count) for bucket in plan.buckets if bucket.pieces]
    batches = [
        [meta.name for meta in plan.tensors[start:stop]]
        for start, stop in pairwise([0, *stops, count])
        if start < stop
    ]
    for batch, tensors in zip(batches, source.in_batches(batches), strict=True):
        yield from zip(batch, tensors, strict=True)


def _astray(name: str, count: int, plan: Plan, expected: TensorMeta | None) -> str:
    due = f"due is {expected}" if expected is not None else "nothing is due any more"
    place = next((i for i, meta in enumerate(plan.tensors) if meta.name == name), None)
    if place is None:
        what = "which is an alias" if name in dict(plan.aliases) else "which is not in the plan"
    else:
        what = "for the second time" if place < count else f"out of turn (it is tensor {place})"
    return f"the source yields {name!r} as tensor {count}, {what}; {due}"


def _describe(
    tensors: Mapping[str, Tensor], known: Mapping[str, TensorMeta], dtype: torch.dtype | None = None
) -> dict[str, TensorMeta]:
    """What a receiver is told of each, once it is cast to *dtype*; what is *known* and still holds is reused.

    With thousands of tensors, to make what says the same as before is most of the time before the first byte.
    """
    shared = ties_of(tensors)
    described = {}
    for name, tensor in tensors.items():
        sent = _cast(tensor.dtype, dtype)
        kind, alias = _name_of(sent), shared.get(name)
        strided = not (sent is not tensor.dtype or tensor.is_contiguous() or is_sharded(tensor))
        meta = known.get(name)
        if meta is None or (meta.shape, meta.dtype, meta.alias_of, meta.strided) != (
            tensor.shape,
            kind,
            alias,
            strided,
        ):
            meta = TensorMeta(name, tuple(tensor.shape), kind, alias, strided)
        described[name] = meta
    return described


def _cast(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Floating-point tensors of two bytes an element and more are cast."""
    return wanted if wanted is not None and dtype.is_floating_point and dtype.itemsize > 1 else dtype


def _still_tied(tensors: Mapping[str, Tensor], known: Mapping[str, TensorMeta]) -> dict[str, str]:
    """Names whose bytes do not travel, since they are another's, as was *known* when it was planned.

    What is tied only since then travels twice. To look for ties once more would cost thousands of tensors a
    third of their time. Raises RefitError for two that are tied no more.
    """
    if not known:
        return ties_of(tensors)
    shared = {}
    for name, meta in known.items():
        if (owner := meta.alias_of) is not None and name in tensors:
            if owner not in tensors or not _alike(tensors[name], tensors[owner]):
                raise RefitError(f"{name!r} is no longer tied to {owner!r}: plan again")
            shared[name] = owner
    return shared


def ties_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names whose tensor is, byte for byte, the memory of an earlier one -> that one's name."""
    first: dict[int, str] = {}
    shared = {}
    for name, tensor in tensors.items():
        # a sharded tensor, of which this rank may hold nothing, and one without an address of its own, such
        # as a wrapper of others, are themselves alone
        owner = first.setdefault((not is_sharded(tensor) and tensor.data_ptr()) or id(tensor), name)
        if owner is not name and tensor.numel() and _alike(tensor, tensors[owner]):
            shared[name] = owner
    return shared


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same memory, seen in the same way."""
    if a is b:
        return True
    return not is_sharded(a) and 0 != a.data_ptr() == b.data_ptr() and _seen_as(a) == _seen_as(b)


def _seen_as(tensor: Tensor) -> tuple[Any, ...]:
    """What tells apart two tensors on the same memory."""
    lazily = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), lazily


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
