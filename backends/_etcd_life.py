"""What one process has at a cluster: a link, watches, and the leases on which its places in queues live.

There is one lease for each ttl in whole seconds, however many locks. A lease lives at the server for its
ttl after the last request that renewed it; ``proven`` is this host's clock just before that request, so
until ``proven + ttl`` the server has not dropped it.

A shared lease would also keep alive what nobody wants any more: the place of a caller whose request to
give it up got no answer, or whose lock counts as lost here. Such keys are *forgotten*: they are deleted
along with each renewal until the server has confirmed it.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dprims.backend import Ticket
from dprims.exceptions import BackendError, BackendUnavailable

from . import _etcd_wire as wire
from ._etcd_link import Endpoint, Link
from ._etcd_watch import WatchHub
from ._etcd_wire import grpc, rpc

log = logging.getLogger("dprims.etcd")

FRESH = 1 / 3
"""How much of its ttl a lease may have used up when a new place is put on it."""
CLOSE_S = 2.0
"""How long closing waits for the server."""
_FORGET_TRIES = 3  # answers "not there" after which a request that was late cannot come any more


class LeaseIsGone(Exception):
    """The server does not know the lease that a key was to stand on."""


@dataclass(slots=True, eq=False)
class Lease:
    """One lease; ``gone`` once the server does not know it any more."""

    id: int
    ttl: float
    proven: float = 0.0
    gone: bool = False


@dataclass(slots=True, eq=False)
class EtcdTicket(Ticket):
    """A ticket, and where it stands at the server."""

    key: bytes = b""
    """The place in the queue, together with ``place``; empty when it has none."""
    lease: Lease = field(default_factory=lambda: Lease(0, 0.0, gone=True))
    place: int = 0
    """The key's create revision: the token, once nobody is ahead."""
    number: int = -1
    """The number in the key, to be used again; -1 when a late request about the key may still come."""
    ahead: bytes | None = None
    """The key just ahead at revision ``seen``; None when that is not known."""
    seen: int = 0
    turn: threading.Event = field(default_factory=threading.Event)


