"""The Redis lock keeps its promises in every reachable state, a broken one is caught, and Lua agrees."""

from __future__ import annotations

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dprims.backends import _redis_scripts as lua
from dprims.backends.redis import _on_queue
from dprims.testing.servers import RedisServer

from .model.redis_lock import Client, Queue, Request, Violation, World, explore

# -- it holds -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "world",
    [
        pytest.param(World(gives_up=False), id="crash and freeze"),
        pytest.param(World(crashes=0), id="freeze and leave"),
        pytest.param(
            World(clients=2, crashes=0, cuts=1, beats=True, gives_up=False), id="freeze, cut and beats"
        ),
        pytest.param(World(clients=2, rounds=2, crashes=0, cuts=1, gives_up=False), id="two rounds"),
        pytest.param(
            World(rounds=2, crashes=0, freezes=0, timers=False, gives_up=False), id="notifications alone"
        ),
        pytest.param(World(), id="everything", marks=[pytest.mark.chaos, pytest.mark.timeout(900)]),
    ],
)
def test_exclusion_order_and_progress(world: World) -> None:
    assert explore(world) > 1000


# -- and fails when it is broken ------------------------------------------------------------------


class TrustsWakeUps(World):
    def read(self, client: Client, request: Request) -> dict[str, object]:
        return {"doing": "holding", "believes": True} if request.woken else super().read(client, request)


class TrustsOldReplies(World):
    def disbelieved(self, request: Request) -> bool:
        return False


class HandsNothingOver(Queue):
    def release(self, ticket: str) -> tuple[Queue, int]:
        return (self._replace(holder=None), 1) if self.holder == ticket else (self, 0)


class LetsAnybodyRelease(Queue):
    def release(self, ticket: str) -> tuple[Queue, int]:
        return self._replace(holder=None).settle(), 1


class LetsNewcomersIn(Queue):
    def acquire(self, ticket: str) -> tuple[Queue, int]:
        return super().acquire(ticket) if self.holder else (queue := self.grant(ticket), queue.token)


class LastComeFirstServed(Queue):
    def acquire(self, ticket: str) -> tuple[Queue, int]:
        queue, token = super().acquire(ticket)
        if queue.waiting and queue.waiting != self.waiting:
            queue = queue._replace(waiting=(queue.waiting[-1], *queue.waiting[:-1]))
        return queue, token


class StartsTokensAnew(Queue):
    def grant(self, ticket: str) -> Queue:
        return self._replace(holder=ticket, token=1)


@pytest.mark.parametrize(
    ("world", "says"),
    [
        (TrustsWakeUps(crashes=0, gives_up=False), "exclusion"),
        (TrustsOldReplies(), "exclusion"),
        (World(queue=HandsNothingOver(), crashes=0, freezes=0, timers=False, gives_up=False), "stuck"),
        (World(queue=LetsAnybodyRelease()), "exclusion"),
        (World(queue=LetsNewcomersIn()), "order"),
        (World(queue=LastComeFirstServed()), "order"),
        (World(queue=StartsTokensAnew()), "token"),
    ],
    ids=lambda value: type(value.queue if type(value) is World else value).__name__,
)
def test_a_broken_one_is_caught(world: World, says: str) -> None:
    with pytest.raises(Violation, match=says):
        explore(world)


# -- the scripts decide the same ------------------------------------------------------------------

TICKETS = ["a", "b", "c", "d"]
FIRST_TOKEN = 4 * 10**15  # far ahead of any clock, so that tokens are counted from here
STEPS = ["acquire", "release", "leave", "beat", "evict", "wake", "lock expires", "ticket expires"]


