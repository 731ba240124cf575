"""One weight group: a private process group, its handshake, its broadcasts, and its end.

The group stands on a `PrefixStore` of the leader's store and touches nothing else: not torch's default
world, no environment variable, no registry. Building it the first time and rebuilding it over survivors is
the same call. Its own timeout is only a backstop, longer than any deadline: the guard ends waits, never
torch's watchdog, which would end the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..exceptions import BackendMisconfigured, DeviceLost, RefitAborted
from .aborts import abort_aside, wait_for_aborts
from .clients import Clients
from .environment import blocking_wait, forbearing
from .graveyard import bury
from .guard import POLL_S, Guard, Query
from .handshake import handshake
from .memory import Memory
from .plan import Plan
from .rendezvous import choose_address, join_store, leader_store
from .severing import Address, listener_of, sever
from .tables import warm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .flights import BucketLayout

__all__ = ["CommGroup", "choose_address", "join_store", "leader_store"]

_thread = threading.local()
"""``open``: the group whose NCCL group call was left open on this thread."""

ABORT_GRACE_S = 10.0
"""How long an aborted NCCL communicator may take to give its streams back."""


class CommGroup:
    """A process group of `size` ranks, rank 0 the sender. Made by `build`; used by one working thread.

    Attributes:
        name: the prefix that it was built under.
        rank, size: as in the group.
        backend: "gloo" or "nccl".
        device: where its tensors live.
        memory: wire buffers, kept from one transfer to the next.
        broken: why it can carry nothing any more; None while it can.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        clients: Clients,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        op_timeout_s: float,
        listeners: frozenset[Address] = frozenset(),
    ) -> None:
        self._pg: ProcessGroup | None = pg
        self._clients = clients
        self._listeners = listeners
        self._rounds = 0
        self._interrupted = False
        self.name = name
        self.rank = rank
        self.size = size
        self.device = device
        self.backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" else "gloo"
        self.memory = Memory(device)
        self.op_timeout_s = op_timeout_s
        self.broken: str | None = None
        self._layouts: tuple[str, dict[int, BucketLayout]] = ("", {})

    @classmethod
    def build(
        cls,
        store: Any,
        prefix: str,
        rank: int,
        size: int,
        *,
        backend: Literal["gloo", "nccl"],
        device: torch.device | str,
        timeout_s: float,
        op_timeout_s: float,
        guard: Guard | None = None,
        record: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
        members: Sequence[str] | None = None,
        refusal: str | None = None,
        address: str | None = None,
    ) -> CommGroup:
        """Meet the other ranks, agree, connect. Collective.

        The handshake comes first, since neither gloo's connecting nor NCCL's can be cancelled: when they
        begin, everybody is there.

        Args:
            store: the leader's store, a torch `Store`; or the `Clients` of it, to keep their connections.
            prefix: a prefix that no other group of this store has, or had.
            rank: this rank within the group.
            size: number of ranks.
            backend: gloo with a CPU device, nccl with a CUDA one.
            device: where tensors will be.
            timeout_s: bound on all of this, in seconds; used when there is no `guard`.
            op_timeout_s: torch's own timeout for each operation; longer than any deadline.
            guard: bounds the waits instead of `timeout_s`, and can be cancelled.
            record, plan, members, refusal: for `handshake`.
            address: the numeric address that gloo listens on; by default gloo's choice.

        Raises:
            ValueError: rank, size, backend or device do not fit together.
            HandshakeMismatch, RefitError, RefitTimeout, RefitAborted: as `handshake`.
            DeviceLost: an earlier group's abort does not end on this device.
        """
        where = torch.device(device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank} in a group of {size}")
        if (backend, where.type) not in (("gloo", "cpu"), ("nccl", "cuda")):
            raise ValueError(f"backend {backend!r} with device {where}: gloo needs cpu, nccl needs cuda")
        guard = guard or Guard(deadline=time.monotonic() + timeout_s, what=prefix)
        clients = store if isinstance(store, Clients) else Clients(store)
        if backend == "nccl":
            wait_for_aborts(where, guard, ABORT_GRACE_S)
        handshake(
            clients, rank, size, record or {}, guard=guard, prefix=prefix, key="build", plan=plan,
            members=members, refusal=refusal, group=prefix,
        )  # fmt: skip

        half_built: list[ProcessGroup] = []

        def connect() -> tuple[ProcessGroup, frozenset[Address]]:
            with clients.lend(prefix) as client:
                if backend == "nccl":
                    return _nccl(client.clone(), rank, size, where, op_timeout_s, half_built), frozenset()
                return _gloo(client, rank, size, op_timeout_s, address)

        try:
            pg, listeners = guard.call(connect, f"connecting {prefix}")
        except BaseException:
            if half_built:
                abort_aside(half_built[0], where, prefix)
                bury(half_built, op_timeout_s)
            raise
        return cls(pg, clients, prefix, rank, size, where, op_timeout_s, listeners)

    def handshake(
        self,
        record: Mapping[str, Any],
        *,
        guard: Guard,
        plan: Plan | None = None,
        members: Sequence[str] | None = None,
        refusal: str | None = None,
    ) -> None:
        """Agree once more, such as on a new plan. Collective; arguments and errors as `handshake`."""
        self._rounds += 1
        handshake(
            self._clients, self.rank, self.size, record, guard=guard, prefix=self.name,
            key=f"round/{self._rounds}", plan=plan, members=members, refusal=refusal, group=self.name,
        )  # fmt: skip

    def layouts(self, digest: str) -> dict[int, BucketLayout]:
        """By bucket, what is known of the layout of the plan with this digest; kept like `memory`."""
        if self._layouts[0] != digest:
            self._layouts = digest, {}
        return self._layouts[1]

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Any:
        """Enqueue a broadcast; returns torch's `Work`, for `Guard.wait`. Never blocks.

        Raises RefitAborted on a group that was aborted.
        """
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = root
        options.asyncOp = True
        _refuse_open_call()
        return self._live().broadcast([tensor], options)

    @contextlib.contextmanager
    def coalesced(self) -> Iterator[list[Any]]:
        """Enqueue the broadcasts of the body as one operation where the backend can; yields the works.

        The list is complete when the body has ended. NCCL's group call is closed when the body raises, too:
        the call is the thread's, and while one is open nothing is launched there, by any communicator.

        Raises DeviceLost on a thread whose group call could not be closed.
        """
        works: list[Any] = []
        if self.backend == "gloo":
            yield works
            return
        pg = self._live()
        _refuse_open_call()
        pg._start_coalescing(self.device)
        try:
            yield works
        except BaseException:
            if self._interrupted:
                _thread.open = self.name  # its operations are on a communicator that is gone
            else:
                with contextlib.suppress(RuntimeError):
                    pg._end_coalescing(self.device)
            raise
        works[:] = [pg._end_coalescing(self.device)]

    def abort(
        self,
        grace_s: float = ABORT_GRACE_S,
        *,
        pending: Callable[[], Sequence[Query]] = tuple,
        works: Sequence[Any] = (),
        held: Sequence[Any] = (),
    ) -> None:
        """End the group in the middle of its work. Bounded, and safe when a peer is dead or frozen.

        NCCL's communicator is aborted on a daemon thread, and the call returns when every event of `pending`
        has completed: then nothing writes into the buffers any more. gloo cannot abort: the group, `works`
        and `held` are left to themselves until all works have ended, or torch's timeout has passed.

        Args:
            grace_s: how long NCCL may take, in seconds.
            pending: gives events behind everything that was enqueued on this group; called when the abort
                has begun, since recording one may block for as long as a kernel spins.
            works: torch's works that were not seen to end.
            held: the buffers that they use.

        Raises DeviceLost when the events have not completed within the grace: the process must be replaced.
        """
        pg, self._pg = self._pg, None
        if pg is None:
            return
        self.broken = "it was aborted"
        remains = [pg, *works, *held]
        if self.backend == "gloo":
            del pg
            bury(remains, self.op_timeout_s if works else 0.0, works, partial(sever, self._listeners))
            return
        abort_aside(pg, self.device, self.name)
        del pg
        deadline = time.monotonic() + grace_s
        events = pending()
        while not all(event.query() for event in events):
            if time.monotonic() >= deadline:
                bury(remains, self.op_timeout_s)
                raise DeviceLost(
                    f"rank {self.rank} of {self.name}: {self.device} did not come back within {grace_s} s "
                    "of the abort; this process has to be replaced"
                )
            time.sleep(POLL_S)
        # the streams are free, so nothing of it is in use
        bury(remains)

    def interrupt(self) -> None:
        """Abort NCCL's communicator under a working thread that is stuck in a call to it. Returns at once.

        The stuck call fails; `abort` is still the working thread's to call.
        """
        pg = self._pg
        if pg is not None and self.backend == "nccl":
            self._interrupted = True
            abort_aside(pg, self.device, self.name)

    def release(self) -> None:
        """Give up a group that is idle. Returns at once; the rest happens on other threads."""
        pg, self._pg = self._pg, None
        if pg is None:
            return
        self.broken = "it was released"
        if self.backend == "nccl":
            # an orderly shutdown is a collective of its own, and hangs when a peer has died meanwhile
            abort_aside(pg, self.device, self.name)
        remains = [pg]
        del pg
        bury(remains)

    def _live(self) -> ProcessGroup:
        if self._pg is None:
            raise RefitAborted(f"rank {self.rank} of {self.name}: the group carries nothing, {self.broken}")
        return self._pg