class Life:
    """One process's dealings with one cluster, until :meth:`close`."""

    def __init__(self, link: Link, clock: Callable[[], float]) -> None:
        self.link = link
        self.hub = WatchHub(link)
        self.tickets: set[EtcdTicket] = set()
        """Every ticket that may have a key at the server."""
        self._clock = clock
        self._lock = threading.Lock()
        self._lock_keys = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._forgotten: dict[bytes, int] = {}
        self._id = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._free_numbers: list[int] = []

    def txn(self, what: str, request: Any, timeout: float | None = None) -> tuple[Any, int]:
        """Do a transaction that may be repeated; return its answer, and how often it was sent."""
        tries = 0

        def attempt(endpoint: Endpoint, limits: dict[str, Any]) -> Any:
            nonlocal tries
            tries += 1
            try:
                return endpoint.kv.Txn(request, **limits)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise LeaseIsGone from error
                raise

        return self.link.run(what, attempt, timeout), tries

    def delete(self, key: bytes) -> tuple[bool, int]:
        """Delete a key; say whether it was there, and how often that was sent."""
        tries = 0

        def attempt(endpoint: Endpoint, limits: dict[str, Any]) -> bool:
            nonlocal tries
            tries += 1
            return bool(endpoint.kv.DeleteRange(wire.delete(key), **limits).deleted)

        return self.link.run("delete a key", attempt), tries

    def read(self, request: Any, timeout: float | None = None) -> Any:
        """Read keys."""

        def attempt(endpoint: Endpoint, limits: dict[str, Any]) -> Any:
            return endpoint.kv.Range(request, **limits)

        return self.link.run("read keys", attempt, timeout)

    # -- leases -----------------------------------------------------------------------------------

    def lease_for(self, ttl: float, timeout: float) -> Lease:
        """A lease of at least *ttl* seconds, renewed not long ago: mostly without a round trip."""
        seconds = math.ceil(ttl)
        lease = self._leases.get(seconds)
        if lease is not None and self.is_fresh(lease):
            return lease
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(timeout, 0)):
            raise BackendUnavailable(f"etcd at {self.link} did not renew a lease within {timeout:g} s")
        try:
            lease = self._leases.get(seconds)
            if lease is not None and not lease.gone and not self.is_fresh(lease):
                self.renew([lease], [], deadline - time.monotonic())
            if lease is None or lease.gone:
                lease = self._leases[seconds] = self._grant(seconds, deadline - time.monotonic())
            return lease
        finally:
            self._lock.release()

    def is_fresh(self, lease: Lease) -> bool:
        """Whether most of its ttl is left."""
        return not lease.gone and self._clock() < lease.proven + lease.ttl * FRESH

    def shortest_ttl(self) -> float:
        """The shortest ttl that the server keeps: what it makes of a request for one second."""
        lease = self._grant(1, self.link.timeout)
        self._leases[math.ceil(lease.ttl)] = lease
        return lease.ttl

    def renew(self, leases: Sequence[Lease], txns: Sequence[Any], timeout: float) -> tuple[float, list[Any]]:
        """Renew *leases* and do *txns*, all in one round trip.

        Returns when it was asked, by the clock, and the answers. A lease that the server does not know
        is ``gone`` afterwards.
        """
        forgotten = self._forget_the_lost() if leases else []
        deletes = [wire.txn(wire.delete(key)) for key in forgotten]

        def attempt(endpoint: Endpoint, limits: dict[str, Any]) -> tuple[float, dict[int, int], list[Any]]:
            asked = self._clock()
            requests = [rpc.LeaseKeepAliveRequest(ID=lease.id) for lease in leases]
            renewals = endpoint.lease.LeaseKeepAlive(iter(requests), **limits) if leases else ()
            *others, last = (*txns, *deletes) or (None,)
            pending = [endpoint.kv.Txn.future(txn, **limits) for txn in others]
            answer = [] if last is None else [endpoint.kv.Txn(last, **limits)]  # quicker than a future
            seconds_left = {renewal.ID: renewal.TTL for renewal in renewals}
            return asked, seconds_left, [one.result() for one in pending] + answer

        asked, seconds_left, answers = self.link.run("renew leases", attempt, timeout)
        for lease in leases:
            if seconds_left.get(lease.id, 0) <= 0:
                lease.gone = True
            else:
                lease.proven = max(lease.proven, asked)
        for key, answer in zip(forgotten, answers[len(txns) :], strict=True):
            tries = self._forgotten.get(key, 0) - 1
            if answer.responses[0].response_delete_range.deleted or tries <= 0:
                self._forgotten.pop(key, None)
            else:
                self._forgotten[key] = tries
        return asked, answers[: len(txns)]

    def silences(self, leases: Collection[int]) -> dict[int, float]:
        """How many seconds ago each lease, of whatever process, was renewed: whole ones, rounded up."""
        ages: dict[int, float] = {}

        def attempt(endpoint: Endpoint, limits: dict[str, Any]) -> None:
            asked = [
                endpoint.lease.LeaseTimeToLive.future(rpc.LeaseTimeToLiveRequest(ID=lease), **limits)
                for lease in leases
            ]
            for answer in [one.result() for one in asked]:
                if answer.TTL > 0:
                    ages[answer.ID] = float(max(answer.grantedTTL - answer.TTL, 0))

        if leases:
            self.link.run("read leases", attempt)
        return ages

    def _grant(self, seconds: int, timeout: float) -> Lease:
        lease = Lease(1 + secrets.randbelow(2**63 - 1), float(seconds))
        asked: list[float] = []

        def attempt(endpoint: Endpoint, limits: dict[str, Any]) -> None:
            asked.append(self._clock())
            try:
                answer = endpoint.lease.LeaseGrant(rpc.LeaseGrantRequest(TTL=seconds, ID=lease.id), **limits)
                lease.ttl = float(answer.TTL)
            except grpc.RpcError as error:
                # "already exists": an earlier try was granted, and its reply was lost
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION or len(asked) == 1:
                    raise

        self.link.run("grant a lease", attempt, timeout)
        lease.proven = asked[0]
        return lease

    # -- keys of places ---------------------------------------------------------------------------

    # A server that is not compacted keeps the names of deleted keys, and walks through them at each read
    # of a queue. So keys are used again; what tells two places apart is the create revision.

    def new_key(self, ticket: EtcdTicket, queue: bytes) -> bytes:
        """Give *ticket* a key in *queue* that no other ticket has."""
        try:
            ticket.number = self._free_numbers.pop()
        except IndexError:
            ticket.number = next(self._numbers)
        ticket.key = queue + f"{self._id}-{ticket.number}".encode()
        return ticket.key

    def claim(self, ticket: EtcdTicket) -> bytes:
        """Take its key from *ticket*, for one thread alone to delete; empty when another has it."""
        with self._lock_keys:
            key, ticket.key = ticket.key, b""
            return key

    def done_with(self, ticket: EtcdTicket) -> None:
        """The ticket's key is known to be deleted."""
        self.tickets.discard(ticket)
        if ticket.number >= 0:
            self._free_numbers.append(ticket.number)

    def forget(self, ticket: EtcdTicket) -> None:
        """Delete the ticket's key sooner or later, whatever became of requests about it."""
        self.tickets.discard(ticket)
        ticket.number = -1
        if ticket.key:
            self._forgotten[ticket.key] = _FORGET_TRIES

    def _forget_the_lost(self) -> list[bytes]:
        """Every forgotten key, and those of locks whose ttl has passed here: they are lost for good."""
        now = self._clock()
        for ticket in self.tickets.copy():
            if ticket.token is not None and now >= ticket.proven + ticket.ttl:
                ticket.gone = True
                self.forget(ticket)
        return list(self._forgotten)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back the leases, and with them every place; wake who waits; close the connections."""
        tickets, self.tickets = self.tickets.copy(), set()
        for ticket in tickets:
            ticket.gone = True
            ticket.turn.set()
        leases = [lease for lease in self._leases.values() if not lease.gone]

        def attempt(endpoint: Endpoint, limits: dict[str, Any]) -> None:
            requests = [rpc.LeaseRevokeRequest(ID=lease.id) for lease in leases]
            for answer in [endpoint.lease.LeaseRevoke.future(request, **limits) for request in requests]:
                try:
                    answer.result()
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.NOT_FOUND:
                        raise

        with suppress(BackendError):  # what could not be given back ends with its ttl
            if leases:
                self.link.run("revoke leases", attempt, min(CLOSE_S, self.link.timeout))
        self.link.close()
        self.hub.close()
