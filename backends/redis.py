"""``redis://``, ``rediss://``, ``unix://``: queues and cells on one Redis or Valkey server.

The queue is a list of waiters of whom each proves its life by a key that expires; whoever releases
hands over, inside one script, to the first that is alive. A waiter sleeps in BLPOP on a list of its
own and is woken once, when its turn has come; the question whether it holds the lock goes out with the
BLPOP and is answered right after it, and only that answer counts, from the moment when it was asked.
The steps are the scripts in ``_redis_scripts``; connections and retries are in ``_redis_wire``.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dprims.backend import Backend, Guarantees, Place, ServerFacts, Ticket
from dprims.exceptions import BackendMisconfigured, BackendUnavailable

from . import _redis_scripts as lua
from ._redis_scripts import PREFIX, Script
from ._redis_wire import Command, Wire, pool_from, pool_of
from ._urls import without_password

LOOK_AGAIN_S = 10.0
"""How long a wait for a cell relies on one notification before it looks by itself."""


@dataclass(slots=True, eq=False)
class _RedisTicket(Ticket):
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    awaited: bool = False
    """Whether a thread is in await_turn with it."""
    ask_at: float = 0.0
    """When the holder's ttl is over, or our own has to be renewed; earlier only when woken."""

    @property
    def ttl_ms(self) -> int:
        return max(math.ceil(self.ttl * 1000), 1)


