"""The Redis backend where it differs from the others: clients, URLs, keys, scripts and their cost."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
import redis
from redis.crc import key_slot

import dprims
from dprims.backends.redis import RedisBackend
from dprims.exceptions import BackendMisconfigured, BackendUnavailable
from dprims.testing.servers import RedisServer

from .helpers.services import until

LIMIT = 30.0


@pytest.fixture
def admin(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A client on an emptied database."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def backend(redis_server: RedisServer, admin: redis.Redis) -> Iterator[RedisBackend]:
    with dprims.connect(redis_server.url) as backend:
        yield backend


def commands(admin: redis.Redis) -> int:
    """How many commands the server has run, those inside scripts too; asking is not counted."""
    stats = admin.info("commandstats")
    return sum(
        line["calls"] for name, line in stats.items() if name not in ("cmdstat_info", "cmdstat_client")
    )


def waiting(backend: RedisBackend, name: str) -> int:
    return sum(place.token is None for place in backend.queue(name))


# -- ways to connect ------------------------------------------------------------------------------


def _valkey(server: RedisServer) -> object:
    return pytest.importorskip("valkey").Valkey(port=server.port, decode_responses=True)


CLIENTS: dict[str, Callable[[RedisServer], object]] = {
    "plain": lambda server: redis.Redis(port=server.port),
    "decoding": lambda server: redis.Redis(port=server.port, decode_responses=True, health_check_interval=1),
    "one connection": lambda server: redis.Redis(
        connection_pool=redis.ConnectionPool.from_url(server.url, max_connections=1)
    ),
    "no timeout": lambda server: redis.Redis(port=server.port, socket_timeout=None),
    "another encoding": lambda server: redis.Redis(port=server.port, encoding="latin-1"),
    "RESP3": lambda server: redis.Redis(port=server.port, protocol=3),
    "socket file": lambda server: redis.Redis.from_url(server.unix_url),
    "valkey": _valkey,
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_client_that_was_passed_in_is_used_as_it_connects_and_left_alone(
    redis_server: RedisServer, admin: redis.Redis, kind: str
) -> None:
    client = CLIENTS[kind](redis_server)
    backend = RedisBackend(client=client)
    lock = dprims.DistributedLock("passed in ключ", backend)
    with lock as grant:
        assert admin.get("{dprims}:lock:dprims/passed in ключ")
        assert lock.owner().token == grant.token
        assert backend.compare_and_set("cell", None, b"\xff\x00") == b"\xff\x00"
        assert backend.get("cell") == b"\xff\x00"
    backend.close()
    assert client.ping()
    client.close()


def test_resolve_gives_one_backend_for_one_client(redis_server: RedisServer) -> None:
    client = redis.Redis(port=redis_server.port)
    one, two = dprims.DistributedLock("a", client), dprims.DistributedLock("b", client)
    assert one.backend is two.backend
    one.backend.close()
    client.close()


def test_password_user_database_and_socket_file() -> None:
    with (
        RedisServer(password="secret/@") as server,
        redis.Redis(port=server.port, password="secret/@") as admin,
    ):
        admin.execute_command(
            "ACL", "SETUSER", "worker", "on", ">pw", "~{dprims}:*", "+@all", "resetchannels"
        )
        for url in (
            f"redis://:secret%2F%40@127.0.0.1:{server.port}/3",
            f"redis://worker:pw@127.0.0.1:{server.port}?db=3",
            f"unix://worker:pw@{server.directory / 'socket'}?db=3",
        ):
            with dprims.connect(url) as backend, dprims.DistributedLock("x", backend):
                assert admin.info("keyspace")["db3"]["keys"] >= 2
                assert "pw" not in repr(backend)
                assert "cret" not in repr(backend)
        for wrong in ("nobody:pw@", ":nope@", ""):
            with pytest.raises(BackendMisconfigured, match=rf"127\.0\.0\.1:{server.port}.*credentials"):
                dprims.connect(f"redis://{wrong}127.0.0.1:{server.port}")


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("redis://127.0.0.1:1", BackendUnavailable, r"127\.0\.0\.1:1.*refused"),
        ("redis://no-such-host.invalid", BackendUnavailable, "no-such-host.invalid:6379"),
        ("redis://127.0.0.1:6379/seven", BackendMisconfigured, "seven"),
        ("redis://127.0.0.1:port", BackendMisconfigured, "port"),
        ("redis://127.0.0.1:6379?wait_replicas=two", BackendMisconfigured, "two"),
        ("redis://127.0.0.1:6379?wait_replicas=-1", BackendMisconfigured, "-1"),
        ("redis://h?soket_timeout=2", BackendMisconfigured, "'soket_timeout' is unknown.* socket_timeout"),
        (
            "redis://h?nosuch=1",
            BackendMisconfigured,
            "'nosuch' is unknown; expected timeout, wait_replicas, ",
        ),
        ("redis://h?ssl_ca_certs=f", BackendMisconfigured, "'ssl_ca_certs' is unknown.*Connection"),
        ("redis://127.0.0.1:6379?timeout=0", BackendMisconfigured, "timeout is 0.0"),
        ("redis://127.0.0.1:6379?timeout=nan", BackendMisconfigured, "timeout is nan"),
        ("redis://127.0.0.1:6379?timeout=soon", BackendMisconfigured, "soon"),
        ("unix:///nowhere/redis.sock", BackendUnavailable, "/nowhere/redis.sock"),
    ],
)
def test_an_address_that_cannot_work_is_named(url: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        dprims.connect(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hun/ter2@h",
        "redis://u:1#ter2@h",
        "redis://u:hun?ter2@h",
        "unix://u:hun/ter2@/nowhere",
        "redis://u:hun@ter2@h/x",
        "redis://h?password=hun@ter2&nosuch=1",
        "memory://u:hunter2@h/x",
    ],
)
def test_a_password_is_not_shown_however_it_is_written(url: str) -> None:
    with pytest.raises(BackendMisconfigured, match=r"\*\*\*") as refused:
        dprims.connect(url)
    assert "hun" not in str(refused.value)
    assert "ter2" not in str(refused.value)


def test_a_password_among_the_options_is_not_shown() -> None:
    with RedisServer(password="hunter2") as server:
        url = f"redis://127.0.0.1:{server.port}/?password=hunter2&db=1"
        with dprims.connect(url) as backend:
            assert repr(backend) == f"<RedisBackend {url.replace('hunter2', '***')}>"
            assert "hunter2" not in repr(dprims.DistributedLock("x", backend))


def test_a_database_that_is_not_there(redis_server: RedisServer) -> None:
    with pytest.raises(BackendMisconfigured, match="999"):
        dprims.connect(f"redis://127.0.0.1:{redis_server.port}/999")


def test_a_client_that_cannot_be_used() -> None:
    import redis.asyncio

    for client in (redis.asyncio.Redis(), object()):
        with pytest.raises(BackendMisconfigured, match="blocking client"):
            RedisBackend(client=client)
    with pytest.raises(BackendMisconfigured, match="one of them"):
        RedisBackend()


# -- keys -----------------------------------------------------------------------------------------

NAMES = ["plain", "a b", "a/b/c", "{x}", "}{", "{}", "{dprims}:lock:a", "ключ/锁", "*?[a-z]\\", "%2F"]


def test_every_key_is_in_one_slot_whatever_the_name(backend: RedisBackend, admin: redis.Redis) -> None:
    for name in NAMES:
        first = backend.enqueue(f"n/{name}", 60, b"first")
        second = backend.enqueue(f"n/{name}", 60, b"second")
        assert first.held
        assert not second.held
        assert [place.record for place in backend.queue(f"n/{name}")] == [b"first", b"second"]
        backend.compare_and_set(name, None, b"v")
        assert len({key_slot(key) for key in admin.keys("*")}) == 1
        assert all(key.startswith(b"{dprims}:") for key in admin.keys("*"))
    assert [place.name for place in backend.held("n/")] == sorted(f"n/{name}" for name in NAMES)
    assert [place.name for place in backend.held("n/a")] == ["n/a b", "n/a/b/c"]
    assert backend.held("n/*") == [place for place in backend.held("") if place.name.startswith("n/*")]


def test_records_are_any_bytes(backend: RedisBackend) -> None:
    for record in (b"", b" ", b"\x00\n\r \xff%", b"12 34 56", b"x" * 16384):
        tickets = [backend.enqueue("records", 60, record) for _ in range(2)]
        assert [place.record for place in backend.queue("records")] == [record, record]
        assert backend.release(tickets[0])
        assert [place.record for place in backend.queue("records")] == [record]
        assert backend.await_turn(tickets[1], 0)
        assert backend.release(tickets[1])


def test_nothing_is_left_but_the_last_token(backend: RedisBackend, admin: redis.Redis) -> None:
    lock = dprims.DistributedLock("again", backend)
    lock.acquire().release()
    connections = len(admin.client_list())
    for _ in range(1000):
        lock.acquire().release()
    for n in range(100):
        dprims.DistributedLock(f"once {n}", backend).acquire().release()
    assert lock.acquire(0)
    assert [dprims.DistributedLock("again", backend, namespace="other").acquire(0).release()] == [None]
    waiter = threading.Thread(target=lambda: dprims.DistributedLock("again", backend).acquire(0.01))
    waiter.start()
    waiter.join()
    lock.release()
    assert admin.keys("*") == [b"{dprims}:token"]
    assert len(admin.client_list()) <= connections + 1


def test_a_queue_whose_waiters_all_died_vanishes(backend: RedisBackend, admin: redis.Redis) -> None:
    backend.enqueue("left", 0.2, b"")
    backend.enqueue("left", 0.1, b"")
    until(lambda: set(admin.keys("*")) <= {b"{dprims}:token", b"{dprims}:names"})
    assert backend.held("") == []
    assert admin.keys("*") == [b"{dprims}:token"]


def test_a_queue_that_was_evicted_is_joined_again(backend: RedisBackend, admin: redis.Redis) -> None:
    holder, waiter = backend.enqueue("evicted", 60, b""), backend.enqueue("evicted", 60, b"")
    admin.delete("{dprims}:queue:evicted")
    assert not backend.await_turn(waiter, 0)
    assert backend.release(holder)
    assert backend.await_turn(waiter, 0)


def test_beats_alone_keep_a_waiters_place(backend: RedisBackend, admin: redis.Redis) -> None:
    holder, waiter = backend.enqueue("kept", 60, b""), backend.enqueue("kept", 0.2, b"")
    until_then = time.monotonic() + 1
    while time.monotonic() < until_then:
        backend.beat([waiter], LIMIT)
    assert backend.release(holder)
    assert backend.await_turn(waiter, 0)


def test_a_hand_over_gives_the_next_owner_its_own_ttl(backend: RedisBackend, admin: redis.Redis) -> None:
    first, second = backend.enqueue("own", 1, b""), backend.enqueue("own", 30, b"")
    assert backend.release(first)
    assert 29 < admin.pttl("{dprims}:lock:own") / 1000 <= 30
    assert backend.await_turn(second, 0)


# -- tokens ---------------------------------------------------------------------------------------


def test_tokens_grow_when_the_data_are_gone(backend: RedisBackend, admin: redis.Redis) -> None:
    lock = dprims.DistributedLock("token", backend)
    tokens = []
    for _ in range(5):
        with lock as grant:
            tokens.append(grant.token)
        admin.flushall()
    assert tokens == sorted(set(tokens))


def test_tokens_grow_when_the_servers_clock_goes_back(backend: RedisBackend, admin: redis.Redis) -> None:
    ahead = (int(time.time()) + 3600) * 1_000_000
    admin.set("{dprims}:token", ahead)
    assert [dprims.DistributedLock("token", backend).acquire(0).token for _ in "a"] == [ahead + 1]


# -- cost -----------------------------------------------------------------------------------------


def test_work_per_acquisition_does_not_grow_with_the_queue(backend: RedisBackend, admin: redis.Redis) -> None:
    def cost(waiters: int) -> float:
        name = uuid.uuid4().hex
        tickets = [backend.enqueue(name, 60, b"x" * 100) for _ in range(waiters + 1)]
        before = commands(admin)
        for _ in range(64):
            backend.release(tickets.pop(0))
            assert backend.await_turn(tickets[0], LIMIT)
            tickets.append(backend.enqueue(name, 60, b"x" * 100))
        return (commands(admin) - before) / 64

    cost(2)  # the scripts are loaded
    few = cost(2)
    assert [round(cost(waiters) / few, 1) for waiters in (16, 64)] == [1, 1]


def test_a_waiter_polls_nothing(backend: RedisBackend, admin: redis.Redis) -> None:
    backend.enqueue("quiet", 60, b"")
    waiter = backend.enqueue("quiet", 60, b"")
    threads = [
        threading.Thread(target=lambda: backend.await_turn(waiter, 1)),
        threading.Thread(target=lambda: backend.wait("quiet", 1)),
    ]
    before = commands(admin)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert commands(admin) - before < 60


def test_a_lost_script_cache_is_filled_again(backend: RedisBackend, admin: redis.Redis) -> None:
    lock = dprims.DistributedLock("flushed", backend)
    with lock as grant:
        admin.script_flush()
        grant.verify()
        admin.script_flush()
    assert lock.owner() is None


# -- threads and forks ----------------------------------------------------------------------------


def test_64_threads_and_flat_connections(backend: RedisBackend, admin: redis.Redis) -> None:
    inside, most, tokens = 0, 0, []

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with dprims.DistributedLock("many", backend) as grant:
                inside += 1
                most = max(most, inside)
                tokens.append(grant.token)
                inside -= 1

    def round_of_64() -> int:
        threads = [threading.Thread(target=work) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: len(admin.client_list()) <= 12)
        return len(admin.client_list())

    first = round_of_64()
    assert round_of_64() <= max(first, 10)
    assert most == 1
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 640


def test_a_forked_child_has_connections_of_its_own(backend: RedisBackend) -> None:
    lock = dprims.DistributedLock("fork", backend)
    with lock as grant:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert grant.lost
                assert lock.owner().token == grant.token
                assert lock.acquire(0) is None
                for n in range(200):
                    assert backend.compare_and_set(f"child {n}", None, b"%d" % n) == b"%d" % n
                status = 0
            finally:
                os._exit(status)
        for n in range(200):
            assert backend.compare_and_set(f"parent {n}", None, b"%d" % n) == b"%d" % n
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        grant.verify()


def test_close_ends_what_waits(redis_server: RedisServer) -> None:
    backend = dprims.connect(redis_server.url)
    failed: list[BaseException] = []
    holder = backend.enqueue("closing", 60, b"")
    threads = [
        threading.Thread(
            target=lambda: _note(failed, lambda: dprims.DistributedLock("w", backend).acquire())
        ),
        threading.Thread(target=lambda: _note(failed, lambda: backend.wait("closing", 60))),
    ]
    with dprims.connect(redis_server.url) as other, dprims.DistributedLock("w", other):
        for thread in threads:
            thread.start()
        until(lambda: len(backend._wire._listening) == 2)
        backend.close()
        for thread in threads:
            thread.join(LIMIT)
        assert [type(error) for error in failed] == [BackendUnavailable] * 2
        assert waiting(other, "dprims/w") == 0
        backend.close()
        with pytest.raises(BackendUnavailable, match="closed"):
            backend.get("x")
        assert other.evict("closing", holder.token or 0)


def test_leaving_ends_a_wait_at_once_and_nothing_comes_back(
    backend: RedisBackend, admin: redis.Redis
) -> None:
    holder = backend.enqueue("leave", 3600, b"")
    for _ in range(20):
        waiter = backend.enqueue("leave", 3600, b"")
        answers: list[bool] = []
        thread = threading.Thread(target=lambda w=waiter, a=answers: a.append(backend.await_turn(w, 3600)))
        thread.start()
        backend.leave(waiter)
        thread.join(LIMIT)
        assert answers == [False]
        assert waiting(backend, "leave") == 0
    assert backend.release(holder)
    assert backend.queue("leave") == []


def _note(failed: list[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except BackendUnavailable as error:
        failed.append(error)


# -- replicas -------------------------------------------------------------------------------------


def test_a_grant_waits_for_replicas_when_asked_to(admin: redis.Redis, redis_server: RedisServer) -> None:
    with RedisServer(options=["--replicaof", "127.0.0.1", str(redis_server.port)]) as replica:
        url = f"{redis_server.url}?wait_replicas=1&timeout=1"
        with dprims.connect(url) as backend, dprims.connect(redis_server.url) as plain:
            until(lambda: admin.set("new", 1) and admin.execute_command("WAIT", 1, 100) == 1)
            dprims.DistributedLock("replicated", backend).acquire().release()
            with pytest.raises(BackendUnavailable, match="read only"):
                dprims.DistributedLock("x", dprims.connect(f"{replica.url}?timeout=0.3")).acquire()
            os.kill(replica.pid, signal.SIGSTOP)
            with pytest.raises(BackendUnavailable, match="0 replicas; expected 1"):
                dprims.DistributedLock("replicated", backend).acquire()
            os.kill(replica.pid, signal.SIGCONT)
            assert plain.queue("dprims/replicated") == []
