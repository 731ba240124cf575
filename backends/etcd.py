"""``etcd://h1:2379,h2:2379`` and ``etcds://``: queues and cells in an etcd cluster.

A place in the queue of a lock is a key that lives on this process's lease. The oldest key holds the
lock, and its create revision, which etcd never gives twice, is the token. Each waiter watches the key
just ahead of its own, so a release wakes one process. This is the recipe of etcd's own
``client/v3/concurrency``, with what Jepsen found missing there in 3.4.3: after each wait one
transaction reads the own key together with the one ahead, so a waiter whose lease ran out is never
taken for the holder.

acquire is one transaction, release one delete. Renewing all locks of a process is one round trip.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dprims.backend import Backend, Guarantees, Place, ServerFacts, Ticket
from dprims.exceptions import BackendMisconfigured, BackendUnavailable

from . import _etcd_wire as wire
from ._etcd_life import EtcdTicket, LeaseIsGone, Life
from ._etcd_link import Link, endpoints_of, login_of, login_with, open_endpoints
from ._etcd_url import PREFIX, TIMEOUT_S, EtcdUrl
from ._etcd_watch import Watch
from ._urls import without_password

PROOF_S = 1.0
"""The least time that a waiter gives the server for a last answer."""

_TXN_OPERATIONS = 100  # a server allows 128, unless told otherwise


class EtcdBackend(Backend):
    """Queues and cells in an etcd cluster (3.4 or later), over the raw stubs of the ``etcd3`` package.

    *url*: ``etcd://user:password@h1:2379,h2:2379/prefix?timeout=5``, or ``etcds://`` with ``ca``,
    ``cert`` and ``key`` as files for TLS. Or *client*: an ``etcd3.client()`` of the caller, who closes
    it; it cannot be used after a fork, and its auth token cannot be renewed.

    ttls are kept in whole seconds, rounded up, and are at least ``guarantees.min_ttl``.
    """

    guarantees = Guarantees(
        scope="hosts",
        survives_restart=True,
        tokens_survive_restart=False,
        min_ttl=2.0,
        detects_killed_holder=(
            "ttl in whole seconds, up to 1 s more; a restart or new leader starts each ttl again"
        ),
        clock="etcd's leader",
        limits=(
            "tokens are etcd revisions: they grow for as long as the cluster keeps its data, "
            "and start again in a wiped one"
        ),
    )

    def __init__(self, url: str = "", *, client: Any = None) -> None:
        if (client is None) == (not url):
            raise BackendMisconfigured("EtcdBackend needs either a URL or an etcd3 client")
        self._client = client
        self._parts = EtcdUrl.parse(url) if url else None
        self._keys = wire.Keys(self._parts.prefix if self._parts else PREFIX)
        self._closed = False
        self._lives: dict[int, Life] = {}
        life = self._life()
        self.url = without_password(url) if url else f"etcd://{life.link}"
        try:
            self.guarantees = replace(type(self).guarantees, min_ttl=life.shortest_ttl())
        except BaseException:
            life.close()
            raise

    # -- queues -----------------------------------------------------------------------------------

    def enqueue(self, name: str, ttl: float, record: bytes) -> Ticket:
        life = self._life()
        ticket = EtcdTicket(name, max(ttl, self.guarantees.min_ttl), record)
        self._join(life, ticket, life.link.timeout)
        return ticket

    def await_turn(self, ticket: Ticket, timeout: float) -> bool:
        ticket, life = _ours(ticket), self._life()
        deadline = self.clock() + timeout
        while True:
            ticket.turn.clear()
            if ticket.ahead is not None and not ticket.gone:
                self._sleep(life, ticket, deadline)
            left = deadline - self.clock()
            if not ticket.gone:
                self._look(life, ticket, min(max(left, PROOF_S), life.link.timeout))
            if ticket.held or ticket.gone:
                return ticket.held
            if left <= 0:
                return False

    def leave(self, ticket: Ticket) -> None:
        self._remove(_ours(ticket))

    def release(self, ticket: Ticket) -> bool:
        return self._remove(_ours(ticket))

    def beat(self, tickets: Sequence[Ticket], timeout: float) -> float | None:
        life = self._life()
        asked = [(ticket, ticket.key, ticket.place, ticket.held) for ticket in map(_ours, tickets)]
        asked = [(ticket, key, place, held) for ticket, key, place, held in asked if key]
        leases = {ticket.lease.id: ticket.lease for ticket, *_ in asked}
        reads = [wire.read(key, keys_only=True) for _, key, *_ in asked]
        txns = [
            wire.txn(*reads[start : start + _TXN_OPERATIONS])
            for start in range(0, len(reads), _TXN_OPERATIONS)
        ]
        when, answers = life.renew(list(leases.values()), txns, timeout)
        found = [response.response_range.kvs for answer in answers for response in answer.responses]
        for (ticket, _, place, held), there in zip(asked, found, strict=True):
            if _stands(there, place) and not ticket.lease.gone:
                if ticket.place == place:
                    ticket.proven = max(ticket.proven, when)
            elif held:
                ticket.gone = True
            else:
                ticket.turn.set()  # its await_turn joins the queue again
        return None

    def queue(self, name: str) -> list[Place]:
        found = self._life().read(wire.read_all(self._keys.queue(name))).kvs
        return [Place(name, None if i else kv.create_revision, kv.value) for i, kv in enumerate(found)]

    def held(self, prefix: str) -> list[Place]:
        holders: dict[str, Place] = {}
        for kv in self._life().read(wire.read_all(self._keys.locks(prefix))).kvs:  # the oldest first
            name = self._keys.name(kv.key)
            holders.setdefault(name, Place(name, kv.create_revision, kv.value))
        return [holders[name] for name in sorted(holders)]

    def silences(self, names: Sequence[str]) -> list[float | None]:
        life = self._life()
        found: list[Any] = []
        for start in range(0, len(names), _TXN_OPERATIONS):
            some = names[start : start + _TXN_OPERATIONS]
            reads = [wire.read_first(self._keys.queue(name)) for name in some]
            answer, _ = life.txn("read holders", wire.txn(*reads))
            found += [response.response_range.kvs for response in answer.responses]
        leases = [kvs[0].lease if kvs else 0 for kvs in found]
        ages = life.silences({lease for lease in leases if lease})
        return [ages.get(lease) for lease in leases]

    def evict(self, name: str, token: int) -> bool:
        holder = next(iter(self._life().read(wire.read_first(self._keys.queue(name))).kvs), None)
        if holder is None or holder.create_revision != token:
            return False
        request = wire.txn(wire.delete(holder.key), when=wire.created_at(holder.key, token))
        answer, tries = self._life().txn("evict a holder", request)
        return bool(answer.succeeded) or tries > 1  # a repeated delete finds nothing

    # -- cells ------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        return _value(self._life().read(wire.read(self._keys.cell(key))).kvs)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        cell = self._keys.cell(key)
        stands = wire.created_at(cell, 0) if expected is None else wire.value_is(cell, expected)
        request = wire.txn(wire.put(cell, value), when=stands, otherwise=[wire.read(cell)])
        answer, _ = self._life().txn("write a cell", request)
        return value if answer.succeeded else _value(answer.responses[0].response_range.kvs)

    def wait(self, key: str, timeout: float) -> bytes | None:
        life, cell = self._life(), self._keys.cell(key)
        deadline = self.clock() + timeout
        written = threading.Event()
        while True:
            left = deadline - self.clock()
            limit = min(max(left, PROOF_S), life.link.timeout)
            answer = life.read(wire.read(cell), limit)
            if answer.kvs or left <= 0:
                return _value(answer.kvs)
            written.clear()
            with life.hub.watching([Watch(cell, answer.header.revision + 1, written.set, deleted=False)]):
                written.wait(max(deadline - self.clock(), 0))

    def delete(self, key: str) -> None:
        self._life().txn("delete a cell", wire.txn(wire.delete(self._keys.cell(key))))

    # -- life -------------------------------------------------------------------------------------

    def server_facts(self) -> ServerFacts:
        def attempt(endpoint: Any, limits: dict[str, Any]) -> tuple[Any, Any]:
            status = endpoint.maintenance.Status(wire.rpc.StatusRequest(), **limits)
            return status, endpoint.maintenance.Alarm(wire.rpc.AlarmRequest(), **limits)

        status, alarms = self._life().link.run("say how it is", attempt)
        raised = sorted({wire.rpc.AlarmType.Name(one.alarm) for one in alarms.alarms})
        settings = {"server": "etcd", "leader": "one" if status.leader else "none"}
        return ServerFacts(status.version, None, settings | ({"alarms": ",".join(raised)} if raised else {}))

    def disconnect(self) -> None:
        self._closed = True
        life = self._lives.pop(os.getpid(), None)
        if life is not None:
            life.close()

    def reconnect_after_fork(self) -> None:
        self._life()

    def _life(self) -> Life:
        """This process's connections. A child has its own: those of its parent are never touched again."""
        life = self._lives.get(os.getpid())
        if life is not None:
            return life
        if self._closed:
            raise BackendUnavailable(f"{self!r} is closed")
        if self._client is not None and self._lives:
            raise BackendMisconfigured(
                f"{self!r} uses an etcd3 client of the parent process, which does not work after a fork; "
                "pass a URL instead"
            )
        made = Life(self._connect(), self.clock)
        life = self._lives.setdefault(os.getpid(), made)
        if life is not made:
            made.close()
        return life

    def _connect(self) -> Link:
        if self._parts is None:
            return Link(endpoints_of(self._client), login_of(self._client), TIMEOUT_S)
        login = login_with(self._parts.user, self._parts.password)
        return Link(open_endpoints(self._parts), login, self._parts.timeout)

    # -- places in a queue ------------------------------------------------------------------------

    def _join(self, life: Life, ticket: EtcdTicket, timeout: float) -> None:
        """Put the ticket at the end of its queue; it is held at once when nobody is there."""
        deadline = self.clock() + timeout
        queue = self._keys.queue(ticket.name)
        life.tickets.add(ticket)
        try:
            while True:
                ticket.lease = lease = life.lease_for(ticket.ttl, deadline - self.clock())
                key = life.new_key(ticket, queue)
                # Repeated after a lost reply, it finds the place that it has already.
                request = wire.txn(
                    wire.put(key, ticket.record, lease=lease.id),
                    wire.read_newest(queue, 2),
                    when=wire.created_at(key, 0),
                    otherwise=[wire.read(key, keys_only=True)],
                )
                try:
                    answer, tries = life.txn("join a queue", request, deadline - self.clock())
                    break
                except LeaseIsGone:
                    lease.gone = True
        except BaseException:
            life.forget(ticket)
            ticket.key = b""
            raise
        if tries > 1:
            ticket.number = -1
        ticket.proven = lease.proven
        ticket.seen = answer.header.revision
        if answer.succeeded:
            ticket.place = ticket.seen
            self._settle(ticket, [kv.key for kv in answer.responses[1].response_range.kvs if kv.key != key])
        else:
            ticket.place = answer.responses[0].response_range.kvs[0].create_revision
            self._look(life, ticket, deadline - self.clock())

    def _look(self, life: Life, ticket: EtcdTicket, timeout: float) -> None:
        """Prove the ticket's place at the server, and learn who is ahead; a lost place is taken anew."""
        deadline = self.clock() + timeout
        if key := ticket.key:
            mine = wire.read(key, keys_only=True)
            others = wire.read_newest(self._keys.queue(ticket.name), 1, before=ticket.place)
            stale = [] if life.is_fresh(ticket.lease) else [ticket.lease]
            _, (answer,) = life.renew(stale, [wire.txn(mine, others)], timeout)
            here, ahead = (response.response_range.kvs for response in answer.responses)
            if _stands(here, ticket.place) and not ticket.lease.gone:
                ticket.proven = max(ticket.proven, ticket.lease.proven)
                ticket.seen = answer.header.revision
                self._settle(ticket, [kv.key for kv in ahead])
                return
        if ticket.token is not None:
            ticket.gone = True
        if not ticket.gone:
            self._join(life, ticket, deadline - self.clock())
            if ticket.gone:  # it left while it joined
                life.forget(ticket)

    def _settle(self, ticket: EtcdTicket, ahead: Sequence[bytes]) -> None:
        ticket.ahead = ahead[0] if ahead else None
        if not ahead:
            ticket.token = ticket.place

    def _sleep(self, life: Life, ticket: EtcdTicket, deadline: float) -> None:
        """Wait until the key ahead or the own one is deleted, the ticket leaves, or *deadline*."""
        start = ticket.seen + 1
        keys = [key for key in (ticket.key, ticket.ahead) if key]
        with life.hub.watching([Watch(key, start, ticket.turn.set, deleted=True) for key in keys]):
            while not ticket.lease.gone:
                # when nobody else has renewed the lease by then, the look that follows does
                until = min(deadline, ticket.lease.proven + ticket.ttl / 2)
                if ticket.turn.wait(max(until - self.clock(), 0)) or self.clock() >= until:
                    return

    def _remove(self, ticket: EtcdTicket) -> bool:
        """Take the ticket's key away; say whether it was there."""
        life = self._life()
        ticket.gone = True
        ticket.turn.set()
        key = life.claim(ticket)
        if not key:
            return False
        try:
            deleted, tries = life.delete(key)
        except BaseException:
            ticket.key = key  # for the caller's next try
            life.forget(ticket)
            raise
        if tries > 1 or not deleted:
            ticket.number = -1
        life.done_with(ticket)
        if deleted or tries == 1:
            return deleted
        life.renew([ticket.lease], [], life.link.timeout)
        return not ticket.lease.gone  # so the key did not end with its lease: an earlier try took it


def _stands(found: Sequence[Any], place: int) -> bool:
    return bool(found) and found[0].create_revision == place


def _value(found: Sequence[Any]) -> bytes | None:
    return bytes(found[0].value) if found else None


def _ours(ticket: Ticket) -> EtcdTicket:
    if not isinstance(ticket, EtcdTicket):
        raise BackendMisconfigured(f"ticket for {ticket.name!r} comes from another backend")
    return ticket