class RedisBackend(Backend):
    """Queues and cells on one Redis (6.0.6 or later) or Valkey server.

    *client*: a blocking redis-py or valkey-py client whose way to connect is used; its pool, its
    retries and its decoding are not. *timeout*, or ``?timeout=`` in the URL, bounds each operation in
    seconds, reconnects included; else ``socket_timeout`` does, of the URL or client, else 5 s.
    ``?wait_replicas=n`` lets a grant count only once n replicas have it. All else in the URL's query
    is as redis-py has it (``ssl_ca_certs``, ``db``, ...).
    """

    guarantees = Guarantees(
        scope="hosts",
        survives_restart=False,
        tokens_survive_restart=True,
        min_ttl=0.05,
        detects_killed_holder="its ttl",
        clock="the Redis server",
        limits="A restart without `appendfsync always`, a fail-over to a replica and an eviction of keys "
        "(`maxmemory-policy` other than `noeviction`) can each lose a lock that is held; its holder learns "
        "so at its next beat. Tokens after a loss of data grow unless the server's clock had gone back. All "
        "keys are in one slot, so of a cluster one node has them all.",
    )

    def __init__(self, url: str = "", *, client: Any = None, timeout: float | None = None) -> None:
        if (client is None) == (not url):
            raise BackendMisconfigured(
                f"RedisBackend got url={without_password(url)!r}, client={client!r}; expected one of them"
            )
        given: dict[str, Any] = {}
        if client is None:
            pool, given = pool_from(url, {"timeout": float, "wait_replicas": _count})
        else:
            pool = pool_of(client)
        limit = given.get("timeout") if timeout is None else timeout
        if limit is not None and not 0 < limit < math.inf:
            raise BackendMisconfigured(f"timeout is {limit!r}; expected seconds > 0")
        self._wire = Wire(pool, limit, client)
        self.url = url or self._wire.where
        self._replicas: int = given.get("wait_replicas", 0)
        self._wire.call(("PING",), once=True)

    # -- queues -----------------------------------------------------------------------------------

    def enqueue(self, name: str, ttl: float, record: bytes) -> Ticket:
        ticket = _RedisTicket(name, ttl, record)
        self._ask(ticket)
        return ticket

    def await_turn(self, ticket: Ticket, timeout: float) -> bool:
        ticket = _ours(ticket)
        if ticket.token is not None:
            self.beat([ticket], self._wire.timeout)
            return ticket.held
        now = self.clock()
        deadline = now + timeout
        ticket.awaited = True
        try:
            while not (ticket.held or ticket.gone):
                self._ask(ticket, wait=max(min(deadline, ticket.ask_at) - now, 0))
                if (now := self.clock()) >= deadline:
                    break
            return ticket.held
        finally:
            ticket.awaited = False

    def leave(self, ticket: Ticket) -> None:
        ticket = _ours(ticket)
        ticket.gone = True
        self._wire.hush(_wake(ticket.id))
        self._leave(ticket)

    def release(self, ticket: Ticket) -> bool:
        ticket = _ours(ticket)
        replies = self._wire.call(_on_queue(lua.RELEASE, ticket.name, ticket.id))
        ticket.gone = True
        return replies.values == [1] or replies.retried  # the try whose reply was lost may have done it

    def beat(self, tickets: Sequence[Ticket], timeout: float) -> float | None:
        # whoever sits in await_turn asks by itself, so one more waiter costs no beat of all the others
        now = self.clock()
        asked = [
            (ticket, ticket.held)
            for ticket in map(_ours, tickets)
            if not ticket.awaited or now - ticket.proven > ticket.ttl / 3
        ]
        if not asked:
            return None
        replies = self._wire.call(
            *(_on_queue(lua.BEAT, ticket.name, ticket.id, ticket.ttl_ms) for ticket, _ in asked),
            timeout=timeout,
        )
        for (ticket, was_held), place in zip(asked, replies.values, strict=True):
            if place == (2 if was_held else 1):
                ticket.proven = max(ticket.proven, replies.asked)
            elif was_held:
                ticket.gone = True
        return None

    def queue(self, name: str) -> list[Place]:
        [(holder, *waiting)] = self._wire.call(_on_queue(lua.QUEUE, name)).values
        places = [] if holder is None else [_holder(name, holder)]
        return places + [Place(name, None, ticket.partition(b" ")[2]) for ticket in waiting]

    def held(self, prefix: str) -> list[Place]:
        low, high = b"[" + prefix.encode(), b"(" + prefix.encode() + b"\xff"  # no UTF-8 text has an \xff
        [found] = self._wire.call(("ZRANGEBYLEX", PREFIX + "names", low, high)).values
        if not found:
            return []
        names = [name.decode() for name in found]
        holders = self._wire.call(*(_on_queue(lua.HOLDER, name) for name in names)).values
        return [_holder(name, entry) for name, entry in zip(names, holders, strict=True) if entry is not None]

    def silences(self, names: Sequence[str]) -> list[float | None]:
        keys = [f"{PREFIX}lock:{name}" for name in names]
        asked = [(("GETRANGE", key, 0, _HEAD_BYTES - 1), ("PTTL", key)) for key in keys]
        replies = iter(
            self._wire.call(*(command for pair in asked for command in pair)).values if asked else ()
        )
        return [_silence(head, left_ms) for head, left_ms in zip(replies, replies, strict=True)]

    def evict(self, name: str, token: int) -> bool:
        replies = self._wire.call(_on_queue(lua.EVICT, name, token))
        return replies.values == [1] or replies.retried

    def _ask(self, ticket: _RedisTicket, wait: float = 0) -> None:
        """Take the lock or a place in its queue, after *wait* seconds or a wake-up before."""
        commands = [_on_queue(lua.ACQUIRE, ticket.name, ticket.id, ticket.ttl_ms, ticket.record)]
        if self._replicas:
            commands.append(("WAIT", self._replicas, int(self._wire.timeout * 500)))
        replies = None
        if wait:
            replies = self._wire.listen(_wake(ticket.id), wait, *commands, wanted=lambda: not ticket.gone)
            if ticket.gone and replies is None:
                return
        replies = replies or self._wire.call(*commands)
        token, left_ms = replies.values[0]
        ticket.proven = max(ticket.proven, replies.asked)
        if ticket.gone:  # left meanwhile, and the question has put it back
            self._leave(ticket)
        elif token is not None and self.clock() < replies.asked + ticket.ttl:  # else we slept over it
            if self._replicas and replies.values[1] < self._replicas:
                self._leave(ticket)
                raise BackendUnavailable(
                    f"{self!r}: the grant of lock {ticket.name!r} reached {replies.values[1]} replicas; "
                    f"expected {self._replicas}"
                )
            ticket.token = int(token)
        ticket.ask_at = self.clock() + min((left_ms + 1) / 1000, ticket.ttl / 3)

    def _leave(self, ticket: _RedisTicket) -> None:
        self._wire.call(_on_queue(lua.LEAVE, ticket.name, ticket.id))

    # -- cells ------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        [stands] = self._wire.call(("GET", _cell(key)[0])).values
        return stands  # type: ignore[no-any-return]

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        [stands] = self._wire.call(
            (lua.COMPARE_AND_SET, 2, *_cell(key), PREFIX, int(expected is not None), expected or b"", value)
        ).values
        return stands  # type: ignore[no-any-return]

    def wait(self, key: str, timeout: float) -> bytes | None:
        deadline = self.clock() + timeout
        waiter = uuid.uuid4().hex
        noted = False
        while True:
            left = max(deadline - self.clock(), 0)
            for_now = min(left, LOOK_AGAIN_S)
            watch = (lua.WATCH, 3, *_cell(key), _wake(waiter), waiter, math.ceil(for_now * 1000))
            replies = self._wire.listen(_wake(waiter), for_now, watch) if noted and left else None
            [stands] = (replies or self._wire.call(watch)).values
            if stands is not None or not left:
                return stands  # type: ignore[no-any-return]
            noted = True

    def delete(self, key: str) -> None:
        self._wire.call(("DEL", _cell(key)[0]))

    # -- life -------------------------------------------------------------------------------------

    def server_facts(self) -> ServerFacts:
        (seconds, micros), text = self._wire.call(("TIME",), ("INFO",)).values
        info = dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
        wanted = ("role", "maxmemory", "maxmemory_policy", "aof_enabled")
        settings = {"server": "redis"} | {name: info[name] for name in wanted if name in info}
        if "master_host" in info:
            settings["master"] = f"{info['master_host']}:{info.get('master_port', '')}"
        return ServerFacts(info.get("redis_version", ""), int(seconds) + int(micros) / 1e6, settings)

    def disconnect(self) -> None:
        self._wire.close()

    def reconnect_after_fork(self) -> None:
        self._wire.forget()

    def __repr__(self) -> str:
        return f"<RedisBackend {without_password(self.url)}>"