def _refuse_open_call() -> None:
    if (left := getattr(_thread, "open", None)) is not None:
        raise DeviceLost(
            f"a group call of {left} was aborted half way on this thread, where NCCL launches nothing more; "
            "this process has to be replaced"
        )


def _gloo(
    store: Any, rank: int, size: int, op_timeout_s: float, address: str | None
) -> tuple[ProcessGroup, frozenset[Address]]:
    """The group, and where its ranks listen, as far as that is known."""
    from torch.distributed import ProcessGroup, ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=op_timeout_s)
    options._threads = 2
    device, mine = listener_of(
        lambda: (
            ProcessGroupGloo.create_device(hostname=address)
            if address
            else ProcessGroupGloo.create_default_device()
        )
    )
    options._devices = [device]
    store.set(f"listens/{rank}", json.dumps(mine))
    pg = ProcessGroup(store, rank, size)
    backend = ProcessGroupGloo(store, rank, size, options)
    pg._set_default_backend(ProcessGroup.BackendType.GLOO)
    pg._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    said = [json.loads(store.get(f"listens/{peer}")) for peer in range(size)]
    return pg, frozenset((str(where[0]), int(where[1])) for where in said if where)


def _nccl(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    op_timeout_s: float,
    half_built: list[ProcessGroup],
) -> ProcessGroup:
    from torch.distributed import BroadcastOptions, ProcessGroup, ProcessGroupNCCL

    if (name := blocking_wait(os.environ)) is not None:
        raise BackendMisconfigured(f"{name} is set: waits would block where no guard sees them")
    # the current device is per thread, and this is a thread of its own
    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    # packing and digests fill the device: a broadcast that becomes ready must not queue behind them
    options.is_high_priority_stream = True
    options._timeout = timedelta(seconds=op_timeout_s)
    pg = ProcessGroup(store, rank, size)
    with forbearing(os.environ):
        backend = ProcessGroupNCCL(store, rank, size, options)
    pg._set_default_backend(ProcessGroup.BackendType.NCCL)
    pg._register_backend(device, ProcessGroup.BackendType.NCCL, backend)
    # from here on it can be aborted by whoever waits for this thread
    half_built.append(pg)
    backend.eager_connect_single_device(device)
    # NCCL wires its ranks up in the first collective, in a call that blocks: here somebody bounds it
    warm_up = torch.zeros(1, dtype=torch.uint8, device=device)
    pg.broadcast([warm_up], BroadcastOptions()).wait()
    torch.cuda.current_stream(device).synchronize()
    if rank == 0:
        # who packs; and not later: to load a kernel can make the host wait for all that runs on the device
        warm(device)
    return pg