class Server:
    """The scripts on a real server, seen as a :class:`Queue`."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        client.flushdb()
        client.set(lua.PREFIX + "token", FIRST_TOKEN)
        self.tokens: dict[str, int] = {}

    def step(self, step: str, ticket: str) -> int:
        if step == "acquire":
            token, _ = self.run(lua.ACQUIRE, ticket, self.ttl(ticket), self.record(ticket))
            self.tokens[ticket] = int(token or FIRST_TOKEN)
            return self.tokens[ticket] - FIRST_TOKEN
        if step == "beat":
            return self.run(lua.BEAT, ticket, self.ttl(ticket))
        if step == "leave":
            return self.run(lua.LEAVE, ticket, 0)
        if step == "release":
            return self.run(lua.RELEASE, ticket)
        if step == "evict":
            return self.run(lua.EVICT, self.tokens.get(ticket, 0))
        key = {"wake": f"wake:{ticket}", "lock expires": "lock:x", "ticket expires": f"ticket:{ticket}"}[step]
        return int(self.client.delete(lua.PREFIX + key))

    def run(self, script: lua.Script, *args: object) -> int:
        _, *rest = _on_queue(script, "x", *args)
        return self.client.eval(script.source, *rest)

    def seen(self) -> Queue:
        """The keys as they stand; each has the ttl and record of its own ticket."""
        keys = {key.decode().removeprefix(lua.PREFIX) for key in self.client.keys("*")}
        holder = None
        if entry := self.client.get(lua.PREFIX + "lock:x"):
            holder, token, ttl, record = entry.split(b" ", 3)
            holder = holder.decode()
            assert (int(ttl), record, token) == (self.ttl(holder), self.record(holder), self.token())
            self.fresh("lock:x", holder)
        live = {key.partition(":")[2] for key in keys if key.startswith("ticket:")}
        for ticket in live:
            value = self.client.get(f"{lua.PREFIX}ticket:{ticket}")
            assert value == b"%d %s" % (self.ttl(ticket), self.record(ticket))
            self.fresh(f"ticket:{ticket}", ticket)
        assert ("names" in keys) >= (holder is not None)
        return Queue(
            holder,
            int(self.token()) - FIRST_TOKEN,
            tuple(ticket.decode() for ticket in self.client.lrange(lua.PREFIX + "queue:x", 0, -1)),
            frozenset(live),
            frozenset(key.partition(":")[2] for key in keys if key.startswith("wake:")),
        )

    def fresh(self, key: str, ticket: str) -> None:
        assert self.ttl(ticket) - 30_000 < self.client.pttl(lua.PREFIX + key) <= self.ttl(ticket)

    def token(self) -> bytes:
        return self.client.get(lua.PREFIX + "token")

    @staticmethod
    def ttl(ticket: str) -> int:
        return 100_000 * (1 + TICKETS.index(ticket))

    @staticmethod
    def record(ticket: str) -> bytes:
        return f"record {ticket} \0\n%".encode()


def model_step(queue: Queue, server: Server, step: str, ticket: str) -> tuple[Queue, int]:
    if step == "evict":  # by the token of the ticket's last grant, which is good while it holds
        standing = queue.holder == ticket and server.tokens.get(ticket) == FIRST_TOKEN + queue.token
        return queue.release(ticket) if standing else (queue, 0)
    if step == "wake":
        return queue._replace(wakes=queue.wakes - {ticket}), int(ticket in queue.wakes)
    if step == "lock expires":
        return queue._replace(holder=None), int(queue.holder is not None)
    if step == "ticket expires":
        return queue._replace(live=queue.live - {ticket}), int(ticket in queue.live)
    return getattr(queue, step)(ticket)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    database=None,
)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(TICKETS)), max_size=30))
def test_the_scripts_decide_as_the_model_does(
    redis_server: RedisServer, steps: list[tuple[str, str]]
) -> None:
    with redis.Redis(port=redis_server.port, db=2) as client:
        server, queue = Server(client), Queue()
        for step, ticket in steps:
            queue, expected = model_step(queue, server, step, ticket)
            assert server.step(step, ticket) == expected, (step, ticket)
            assert server.seen() == queue, (step, ticket)
