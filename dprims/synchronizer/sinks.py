"""Where a receiver's weights go: a dict, a module, or an engine's own loader.

All of them stage by default: bytes arrive in memory that the sink lends, and `commit` makes them live. With
`in_place=True` there is no staging: what arrives is live at once, and a transfer that is cut leaves a
mixture.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..exceptions import HandshakeMismatch, RefitError
from .memory import Memory
from .packing import flat
from .plan import Bucket, Plan, TensorMeta
from .sources import check_module, check_tensors, state_of, ties_of

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["DictSink", "LoadWeightsSink", "ModuleSink"]


class _Sink:
    """Staging, lending and versions: what the sinks of this file have in common.

    A subclass says which tensors it holds (`_live`) and how staged ones become live (`_adopt`).

    Attributes:
        version: the version that is live; None before the first commit.
        torn: whether live weights may be a mixture: from the first byte in place until the next commit.
    """

    def __init__(self, *, in_place: bool, device: torch.device | None) -> None:
        self.in_place = in_place
        self.version: int | None = None
        self._device = device
        self._memory: Memory | None = None
        self._staged: dict[str, Tensor] = {}
        self._lent: list[int] = []
        self._coming: int | None = None
        self._compared: tuple[tuple[TensorMeta, ...], dict[str, tuple[torch.Size, torch.dtype]]] = (), {}
        self.torn = False

    @property
    def _into_live(self) -> bool:
        """Whether what comes is copied into the live tensors; otherwise it takes their place."""
        return self.in_place

    def _live(self) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def _adopt(self, staged: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    def holds(self, name: str) -> bool:
        """See `LendingSink`."""
        return name in self._live()

    def begin(self, version: int, metas: Sequence[TensorMeta]) -> None:
        """See `WeightSink`. Every tensor that the sink holds must come, in its shape and dtype.

        Raises HandshakeMismatch, which names the first tensor that does not.
        """
        # with many tensors comparing takes longer than sending: once is enough, until one of both changes
        both = tuple(metas), {name: (tensor.shape, tensor.dtype) for name, tensor in self._live().items()}
        if both != self._compared:
            self._compare(both[0])
            self._compared = both
        self._forget()
        self._coming = version

    def _compare(self, metas: Sequence[TensorMeta]) -> None:
        coming = {meta.name: meta for meta in metas}
        for name, tensor in self._live().items():
            meta = coming.get(name)
            here = TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if meta is None:
                raise HandshakeMismatch(f"the sink holds {here}, which is not sent: {len(metas)} tensors are")
            if (meta.shape, meta.dtype) != (here.shape, here.dtype):
                raise HandshakeMismatch(f"the sink holds {here}, and {meta} is sent")
        for name, owner in ties_of(self._live()).items() if self._into_live else ():
            if (coming[name].alias_of or name) != (coming[owner].alias_of or owner):
                raise HandshakeMismatch(f"the sink has tied {name!r} to {owner!r}, and they are sent as two")

    def staging_bytes(self, plan: Plan) -> int:
        """See `LendingSink`."""
        if self.in_place:
            return 0
        held_aliases = Counter(name for alias, name in plan.aliases if self.holds(alias))
        total = 0
        for bucket in plan.buckets:
            names = [plan.tensors[piece.tensor].name for piece in bucket.pieces]
            held = [self.holds(name) for name in names]
            if bucket.whole and all(held):
                total += bucket.nbytes
                continue
            for piece, name, itself in zip(bucket.pieces, names, held, strict=True):
                copies = itself + held_aliases[name]
                # a large one arrives in memory that all its names share, of others each name keeps a copy
                total += (piece.stop - piece.start) * (min(1, copies) if bucket.lane == "direct" else copies)
        return total

    def lend_bucket(self, plan: Plan, bucket: Bucket) -> Tensor | None:
        """See `LendingSink`: a bucket whose tensors are all held becomes the staging of all of them."""
        if self.in_place or not all(self.holds(plan.tensors[piece.tensor].name) for piece in bucket.pieces):
            return None
        return self._lend(bucket.nbytes)

    def lend_tensor(self, meta: TensorMeta) -> Tensor | None:
        """See `LendingSink`."""
        if not self.in_place:
            return self._lend(meta.nbytes)
        live = self._live()[meta.name].detach()
        if not live.is_contiguous() or live.is_conj() or live.is_neg():
            return None
        memory = flat(live)
        self._note_lent(memory)
        # it may be written to from now on, whether or not this process hears of it
        self.torn = True
        return memory

    def write(self, name: str, tensor: Tensor) -> None:
        """See `WeightSink`."""
        if self.holds(name):
            self._keep({name: tensor}, lent=False)

    def write_bucket(self, tensors: Mapping[str, Tensor], *, lent: bool) -> None:
        """See `LendingSink`. Who put a `write` of their own in its place has it called for each."""
        if self.write != MethodType(_Sink.write, self):
            for name, tensor in tensors.items():
                self.write(name, tensor)
            return
        held = (
            tensors if all(map(self.holds, tensors)) else {n: t for n, t in tensors.items() if self.holds(n)}
        )
        if held:
            self._keep(held, lent=lent)

    def _keep(self, tensors: Mapping[str, Tensor], *, lent: bool) -> None:
        """Stage tensors that the sink holds, or make them live."""
        if self.in_place:
            self.torn = True
            if coming := self._elsewhere(tensors):
                self._adopt(coming)
        elif lent:
            self._staged.update(tensors)
        else:
            for name, tensor in tensors.items():
                self._staged[name] = tensor if self._was_lent(tensor) else tensor.clone()

    def _elsewhere(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those that have not arrived where they are live."""
        if not self._lent:
            return tensors
        live = self._live()
        return {
            name: tensor
            for name, tensor in tensors.items()
            if not (self._was_lent(tensor) and live[name].data_ptr() == tensor.data_ptr())
        }

    def commit(self, version: int) -> None:
        """See `WeightSink`.

        Raises RefitError when another version is staged, or none.
        """
        if self._coming is None and self.version == version and not self.torn:
            return
        if self._coming != version:
            raise RefitError(f"version {version} is to be committed, staged is {self._coming}")
        if not self.in_place:
            missing = [name for name in self._live() if name not in self._staged]
            if missing:
                raise RefitError(
                    f"version {version} is staged without {missing[0]!r}, {len(missing)} are missing"
                )
            if self._memory is not None:
                self._memory.trim()
            self._adopt(self._staged)
        self.version = version
        self.torn = False
        self._forget()

    def rollback(self) -> None:
        """See `WeightSink`. What was received in place stays, and stays `torn`."""
        self._forget()

    def _forget(self) -> None:
        self._staged = {}
        self._lent = []
        self._coming = None

    def _lend(self, nbytes: int) -> Tensor:
        where = self._where()
        if self._memory is None or self._memory.device != where:
            self._memory = Memory(where)
        memory = self._memory.take(nbytes)
        self._note_lent(memory)
        return memory

    def _note_lent(self, memory: Tensor) -> None:
        start = memory.data_ptr()
        at = bisect_right(self._lent, start)
        self._lent[at:at] = (start, start + memory.numel())

    def _was_lent(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in lent memory: between a start and its end, of which the list is made."""
        return bisect_right(self._lent, tensor.data_ptr()) % 2 == 1

    def _where(self) -> torch.device:
        if self._device is not None:
            return self._device
        first = next(iter(self._live().values()), None)
        return first.device if first is not None else torch.device("cpu")


class DictSink(_Sink):
    """A mapping of name -> tensor.

    Args:
        tensors: holds, at each refit, what is to be received. `commit` replaces its values by new tensors:
            who keeps an old one keeps the old weights. Names that the sender has tied may share one tensor
            from then on, also where they had one each.
        in_place: write into the tensors themselves while they arrive.
    """

    def __init__(self, tensors: MutableMapping[str, Tensor], *, in_place: bool = False) -> None:
        check_tensors("DictSink", tensors, MutableMapping)
        super().__init__(in_place=in_place, device=None)
        self.tensors = tensors

    def _live(self) -> Mapping[str, Tensor]:
        return self.tensors

    def _adopt(self, staged: Mapping[str, Tensor]) -> None:
        if self.in_place:
            _copy_into(self.tensors, staged)
        else:
            self.tensors.update(staged)


class ModuleSink(_Sink):
    """The state dict of a module: parameters and persistent buffers keep their memory, `commit` copies into
    it.

    Args:
        module: an entry of its state dict, which is read anew at each refit, is received when `names` gives
            it a name.
        names: state-dict key -> the name that it travels under, or None when it does not come; by default
            as is.
        in_place: write into the parameters while they arrive; saves the staging.
    """

    def __init__(
        self, module: Module, *, names: Callable[[str], str | None] | None = None, in_place: bool = False
    ) -> None:
        check_module("ModuleSink", module, names)
        super().__init__(in_place=in_place, device=None)
        self._module = module
        self._names = names
        self._entries = state_of(module, names)

    def begin(self, version: int, metas: Sequence[TensorMeta]) -> None:
        """See `WeightSink`. What has replaced a parameter since the last refit is received from now on."""
        self._entries = state_of(self._module, self._names)
        super().begin(version, metas)

    @property
    def _into_live(self) -> bool:
        return True

    def _live(self) -> Mapping[str, Tensor]:
        return self._entries

    def _adopt(self, staged: Mapping[str, Tensor]) -> None:
        _copy_into(self._entries, staged)


class LoadWeightsSink(_Sink):
    """An engine that takes (name, tensor) pairs, as vLLM's and SGLang's `load_weights` do.

    Staged, it keeps all that comes (unsharded) and loads it at `commit`. With `in_place=True` each bucket is
    loaded as it arrives, which needs no memory, and a transfer that is cut leaves a mixture.

    Args:
        load_weights: called with an iterable of pairs; it copies what it needs before it returns.
        device: where the tensors are to arrive.
        in_place: load while bytes arrive.
    """

    def __init__(
        self,
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], Any],
        *,
        device: torch.device | str,
        in_place: bool = False,
    ) -> None:
        if not callable(load_weights):
            raise RefitError(
                f"LoadWeightsSink was given {load_weights!r}; expected the engine's load_weights"
            )
        super().__init__(in_place=in_place, device=torch.device(device))
        self._load = load_weights

    def holds(self, name: str) -> bool:
        """Everything: which names an engine takes is known to the engine alone."""
        return True

    def lend_tensor(self, meta: TensorMeta) -> Tensor | None:
        """See `LendingSink`; in place there is no memory to lend."""
        return None if self.in_place else self._lend(meta.nbytes)

    def _live(self) -> Mapping[str, Tensor]:
        return {}

    def _adopt(self, staged: Mapping[str, Tensor]) -> None:
        self._load(staged.items())


def _copy_into(live: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> None:
    into, of = [live[name] for name in staged], list(staged.values())
    with torch.no_grad():
        if any(map(Tensor.is_conj, into)) or any(map(Tensor.is_neg, into)):
            # those stand for others than they hold, which the call for many does not see
            for one, other in zip(into, of, strict=True):
                one.copy_(other)
        else:
            torch._foreach_copy_(into, of)
