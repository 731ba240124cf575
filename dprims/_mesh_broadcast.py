"""Send any picklable object from the head of a group to its members, tensors beside the pickle.

The head's object is pickled with every tensor replaced by a number. The pickle and the shapes travel
first; then the tensors, as bytes: small ones packed together, large ones straight from and into their own
memory. What cannot be sent is told to every rank, so that nobody waits for a head that has failed.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .exceptions import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LARGE = 1 << 20
"""From this many bytes on a tensor travels alone."""
_PARCEL = 64 << 20
"""How many bytes of small tensors travel together at most."""
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Route:
    """One group as this rank sees it.

    `wires` maps a device type to the group that carries tensors of it: the group itself, its CPU twin, or
    none, in which case they are staged through `device`.
    """

    name: str
    ranks: tuple[int, ...]
    is_head: bool
    device: torch.device
    control: dist.ProcessGroup
    wires: dict[str, dist.ProcessGroup]


@dataclass(frozen=True, slots=True)
class _Spec:
    """What a receiver has to know of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Header:
    """What travels first: the pickle and the tensors that belong into it, or what went wrong."""

    body: bytes = b""
    specs: tuple[_Spec, ...] = ()
    failure: str = ""


def broadcast(obj: Any, route: Route) -> Any:
    """Return the head's object on every rank of the group; see `Meshes.broadcast_from_head`."""
    if len(route.ranks) == 1:
        return obj
    tensors: list[torch.Tensor] = []
    header, cause = _Header(), None
    if route.is_head:
        try:
            body, tensors = _pack(obj, ("cpu", route.device.type))
            specs = tuple(_Spec(tensor.dtype, tuple(tensor.shape), tensor.device.type) for tensor in tensors)
            header = _Header(body, specs)
        except Exception as error:  # noqa: BLE001 - whatever pickling raises; every rank has to hear of it
            header, cause = _Header(failure=f"{type(error).__name__}: {error}"), error
    box: list[Any] = [header]
    dist.broadcast_object_list(box, group_src=0, group=route.control)
    header = box[0]
    if header.failure:
        who = f"rank {route.ranks[0]}, head of {route.name} {list(route.ranks)}"
        raise MeshError(f"{who}, cannot send its object: {header.failure}") from cause

    received: list[torch.Tensor | None] = [None] * len(header.specs)
    for parcel in _parcels(header.specs, route):
        _carry(parcel, header.specs, tensors, received, route)
    return obj if route.is_head else _Unpickler(header.body, received).load()


def _pack(obj: Any, device_types: Sequence[str]) -> tuple[bytes, list[torch.Tensor]]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, device_types)
    pickler.dump(obj)
    return buffer.getvalue(), pickler.tensors


class _Pickler(pickle.Pickler):
    """Takes the tensors out of a pickle; one that occurs twice is sent once."""

    def __init__(self, buffer: io.BytesIO, device_types: Sequence[str]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.device_types = device_types
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout != torch.strided:
            raise TypeError(f"a {type(obj).__name__} of layout {obj.layout}: only plain dense tensors travel")
        if obj.device.type not in self.device_types:
            raise TypeError(f"a tensor on {obj.device}: expected {' or '.join(self.device_types)}")
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj.detach())
        return self.numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes, tensors: Sequence[torch.Tensor | None]) -> None:
        super().__init__(io.BytesIO(body))
        self.tensors = tensors

    def persistent_load(self, pid: int) -> Any:
        return self.tensors[pid]


def _parcels(specs: Sequence[_Spec], route: Route) -> Iterator[list[int]]:
    """Yield the numbers of the tensors that travel together; the same on every rank."""
    small: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for number, spec in enumerate(specs):
        if spec.nbytes >= _LARGE:
            yield [number]
            continue
        wire = _wire(spec, route).type
        small.setdefault(wire, []).append(number)
        sizes[wire] = sizes.get(wire, 0) + _padded(spec)
        if sizes[wire] >= _PARCEL:
            yield small.pop(wire)
            sizes[wire] = 0
    yield from small.values()


def _padded(spec: _Spec) -> int:
    return -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT


def _wire(spec: _Spec, route: Route) -> torch.device:
    """Return the device from which and to which a tensor travels."""
    return torch.device("cpu") if spec.device_type == "cpu" and "cpu" in route.wires else route.device


def _carry(
    parcel: list[int],
    specs: Sequence[_Spec],
    tensors: Sequence[torch.Tensor],
    received: list[torch.Tensor | None],
    route: Route,
) -> None:
    """Broadcast the tensors of one parcel; on a receiver fill in `received`."""
    device = _wire(specs[parcel[0]], route)
    group = route.wires[device.type]
    if len(parcel) == 1:
        (number,) = parcel
        spec = specs[number]
        tensor = (
            tensors[number].to(device).contiguous()
            if route.is_head
            else torch.empty(spec.shape, dtype=spec.dtype, device=device)
        )
        if spec.nbytes:
            dist.broadcast(_as_bytes(tensor), group_src=0, group=group)
        received[number] = tensor.to(spec.device_type) if spec.device_type != device.type else tensor
        return

    buffer = torch.empty(sum(_padded(specs[number]) for number in parcel), dtype=torch.uint8, device=device)
    places, offset = [], 0
    for number in parcel:
        places.append(buffer[offset : offset + specs[number].nbytes])
        offset += _padded(specs[number])
    if route.is_head:
        for number, place in zip(parcel, places, strict=True):
            place.copy_(_as_bytes(tensors[number].contiguous()))
    if offset:
        dist.broadcast(buffer, group_src=0, group=group)
    for number, place in zip(parcel, places, strict=True):
        spec = specs[number]
        # A copy, so that one small tensor does not keep the whole buffer.
        received[number] = place.to(spec.device_type, copy=True).view(spec.dtype).view(spec.shape)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
