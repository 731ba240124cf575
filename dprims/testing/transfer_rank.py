"""One rank of a weight group in a process of its own, for tests of the data path alone: no lock, no leader.

Lives in a `dprims.engines.process.WorkerProcess`; every argument and every answer travels by pickle.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engines.process import WorkerProcess
from ..exceptions import DprimsError
from ..synchronizer.graveyard import buried
from ..synchronizer.group import CommGroup, join_store, leader_store
from ..synchronizer.guard import CancelFlag, Guard
from ..synchronizer.packing import raw
from ..synchronizer.plan import Plan
from ..synchronizer.sinks import DictSink, LoadWeightsSink
from ..synchronizer.sources import DictSource
from ..synchronizer.transfer import TransferStats, receive, send
from .faults import FaultInjector, InjectedFault

__all__ = ["Outcome", "TransferFleet", "TransferRank", "checksum", "mixed_model", "share_gpu"]


Model = Callable[[int, torch.device], dict[str, Tensor]]

STACKS_S = 25.0
"""How long after its deadline a transfer that still runs writes the stacks of its process to stderr."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: in `seconds`, with an `error` or without, and what the rank holds now.

    `ended` is on the monotonic clock, which the processes of a machine share.
    """

    seconds: float
    error: Exception | None
    stats: TransferStats | None = None
    checksum: str = ""
    torn: bool = False
    buried: int = 0
    ended: float = 0.0


class TransferRank:
    """Rank `rank` of a group of `size`, which meet in the store at `host`:`port`."""

    def __init__(
        self, rank: int, size: int, host: str, port: int, device: str = "cpu", model: Model | None = None
    ) -> None:
        torch.set_num_threads(1)
        self._model = model or mixed_model
        self.rank, self.size = rank, size
        self.device = torch.device(device)
        if device == "cuda":
            self.device = share_gpu(rank, size)
        self._store = join_store(host, port)
        self._group: CommGroup | None = None
        self._cancel = CancelFlag()
        self._weights: dict[str, Tensor] = {}

    def build(
        self,
        prefix: str,
        *,
        timeout_s: float = 20.0,
        op_timeout_s: float = 30.0,
        record: Mapping[str, Any] | None = None,
        plan: bytes | None = None,
        members: Sequence[str] | None = None,
        refusal: str | None = None,
    ) -> Outcome:
        """Build a group; the one before is released."""
        if self._group is not None:
            self._group.release()
        start = time.monotonic()
        self._cancel = CancelFlag()
        guard = Guard(self._cancel, start + timeout_s, what=f"build on rank {self.rank}")
        try:
            self._group = CommGroup.build(
                self._store,
                prefix,
                self.rank,
                self.size,
                backend="nccl" if self.device.type == "cuda" else "gloo",
                device=self.device,
                timeout_s=timeout_s,
                op_timeout_s=op_timeout_s,
                guard=guard,
                record=record,
                plan=Plan.from_bytes(plan) if plan is not None else None,
                members=members,
                refusal=refusal,
            )
        except DprimsError as error:
            return Outcome(time.monotonic() - start, error)
        return Outcome(time.monotonic() - start, None)

    def transfer(
        self,
        plan: bytes,
        *,
        seed: int,
        timeout_s: float = 20.0,
        stall_timeout_s: float | None = None,
        verify: bool = True,
        faults: Sequence[Mapping[str, Any]] = (),
        sink: str = "dict",
        kv_scales: Mapping[str, float] | None = None,
        stacks_s: float | None = None,
    ) -> Outcome:
        """Send the model of `seed`, or receive it and commit it when nothing was raised.

        Args:
            plan: `Plan.to_bytes`.
            seed: of the model; receivers hold one of another seed before their first transfer.
            timeout_s, stall_timeout_s, verify, faults: as for `send` and `receive`.
            sink: "dict", "in place", "load" or "load in place".
            stacks_s: when a transfer that still runs writes its stacks; by default long after its deadline.
            kv_scales: values that the sender sends, and names that a receiver has place for.
        """
        group = self._group
        if group is None:
            raise RuntimeError("build first")
        # what hangs beyond its guard says where
        faulthandler.dump_traceback_later(timeout_s + STACKS_S if stacks_s is None else stacks_s)
        start = time.monotonic()
        self._cancel = CancelFlag()
        guard = Guard(self._cancel, start + timeout_s, stall_timeout_s, what=f"transfer on rank {self.rank}")
        injector = FaultInjector(faults)
        agreed = Plan.from_bytes(plan)
        if self.rank == 0:
            self._weights = self._model(seed, self.device)
            return self._run(
                start,
                lambda: send(
                    DictSource(self._weights),
                    group,
                    agreed,
                    guard,
                    verify=verify,
                    faults=injector,
                    kv_scales=kv_scales,
                ),
            )
        if not self._weights:
            self._weights = self._model(-1, self.device)
        self._weights = {name: t for name, t in self._weights.items() if not name.endswith("_scale")}
        self._weights |= {name: torch.zeros((), device=self.device) for name in kv_scales or ()}
        into = self._sink(sink)

        def take() -> TransferStats:
            into.begin(seed, agreed.metas)
            try:
                stats = receive(into, group, agreed, guard, verify=verify, faults=injector)
            except BaseException:
                into.rollback()
                raise
            into.commit(seed)
            return stats

        return self._run(start, take, into)

    def memory(self, plan: bytes, seed: int) -> dict[str, int]:
        """Do one transfer; what it said that it would take on the GPU, and what it took."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        outcome = self.transfer(plan, seed=seed)
        if outcome.stats is None:
            raise RuntimeError(f"the transfer failed: {outcome.error}")
        return {
            "took": torch.cuda.max_memory_allocated(self.device) - before,
            "said": outcome.stats.staging_bytes + outcome.stats.buffer_bytes,
        }

    def cancel(self, reason: str) -> None:
        """Set the flag of what runs; called beside it."""
        self._cancel.set(reason, "the test")

    def checksum(self) -> str:
        """Of what this rank holds now."""
        return checksum(self._weights)

    def scalars(self, names: Sequence[str]) -> list[float | None]:
        """The values of some tensors with one element; None for one that this rank does not hold."""
        return [self._weights[name].item() if name in self._weights else None for name in names]

    def _sink(self, kind: str) -> Any:
        if kind == "dict":
            return DictSink(self._weights)
        if kind == "in place":
            return DictSink(self._weights, in_place=True)
        in_place = kind == "load in place"
        return LoadWeightsSink(self._load, device=self.device, in_place=in_place)

    def _load(self, pairs: Any) -> None:
        for name, tensor in pairs:
            self._weights[name].copy_(tensor)

    def _run(self, start: float, body: Any, sink: Any = None) -> Outcome:
        stats = error = None
        try:
            stats = body()
        except (DprimsError, InjectedFault) as raised:
            error = raised
        ended = time.monotonic()
        faulthandler.cancel_dump_traceback_later()
        torn = sink is not None and sink.torn
        return Outcome(ended - start, error, stats, checksum(self._weights), torn, buried(), ended)


