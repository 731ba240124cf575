"""Every interleaving of the TCPStore lock's own procedures, over a store in memory.

Nothing of the algorithm is modelled here: each client runs the generators of
``dprims.backends._tickets``, one store operation at a time, on two threads (its caller, and its
heartbeat), and a search visits every state once. The environment may crash one client and freeze one
for a while, anywhere. Time moves in halves of a ttl, as far as the promise of a live client allows: each
of them beats once in every half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple
from unittest import mock

from dprims.backends import _tickets
from dprims.backends._tickets import CLOCK, NumberedTicket, Tickets

NAME = "n"
TTL = 2.0
HALF = 1.0


class Violation(AssertionError):
    """A promise broken, with the steps that led there."""


class TicketState(NamedTuple):
    """The fields of a ticket."""

    number: int = 0
    token: int | None = None
    head: bytes = b""
    proven: float = 0.0
    void: bool = False
    gone: bool = False


FIELDS = attrgetter(*TicketState._fields)


class Procedure(NamedTuple):
    """A procedure on its way: how to run it again up to here, and what it asks for next."""

    name: str
    ticket: TicketState
    argument: Any
    sights: tuple[Any, ...]
    replies: tuple[Any, ...]
    wants: tuple[Any, ...]


class Client(NamedTuple):
    """One process. ``doing`` is where its caller stands: joining, waiting, confirming, inside, ..."""

    session: str
    doing: str = "idle"
    caller: Procedure | None = None
    heart: Procedure | None = None
    ticket: TicketState = TicketState()
    sights: tuple[Any, ...] = ()
    is_due: bool = False
    """Its heart has to beat before more time may pass."""
    turn: bool = False
    """Its heart has told its caller to ask."""
    state: str = "live"
    was_frozen: bool = False
    rounds: int = 1

    @property
    def has_asked(self) -> bool:
        """Whether it has had a number yet."""
        return bool(self.ticket.number) or self.doing == "done"


class State(NamedTuple):
    """Everything there is."""

    now: float
    store: tuple[tuple[str, bytes], ...]
    clients: tuple[Client, ...]
    crashes: int
    freezes: int
    lapses: int
    idle_lapses: int


@dataclass(frozen=True)
class World:
    """What may happen."""

    clients: int = 3
    rounds: int = 1
    crashes: int = 1
    freezes: int = 1
    lapses: int = 4
    idle_lapses: int = 0
    """How many of them may pass while nobody is silent."""
    faulty: str = "abc"
    """The sessions that may be crashed or frozen."""
    faulty_in: str = ""
    """The procedure in which alone they may; anywhere when empty."""
    gives_up: bool = False
    """The last client may leave while it waits."""
    tickets: type[Tickets] = Tickets
    believes_bells: bool = False
    ring_reaches_heart: bool = True
    thaws_mid_look: bool = False
    """Time may also pass while the only one who times others is frozen in doing so."""
    tidies_up: bool = True
    whole_hearts: str = ""
    """The sessions whose heart does a beat and the look after it in one go."""

    def initial(self) -> State:
        clients = tuple(Client(chr(ord("a") + i), rounds=self.rounds) for i in range(self.clients))
        return State(0.0, (), clients, self.crashes, self.freezes, self.lapses, self.idle_lapses)

    # -- what can happen next -----------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Each thing that can happen next, with its name."""
        threads = self.runnable(state)
        # Reading a clock commutes with what other threads do: it goes first, unless time or a fault does.
        local = [(i, t) for i, t in threads if (p := getattr(state.clients[i], t)) and p.wants == CLOCK]
        for i, thread in local[:1] or threads:
            yield f"{state.clients[i].session}.{thread}", self.step(state, i, thread)
        for i, client in enumerate(state.clients):
            if client.state == "live" and self.may_fail(client, i):
                if state.crashes:
                    yield from self.silenced(state, i, "crashed")
                if state.freezes:
                    yield from self.silenced(state, i, "frozen")
            if client.state == "frozen":
                due = client.doing not in ("idle", "done", "joining")
                yield f"{client.session} thaws", self.put(state, i, client._replace(state="live", is_due=due))
            if (
                self.gives_up
                and i == self.clients - 1
                and client.state == "live"
                and client.doing == "waiting"
            ):
                leaver = self.begin(client._replace(doing="leaving"), "caller", "leave", None)
                yield f"{client.session} gives up", self.put(state, i, leaver)
        if state.lapses and self.may_lapse(state, idly=False):
            yield "time passes", self.lapse(state)
        elif state.idle_lapses and self.may_lapse(state, idly=True):
            idler = state._replace(idle_lapses=state.idle_lapses - 1, lapses=state.lapses + 1)
            yield "time passes idly", self.lapse(idler)

    def runnable(self, state: State) -> list[tuple[int, str]]:
        return [
            (i, thread)
            for i, client in enumerate(state.clients)
            if client.state == "live"
            for thread in ("caller", "heart")
            if self.can_run(state, i, thread)
        ]

    def can_run(self, state: State, i: int, thread: str) -> bool:
        client = state.clients[i]
        if thread == "heart":
            return client.heart is not None or (client.is_due and bool(client.ticket.number))
        if client.doing == "idle" and i and not state.clients[i - 1].has_asked:
            return False  # they are all alike, so one order of their first numbers stands for each
        if client.caller is not None:
            return True
        if client.doing == "waiting":
            return client.turn or f"bell/{client.ticket.number}/{NAME}" in dict(state.store)
        return client.doing in ("idle", "inside")

    def may_lapse(self, state: State, *, idly: bool) -> bool:
        """Whether half a ttl may pass now: somebody is timed, and nobody live would be silent for it."""
        busy = [client for client in state.clients if client.doing not in ("idle", "done")]
        live = [client for client in busy if client.state == "live"]
        if self.thaws_mid_look:
            live += [client for client in busy if client.state == "frozen" and client.heart is not None]
        return (
            (idly or any(client.state != "live" for client in busy))
            and any(client.doing == "waiting" and (client.sights or client.heart) for client in live)
            and all(
                client.doing in ("releasing", "leaving")
                or client.state != "live"
                or (client.doing != "joining" and not client.is_due and client.heart is None)
                for client in live
            )
        )

    def lapse(self, state: State) -> State:
        clients = tuple(
            client._replace(is_due=client.state == "live" and client.doing not in ("idle", "done", "joining"))
            for client in state.clients
        )
        return state._replace(now=state.now + HALF, lapses=state.lapses - 1, clients=clients)

    def may_fail(self, client: Client, i: int) -> bool:
        doing = [procedure.name for procedure in (client.caller, client.heart) if procedure is not None]
        return (
            client.session in self.faulty
            and (bool(client.ticket.number) or i == self.clients - 1)
            and (not self.faulty_in or self.faulty_in in doing)
        )

    def silenced(self, state: State, i: int, how: str) -> Iterator[tuple[str, State]]:
        """Silence a client, and let time pass: a silence in which none does is only a slow step."""
        client = state.clients[i]
        state = self.put(state, i, client._replace(state=how, was_frozen=True))
        if how == "crashed":
            state = state._replace(crashes=state.crashes - 1)
        else:
            state = state._replace(freezes=state.freezes - 1)
        if state.lapses and self.may_lapse(state, idly=False):
            yield f"{client.session} is {how} and time passes", self.lapse(state)

    @staticmethod
    def put(state: State, i: int, client: Client) -> State:
        return state._replace(clients=(*state.clients[:i], client, *state.clients[i + 1 :]))

    # -- one step -------------------------------------------------------------------------------------

    def step(self, state: State, i: int, thread: str) -> State:
        """Let a thread do its next operation, and what nobody else can see of it before the one after."""
        state = self.one(state, i, thread)
        while (on := getattr(state.clients[i], thread)) is not None and (
            hidden(on.wants) or (thread == "heart" and state.clients[i].session in self.whole_hearts)
        ):
            state = self.one(state, i, thread)
        return state

    def one(self, state: State, i: int, thread: str) -> State:
        client = state.clients[i]
        procedure: Procedure | None = getattr(client, thread)
        if procedure is None:
            return self.put(state, i, self.start(client, thread))
        store = dict(state.store)
        reply = state.now if procedure.wants == CLOCK else perform(store, *procedure.wants)
        unchanged = tuple(sorted(store.items())) == state.store
        state = state._replace(store=tuple(sorted(store.items())))
        if unchanged and claims_a_step(procedure.wants, reply):
            raise Violation(f"{client.session} takes for its own a step of head that another took")
        run = self.run(client.session, procedure, (*procedure.replies, reply))
        if run.before != run.after:
            changes = zip(TicketState._fields, run.before, run.after, strict=True)
            changed = {name: after for name, before, after in changes if before != after}
            client = client._replace(ticket=client.ticket._replace(**changed))
        if not run.ended:
            going_on = procedure._replace(replies=(*procedure.replies, reply), wants=run.value)
            return self.put(state, i, client._replace(**{thread: going_on}))
        client = client._replace(**{thread: None})
        if thread == "heart":
            return self.put(state, i, self.beaten(client, procedure, run))
        return self.finished(state, i, client, procedure, run)

    def start(self, client: Client, thread: str) -> Client:
        """Begin what the thread does when it has nothing on its way."""
        if thread == "heart":
            return self.begin(client._replace(is_due=False), "heart", "beat", None)
        if client.doing == "idle":
            client = client._replace(doing="joining", ticket=TicketState(), rounds=client.rounds - 1)
            return self.begin(client, "caller", "join", None)
        if client.doing == "waiting":
            client = client._replace(doing="confirming", turn=False)
            if self.believes_bells:
                held = client.ticket._replace(token=client.ticket.number)
                return client._replace(doing="inside", ticket=held)
            return self.begin(client, "caller", "beat", None)
        return self.begin(client._replace(doing="releasing"), "caller", "release", None)

    def beaten(self, client: Client, procedure: Procedure, run: Run) -> Client:
        """The heart has finished a beat, or a look at those ahead."""
        if procedure.name == "look":
            return client._replace(sights=run.sights)
        if not client.ticket.number or client.doing in ("joining", "releasing", "leaving", "done"):
            return client
        client = self.judged(client, run.value, hold=False)
        head = run.value.heads[NAME]
        waits = client.ticket.token is None and not client.ticket.gone
        if waits and (
            client.ticket.void or (self.ring_reaches_heart and head.number == client.ticket.number)
        ):
            client = client._replace(turn=True)
        if waits and not client.ticket.void and head.number < client.ticket.number:
            return self.begin(client, "heart", "look", (head, client.ticket.number))
        return client

    def finished(self, state: State, i: int, client: Client, procedure: Procedure, run: Run) -> State:
        """The caller's procedure has come to its end."""
        if procedure.name == "join":
            held = client.ticket.token is not None
            client = client._replace(doing="inside" if held else "waiting", is_due=not held)
        elif procedure.name == "beat":
            client = self.judged(client, run.value, hold=True)
            if client.ticket.token is not None:
                client = client._replace(doing="inside")
            elif client.ticket.void:
                client = self.begin(client._replace(doing="joining"), "caller", "join", None)
            else:
                client = client._replace(doing="waiting")
        else:
            doing = "idle" if client.rounds else "done"
            client = client._replace(doing=doing, ticket=TicketState(), turn=False, is_due=False, sights=())
        state = self.put(state, i, client)
        if client.doing == "inside":
            self.check_order(state, client)
        return state

    def judged(self, client: Client, reading: Any, *, hold: bool) -> Client:
        ticket = ticket_of(client.ticket)
        if not ticket.gone:
            self.tickets(client.session).judge(ticket, reading, hold=hold)
        return client._replace(ticket=state_of(ticket))

    def begin(self, client: Client, thread: str, name: str, argument: Any) -> Client:
        procedure = Procedure(name, client.ticket, argument, client.sights, (), ())
        run = self.run(client.session, procedure, ())
        if run.ended:
            raise AssertionError(f"{name} asks the store for nothing")
        return client._replace(**{thread: procedure._replace(wants=run.value)})

    def run(self, session: str, procedure: Procedure, replies: tuple[Any, ...]) -> Run:
        return run(self.tickets, session, procedure, replies)

    # -- what must hold -------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """Raise Violation when two grants that are not lost stand side by side."""
        holders = [
            client.session
            for client in state.clients
            if client.doing == "inside"
            and not client.ticket.gone
            and state.now < client.ticket.proven + TTL
            and client.state != "crashed"
        ]
        if len(holders) > 1:
            raise Violation(f"{' and '.join(holders)} hold the lock together")

    def check_order(self, state: State, entering: Client) -> None:
        for other in state.clients:
            if (
                other.doing in ("waiting", "confirming")
                and not other.was_frozen
                and other.ticket.token is None
                and not other.ticket.void
                and other.ticket.number < entering.ticket.number
            ):
                raise Violation(f"{entering.session} is in before {other.session}, who came first")

    def check_end(self, state: State) -> None:
        """Nothing can happen any more but that time passes: who lives must come to its end, and tidy up."""
        state = self.run_out(state)
        stuck = [c.session for c in state.clients if c.state == "live" and c.doing != "done"]
        if stuck:
            raise Violation(f"{', '.join(stuck)} wait for ever")
        if self.tidies_up and not any(client.was_frozen for client in state.clients):
            left = [key for key, _ in state.store if key.startswith("bell/")]
            lines = [key for key, _ in state.store if key.startswith("line/")]
            if left or len(lines) > 1:
                raise Violation(f"left behind: {left or lines}")

    def run_out(self, state: State) -> State:
        """Let time pass, and everybody do what it can, in turn."""
        for _ in range(3 * self.clients):
            if not self.may_lapse(state, idly=False):
                break
            state = self.lapse(state)
            while runnable := self.runnable(state):
                for i, thread in runnable:
                    if self.can_run(state, i, thread):
                        state = self.step(state, i, thread)
                        self.check(state)
        return state