def _on_queue(script: Script, name: str, *args: object) -> Command:
    return (
        script,
        4,
        f"{PREFIX}lock:{name}",
        f"{PREFIX}queue:{name}",
        f"{PREFIX}token",
        f"{PREFIX}names",
        PREFIX,
        name,
        *args,
    )


def _cell(key: str) -> tuple[str, str]:
    return f"{PREFIX}cell:{key}", f"{PREFIX}watch:{key}"


def _wake(waiter: str) -> str:
    return f"{PREFIX}wake:{waiter}"


def _holder(name: str, entry: bytes) -> Place:
    _, token, _, record = entry.split(b" ", 3)
    return Place(name, int(token), record)


_HEAD_BYTES = 96
"""Enough of a holder's entry for its id, token and ttl."""


def _silence(head: bytes, left_ms: int) -> float | None:
    parts = head.split(b" ", 3)
    return max(int(parts[2]) - left_ms, 0) / 1000 if len(parts) > 3 and left_ms >= 0 else None


def _ours(ticket: Ticket) -> _RedisTicket:
    if not isinstance(ticket, _RedisTicket):
        raise BackendMisconfigured(f"ticket for {ticket.name!r} comes from another backend")
    return ticket


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"wait_replicas is {text!r}; expected a number of replicas")
    return int(text)