class TransferFleet:
    """Processes with one `TransferRank` each, and the store where they meet. A context manager.

    Rank 0 sends. Leaving kills what is left, frozen or not.

    Args:
        size: how many.
        device: "cpu" or "cuda".
        model: makes the weights of a seed on a device; a function of a module.
        factory: a subclass of `TransferRank`.
    """

    def __init__(
        self,
        size: int,
        device: str = "cpu",
        model: Model | None = None,
        factory: type[TransferRank] = TransferRank,
    ) -> None:
        self.store, self.host, self.port = leader_store("localhost")
        self._device, self._model, self._factory = device, model, factory
        self._size = size
        self.ranks = [self._start(rank) for rank in range(size)]

    def _start(self, rank: int) -> WorkerProcess:
        return WorkerProcess(
            f"rank {rank}",
            self._factory,
            (rank, self._size, self.host, self.port, self._device, self._model),
        )

    def replace(self, rank: int) -> None:
        """A fresh process in the place of one, which is killed if it still lives."""
        self.ranks[rank].kill()
        self.ranks[rank] = self._start(rank)

    def __enter__(self) -> TransferFleet:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()

    def call(self, method: str, *args: Any, each: Sequence[Mapping[str, Any]] = (), **kwargs: Any) -> Any:
        """Call `method` on every rank at once, with `each[rank]` added; the futures, in rank order."""
        return [
            rank.call(method, *args, **kwargs, **(each[index] if each else {}))
            for index, rank in enumerate(self.ranks)
        ]


def share_gpu(rank: int, size: int) -> torch.device:
    """The GPU of a rank. With fewer GPUs than ranks several ranks share one, for tests, not for speed.

    NCCL refuses two ranks on one GPU of one host: each says that it is on a host of its own, and they talk
    through sockets. Sets environment variables: for processes that are a test's own.
    """
    gpus = torch.cuda.device_count()
    if gpus < size:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device


def mixed_model(seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A few megabytes of tensors of many dtypes and shapes; the values depend on `seed`."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {f"layer.{i}.weight": random(64, 48).bfloat16() for i in range(200)}
    tensors |= {
        "float8": random(1001).to(torch.float8_e4m3fn),
        "float8.scale": random(3).to(torch.float8_e5m2),
        "bool": random(333) > 0,
        "int8": random(77).to(torch.int8),
        "int64": (random(5) * 1e6).long(),
        "complex": torch.complex(random(4), random(4)),
        "zero-dim": random(1)[0].clone(),
        "zero-size": torch.empty(0, 16),
        "transposed": random(100, 30).t(),
        "sliced": random(50, 40)[:, ::3],
        "large": random(300_000),
        "larger than a bucket": random(1000, 700).half(),
        "large and strided": random(500, 600).t(),
        "embed": random(64, 64),
    }
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    tensors["head"] = tensors["embed"]
    return tensors


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Over the names, dtypes, shapes and bytes of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(raw(tensor))
    return digest.hexdigest()