class Run(NamedTuple):
    """What came of running a procedure up to some point."""

    before: TicketState
    after: TicketState
    sights: tuple[Any, ...]
    value: Any
    ended: bool


@cache
def run(cls: type[Tickets], session: str, procedure: Procedure, replies: tuple[Any, ...]) -> Run:
    """Run a procedure again from its start: what came of the last of *replies*."""
    tickets, ticket = cls(session), ticket_of(procedure.ticket)
    tickets._sights = {NAME: dict(procedure.sights)}
    steps = {
        "join": lambda: tickets.join(ticket),
        "beat": lambda: tickets.beat([NAME]),
        "release": lambda: tickets.release(ticket),
        "leave": lambda: tickets.leave(ticket),
        "look": lambda: tickets.look(NAME, *procedure.argument),
    }[procedure.name]()
    before = procedure.ticket
    value = next(steps)
    ended = False
    try:
        for reply in replies[:-1]:
            steps.send(reply)
        before = state_of(ticket)
        if replies:
            value = steps.send(replies[-1])
        value = tuple(tuple(part) if isinstance(part, list) else part for part in value)
    except StopIteration as stop:
        value, ended = stop.value, True
    return Run(before, state_of(ticket), tuple(sorted(tickets._sights[NAME].items())), value, ended)


