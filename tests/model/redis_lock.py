"""The Redis lock, model-checked: every order of steps of three clients, with crashes, freezes and cuts.

:class:`Queue` says in Python what each Lua script decides. The checker runs the clients' steps against
it and visits every reachable state once; a test with random steps shows that the scripts on a real
server decide the same. Time is left out: a key may expire at any moment at which its client can no
longer believe in it, since a client counts its ttl from before the request, and the server from after.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# -- what the scripts decide ----------------------------------------------------------------------


class Queue(NamedTuple):
    """One lock at the server. Ids are of tickets; what has expired is simply absent."""

    holder: str | None = None
    token: int = 0
    """The last token given; the holder's, while there is one."""
    waiting: tuple[str, ...] = ()
    live: frozenset[str] = frozenset()
    """Whose ticket key stands."""
    wakes: frozenset[str] = frozenset()
    """Whose wake list is not empty."""

    def settle(self) -> Queue:
        queue = self
        while queue.holder is None and queue.waiting:
            first, *rest = queue.waiting
            queue = queue._replace(waiting=tuple(rest))
            if first in queue.live:
                queue = queue.grant(first)._replace(live=queue.live - {first}, wakes=queue.wakes | {first})
        return queue

    def grant(self, ticket: str) -> Queue:
        return self._replace(holder=ticket, token=self.token + 1)

    def acquire(self, ticket: str) -> tuple[Queue, int]:
        queue = self.settle()
        if queue.holder is None:
            queue = queue.grant(ticket)
        elif queue.holder == ticket:
            queue = queue._replace(wakes=queue.wakes - {ticket})
        else:
            joined = queue.waiting if ticket in {*queue.waiting} else (*queue.waiting, ticket)
            return queue._replace(live=queue.live | {ticket}, waiting=joined), 0
        return queue, queue.token

    def release(self, ticket: str) -> tuple[Queue, int]:
        if self.holder != ticket:
            return self, 0
        return self._replace(holder=None).settle(), 1

    def leave(self, ticket: str) -> tuple[Queue, int]:
        queue = self._replace(live=self.live - {ticket}, wakes=self.wakes - {ticket})
        if self.holder == ticket:
            queue = queue._replace(holder=None)
        else:
            queue = queue._replace(waiting=tuple(one for one in self.waiting if one != ticket))
        return queue.settle(), 1

    def beat(self, ticket: str) -> tuple[Queue, int]:
        return self, 2 if self.holder == ticket else int(ticket in self.live)


# -- the clients ----------------------------------------------------------------------------------


class Request(NamedTuple):
    """A call on its way, or its reply."""

    kind: str
    ticket: str
    reply: int | None = None
    stale: bool = False
    """Sent longer than a ttl ago."""
    parked: bool = False
    """It waits at the server, behind a BLPOP on the ticket's wake list."""
    woken: bool = False
    """What ended that was a wake-up."""


class Client(NamedTuple):
    """One client: its process, what it does, and the grant that it believes in."""

    process: str = "up"
    doing: str = "idle"
    round: int = 0
    believes: bool = False
    request: Request | None = None
    beat: Request | None = None
    """The heartbeat is a thread of its own."""