def claims_a_step(operation: tuple[Any, ...], reply: Any) -> bool:
    """Whether whoever gets *reply* must believe that it moved head on."""
    name, key = operation[:2] if len(operation) > 1 else ("", "")
    if name != "compare_set" or key != f"head/{NAME}":
        return False
    expected, wanted = operation[2:]
    return bool(expected) and reply == wanted != expected


def hidden(operation: tuple[Any, ...]) -> bool:
    """Whether an operation commutes with all that others do: nobody else reads the list of names here."""
    return str(operation[1]).startswith("name") if len(operation) > 1 else False


def ticket_of(state: TicketState) -> NumberedTicket:
    ticket = NumberedTicket(NAME, TTL, b"r")
    for name, value in zip(TicketState._fields, state, strict=True):
        setattr(ticket, name, value)
    return ticket


def state_of(ticket: NumberedTicket) -> TicketState:
    return TicketState._make(FIELDS(ticket))


def perform(store: dict[str, bytes], operation: str, *arguments: Any) -> Any:
    """One operation as a TCPStore does it, its oddities included."""
    if operation == "add":
        key, amount = arguments
        store[key] = b"%d" % (int(store.get(key, b"0")) + amount)
        return int(store[key])
    if operation in ("append", "set"):
        key, value = arguments
        value = value.encode() if isinstance(value, str) else value
        store[key] = (store.get(key, b"") if operation == "append" else b"") + value
        return None
    if operation == "compare_set":
        key, expected, value = arguments
        if key not in store:
            if expected:
                return expected  # says what was expected, though nothing stands
            store[key] = value
        elif store[key] == expected:
            store[key] = value
        return store[key]
    if operation == "check":
        return all(key in store for key in arguments[0])
    if operation == "multi_get":
        missing = [key for key in arguments[0] if key not in store]
        if missing:
            raise Violation(f"multi_get would wait for {missing}")
        return tuple(store[key] for key in arguments[0])
    if operation == "delete_key":
        return store.pop(arguments[0], None) is not None
    raise AssertionError(operation)


@dataclass
class Search:
    """A depth-first search through a World that visits each state once."""

    world: World
    limit: int | None = None
    visited: set[State] = field(default_factory=set)
    ends: int = 0

    def run(self) -> int:
        """How many states there are; Violation carries the way to a bad one."""
        with mock.patch.multiple(_tickets, GRACE_S=HALF, BLOCK=2):
            return self._run()

    def _run(self) -> int:
        start = self.world.initial()
        self.visited.add(start)
        path: list[str] = []
        stack = [self._moves(start)]
        while stack:
            try:
                label, state = next(stack[-1])
            except StopIteration:
                stack.pop()
                if path:
                    path.pop()
                continue
            except Violation as violation:
                raise Violation(f"{violation}\n  after: {', '.join(path)}, and one step more") from None
            if state in self.visited:
                continue
            self.visited.add(state)
            if self.limit is not None and len(self.visited) > self.limit:
                break
            path.append(label)
            try:
                self.world.check(state)
            except Violation as violation:
                raise Violation(f"{violation}\n  after: {', '.join(path)}") from None
            stack.append(self._moves(state))
        return len(self.visited)

    def _moves(self, state: State) -> Iterator[tuple[str, State]]:
        moved = False
        for move in self.world.moves(state):
            moved = True
            yield move
        if not moved:
            self.ends += 1
            self.world.check_end(state)


def explore(world: World, *, limit: int | None = None) -> int:
    """Visit every state of *world*, or the first *limit*; return how many."""
    return Search(world, limit).run()