class State(NamedTuple):
    """Everything there is; equal states are visited once."""

    queue: Queue
    clients: tuple[Client, ...]
    orphans: frozenset[Request] = frozenset()
    """Requests of cut connections, which the server may still find in its buffers."""
    arrived: tuple[str, ...] = ()
    """The waiters in order of arrival, as nobody but the checker knows it."""
    crashes: int = 0
    freezes: int = 0
    cuts: int = 0


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class World:
    """What may happen: how many clients and rounds, how many faults, and whether waits time out."""

    clients: int = 3
    rounds: int = 1
    crashes: int = 1
    freezes: int = 1
    cuts: int = 0
    timers: bool = True
    gives_up: bool = True
    beats: bool = False
    queue: Queue = field(default_factory=Queue)

    def start(self) -> State:
        return State(
            self.queue, (Client(),) * self.clients, crashes=self.crashes, freezes=self.freezes, cuts=self.cuts
        )

    def moves(self, state: State) -> Iterator[tuple[str, bool, State]]:
        """What can happen next: a label, whether it is a fault, and the state after it."""
        for n, client in enumerate(state.clients):
            if client.process == "up":
                for label, after in self.steps(state, n, client):
                    yield f"{n} {label}", False, after
            for slot in ("request", "beat"):
                if (request := getattr(client, slot)) and request.reply is None:
                    if request.parked and request.ticket in state.queue.wakes:
                        request = request._replace(woken=True)
                    elif request.parked and not self.timers:
                        continue
                    queue, reply = self.serve(state, request)
                    replied = client._replace(**{slot: request._replace(reply=reply)})
                    yield f"{n} {request.kind} served", False, self.put(state, n, replied, queue, request)
            yield from self.faults(state, n, client)
        for request in state.orphans:
            queue, _ = self.serve(state, request)
            after = self.put(state, None, None, queue, request)
            yield f"orphan {request}", False, after._replace(orphans=state.orphans - {request})
        yield from self.expiries(state)

    def steps(self, state: State, n: int, client: Client) -> Iterator[tuple[str, State]]:
        """What a client that runs can do: each is one step of ``redis.py``."""
        ticket = f"{n}.{client.round}"

        def put(**change: object) -> State:
            return self.put(state, n, client._replace(**change))

        request, beat = client.request, client.beat
        if request is not None and request.reply is not None:
            yield f"{request.kind} replied", put(**{"request": None, **self.read(client, request)})
        if beat is not None and beat.reply is not None:
            yield "beat replied", put(beat=None, believes=client.believes and beat.reply == 2)
        # clients are alike: they come for the first time in the order of their numbers
        its_turn = n == 0 or state.clients[n - 1] != Client()
        if client.doing == "idle" and client.round < self.rounds and its_turn:
            yield "asks", put(doing="asking", request=Request("acquire", ticket))
        if client.doing == "waiting" and self.gives_up and request is not None and request.reply is None:
            # its connection is cut, which the server may notice late
            left = put(doing="leaving", request=Request("leave", ticket))
            yield "gives up", left._replace(orphans=state.orphans | {request})
        if client.doing == "holding":
            yield "releases", put(doing="releasing", believes=False, request=Request("release", ticket))
            if self.beats and client.believes and beat is None:
                yield "beats", put(beat=Request("beat", ticket))

    def read(self, client: Client, request: Request) -> dict[str, object]:
        """What a client makes of a reply."""
        if request.kind != "acquire":
            return {"doing": "idle", "round": client.round + 1}
        if request.reply and not self.disbelieved(request):
            return {"doing": "holding", "believes": True}
        return {"doing": "waiting", "request": Request("acquire", request.ticket, parked=True)}

    def disbelieved(self, request: Request) -> bool:
        return request.stale

    def serve(self, state: State, request: Request) -> tuple[Queue, int]:
        queue = state.queue
        if request.parked:  # what BLPOP took
            queue = queue._replace(wakes=queue.wakes - {request.ticket})
        queue, reply = getattr(queue, request.kind)(request.ticket)
        return queue, reply

    def faults(self, state: State, n: int, client: Client) -> Iterator[tuple[str, bool, State]]:
        if client == Client():
            return  # not here yet
        if client.process == "up" and state.crashes:
            orphans = state.orphans | {
                one for one in (client.request, client.beat) if one and one.reply is None
            }
            crashed = self.put(state, n, Client("down", round=client.round))
            yield (
                f"{n} crashes",
                True,
                crashed._replace(crashes=state.crashes - 1, orphans=frozenset(orphans)),
            )
        if client.process == "up" and state.freezes:
            frozen = self.put(state, n, client._replace(process="frozen"))
            yield f"{n} freezes", True, frozen._replace(freezes=state.freezes - 1)
        if client.process == "frozen":
            yield f"{n} thaws", False, self.put(state, n, client._replace(process="up"))
        if client.process == "up" and client.request and state.cuts:
            # the connection is gone, and the same request is sent again on another
            again = client._replace(request=Request(client.request.kind, client.request.ticket))
            orphans = state.orphans | ({client.request} if client.request.reply is None else set())
            cut = self.put(state, n, again)._replace(cuts=state.cuts - 1, orphans=frozenset(orphans))
            yield f"{n} cut", True, cut

    def expiries(self, state: State) -> Iterator[tuple[str, bool, State]]:
        """Keys whose client does not prove itself any more: it is down, frozen, or has left them behind."""
        queue = state.queue
        if queue.holder is not None and (n := self.silent(state, queue.holder)) is not None:
            expired = self.too_old(state, n, queue.holder)._replace(queue=queue._replace(holder=None))
            yield f"lock of {queue.holder} expires", False, self.checked(expired)
        for ticket in queue.live:
            if (n := self.silent(state, ticket)) is not None:
                expired = self.too_old(state, n, ticket)._replace(
                    queue=queue._replace(live=queue.live - {ticket})
                )
                yield f"ticket {ticket} expires", False, self.checked(expired)

    def silent(self, state: State, ticket: str) -> int | None:
        """The client of a ticket that is not proven any more, else None."""
        n, nth = map(int, ticket.split("."))
        client = state.clients[n]
        return n if client.process != "up" or client.round != nth or client.doing == "idle" else None

    def too_old(self, state: State, n: int, ticket: str) -> State:
        """A ttl has passed since the client of *ticket* was heard: what it holds and hears is stale."""
        client = state.clients[n]
        if client.round != int(ticket.split(".")[1]):
            return state
        request, beat = (one and one._replace(stale=True) for one in (client.request, client.beat))
        return self.put(state, n, client._replace(believes=False, request=request, beat=beat))

    def put(
        self,
        state: State,
        n: int | None,
        client: Client | None,
        queue: Queue | None = None,
        request: Request | None = None,
    ) -> State:
        clients = tuple(client if i == n else one for i, one in enumerate(state.clients))
        after = state._replace(clients=clients, queue=queue or state.queue)
        return self.checked(after if request is None else self.note(state, after, request))

    def note(self, before: State, after: State, request: Request) -> State:
        """Keep the order of arrival, and see that the lock goes to the first."""
        arrived, holder = before.arrived, after.queue.holder
        if request.kind == "leave":
            arrived = tuple(one for one in arrived if one != request.ticket)
        if holder != before.queue.holder and holder is not None:
            earlier = arrived[: arrived.index(holder)] if holder in arrived else arrived
            if not before.queue.live.isdisjoint(earlier):
                raise Violation(f"order: {holder} was granted before {earlier}")
            if after.queue.token <= before.queue.token:
                raise Violation(f"token {after.queue.token} after {before.queue.token}")
            arrived = tuple(one for one in arrived if one != holder and one not in earlier)
        if request.ticket in after.queue.waiting and request.ticket not in arrived:
            arrived = (*arrived, request.ticket)
        return after._replace(arrived=arrived)

    def checked(self, state: State) -> State:
        if sum(client.believes for client in state.clients) > 1:
            raise Violation("exclusion: two grants that are not lost")
        return state

    def done(self, state: State) -> bool:
        return all(client.process == "down" or client.round == self.rounds for client in state.clients)


def explore(world: World) -> int:
    """Visit every state; how many there were. A state from which nobody can finish without luck fails."""
    start = world.start()
    index, order, parents, labels = {start: 0}, [start], [-1], [""]
    into: list[list[int]] = [[]]
    for here, state in enumerate(order):
        try:
            for label, fault, after in world.moves(state):
                there = index.setdefault(after, len(order))
                if there == len(order):
                    order.append(after)
                    parents.append(here)
                    labels.append(label)
                    into.append([])
                if not fault:
                    into[there].append(here)
        except Violation as violation:
            raise Violation(f"{violation}, after:\n{_path(here, parents, labels)}") from None
    todo = [there for there, state in enumerate(order) if world.done(state)]
    good = set(todo)
    while todo:
        fresh = [before for before in into[todo.pop()] if before not in good]
        good.update(fresh)
        todo += fresh
    for stuck in range(len(order)):
        if stuck not in good:
            raise Violation(f"stuck, after:\n{_path(stuck, parents, labels)}")
    return len(order)


def _path(state: int, parents: list[int], labels: list[str]) -> str:
    steps = []
    while state > 0:
        steps.append(labels[state])
        state = parents[state]
    return "\n".join(reversed(steps))
