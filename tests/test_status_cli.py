"""``dprims status`` as a program, and the page's server."""

from __future__ import annotations

import http.client
import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dprims
from dprims.cli import _status_web
from dprims.cli._status_web import THREADS, WAITING, StatusServer
from dprims.membership import Epoch
from dprims.status import Observer
from dprims.synchronizer._record import FleetRecord, encode_record, record_key
from dprims.testing.servers import RedisServer

from .helpers.services import LIMIT_S, until

ROOT = Path(__file__).resolve().parent.parent
STATUS = [sys.executable, "-m", "dprims", "status"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "160",
    "LINES": "60",
    "TERM": "xterm-256color",
}
SHARDS = 1024


@pytest.fixture
def namespace() -> str:
    return f"status-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def backend(redis_server: RedisServer) -> Iterator[dprims.Backend]:
    with dprims.connect(redis_server.url) as backend:
        yield backend


@pytest.fixture
def server(backend: dprims.Backend, namespace: str) -> Iterator[StatusServer]:
    server = StatusServer(Observer(backend, namespace), "127.0.0.1", 0, 0.2)
    server.start()
    yield server
    server.close()


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STATUS, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S
    )


def get(
    server: StatusServer, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LIMIT_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def big_fleet(backend: dprims.Backend, namespace: str) -> FleetRecord:
    """Publish the record of a fleet of 1,024 shards that has nobody in its roster."""
    absent = dict.fromkeys(range(0, SHARDS, 100), "not in the roster")
    record = FleetRecord(
        event="synced",
        at=time.time(),
        epoch=Epoch(5, 2),
        version=9,
        digest="d",
        stale=False,
        train_world_size=4,
        shard_sizes=(1,) * SHARDS,
        members=tuple(shard for shard in range(SHARDS) if shard not in absent),
        absent=absent,
        syncs=9,
        failures=0,
        rebuilds=1,
    )
    backend.write_fenced(record_key(f"{namespace}/refit"), encode_record(record), 5)
    return record


# -- the command ----------------------------------------------------------------------------------


def test_once_and_json(backend: dprims.Backend, redis_server: RedisServer, namespace: str) -> None:
    lock = dprims.DistributedLock("build", backend, namespace=namespace, label="x\n[red]\x1b[31my")
    roster = dprims.Roster("fleet", backend, namespace=namespace, ttl=20.0)
    with lock as grant:
        roster.join("7")
        text = call(redis_server.url, "--namespace", namespace)
        data = json.loads(call(redis_server.url, "--namespace", namespace, "--json").stdout)
    roster.leave()
    assert (text.returncode, text.stderr) == (0, "")
    assert "\x1b" not in text.stdout, "colours where no terminal is"
    assert re.search(rf"build +x\\n\[red\]\\x1b\[31my pid {os.getpid()} on .* +{grant.token} ", text.stdout)
    assert "roster fleet: 1 member\n" in text.stdout
    assert "no refits" in text.stdout
    assert data["locks"][0]["holder"]["token"] == str(grant.token)
    assert [one["name"] for one in data["rosters"][0]["members"]] == ["7"]


@pytest.mark.parametrize("how", ["--once", "--json"])
def test_a_fleet_that_is_not_there_is_said(
    backend: dprims.Backend, redis_server: RedisServer, namespace: str, how: str
) -> None:
    big_fleet(backend, namespace)
    run = call(redis_server.url, "--namespace", namespace, how, "--fleet", "refit", "--fleet", "typo")
    assert (run.returncode, run.stderr) == (1, f"dprims status: no fleet 'typo' in namespace {namespace}\n")
    assert "refit" in run.stdout
    roster = dprims.Roster("typo", backend, namespace=namespace, ttl=20.0)
    roster.join("0.0")  # a rank that waits for its leader
    run = call(redis_server.url, "--namespace", namespace, how, "--fleet", "typo")
    assert (run.returncode, run.stderr) == (0, "")
    roster.leave()


def test_a_fleet_of_1024_shards_fits_a_screen(
    backend: dprims.Backend, redis_server: RedisServer, namespace: str
) -> None:
    big_fleet(backend, namespace)
    run = call(redis_server.url, "--namespace", namespace, "--once")
    assert run.returncode == 0
    lines = run.stdout.splitlines()
    assert len(lines) < 45
    assert max(map(len, lines)) <= 200
    assert sum(line.count("x") for line in lines if re.match(r" +\d+ [x·]+$", line)) == SHARDS - 11
    assert "absent    0,100,200,300,400,500,600,700,800,900,1000: not in the roster" in run.stdout


@pytest.mark.parametrize(
    "settings",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "utf-8"},
    ],
    ids=range(3),
)
def test_what_the_output_cannot_encode_is_shown_otherwise(
    backend: dprims.Backend, redis_server: RedisServer, namespace: str, settings: dict[str, str]
) -> None:
    big_fleet(backend, namespace)
    with dprims.DistributedLock("a", backend, namespace=namespace, label="caf\xe9"):
        run = subprocess.run(
            [*STATUS, redis_server.url, "--namespace", namespace],
            env={**ENVIRONMENT, **settings},
            capture_output=True,
            timeout=LIMIT_S,
        )
    assert (run.returncode, run.stderr) == (0, b"")
    shown = run.stdout.decode()
    if settings.get("PYTHONIOENCODING") == "utf-8":
        assert "caf\xe9 pid" in shown
        assert "· 11 absent" in shown
    else:
        assert "caf? pid" in shown
        assert "# 0 serving" in shown
        assert ". 11 absent" in shown


def test_a_closed_stdout_is_no_error(redis_server: RedisServer) -> None:
    line = f"{shlex.join([*STATUS, redis_server.url])} >&-"
    run = subprocess.run(["/bin/sh", "-c", line], env=ENVIRONMENT, capture_output=True, timeout=LIMIT_S)
    assert (run.returncode, run.stderr) == (0, b"")


def test_on_a_terminal_it_goes_on_until_it_is_interrupted(
    backend: dprims.Backend, redis_server: RedisServer, namespace: str
) -> None:
    ours, theirs = pty.openpty()
    command = [*STATUS, redis_server.url, "--namespace", namespace, "--interval", "0.1"]
    run = subprocess.Popen(command, env=ENVIRONMENT, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    said = b""

    def says(text: bytes) -> bool:
        nonlocal said
        if select.select([ours], [], [], 0.05)[0]:
            said += os.read(ours, 65536)
        return text in said

    try:
        until(lambda: says(b"no lock is held"), "the first look")
        with dprims.DistributedLock("appears", backend, namespace=namespace):
            until(lambda: says(b"appears"), "the next look")
        run.send_signal(signal.SIGINT)
        until(lambda: says(b"\x1b[?1049l") or run.poll() is not None, "the screen as it was")
        _, err = run.communicate(timeout=LIMIT_S)
    finally:
        if run.poll() is None:
            run.kill()
            run.wait(LIMIT_S)
        os.close(ours)
    assert run.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory://x"], "'memory://x' is seen by one process alone"),
        (["memory://u:secret@x"], "'memory://...' is seen by one process alone"),
        (["nowhere://x"], "scheme is 'nowhere'"),
        (["redis"], "expected scheme://"),
        (["URL", "--namespace", ""], "namespace is ''"),
        (["URL", "--interval", "0"], "--interval"),
        (["URL", "--web", "1", "--json"], "cannot be used with --json or --once"),
        (["URL", "--web", "70000"], "--web"),
        (["URL", "--web", "0", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1 port 0"),
        ([], "Missing argument"),
    ],
)
def test_wrong_use_is_one_line_and_2(redis_server: RedisServer, arguments: list[str], says: str) -> None:
    run = call(*(redis_server.url if argument == "URL" else argument for argument in arguments))
    assert (run.returncode, run.stdout) == (2, "")
    assert says in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("more", [[], ["--json"], ["--web", "0"]])
def test_a_backend_that_is_not_there_is_one_line_and_1(more: list[str]) -> None:
    run = call("redis://127.0.0.1:1", *more)
    assert (run.returncode, run.stdout) == (1, "")
    assert re.fullmatch(r"dprims: redis://127\.0\.0\.1:1.*refused.*\n", run.stderr)


def test_a_port_that_is_taken_is_said(redis_server: RedisServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = call(redis_server.url, "--web", str(taken.getsockname()[1]))
    assert run.returncode == 2
    assert "Address already in use" in run.stderr


# -- the page -------------------------------------------------------------------------------------


def test_the_command_serves_the_page_until_it_is_ended(redis_server: RedisServer, namespace: str) -> None:
    command = [*STATUS, redis_server.url, "--namespace", namespace, "--web", "0"]
    run = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        url = run.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        connection = http.client.HTTPConnection(url[len("http://") : -1], timeout=LIMIT_S)
        connection.request("GET", "/status.json")
        assert json.loads(connection.getresponse().read())["namespace"] == namespace
        connection.close()
        run.send_signal(signal.SIGINT)
        assert run.wait(LIMIT_S) == 130
        assert run.stderr.read() == ""
    finally:
        if run.poll() is None:
            run.kill()
        run.communicate()


def test_the_page_needs_nothing_from_elsewhere(server: StatusServer) -> None:
    answer, body = get(server, "/")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    page = body.decode()
    assert re.findall(r"https?://", page) == []
    assert re.findall(r"(?:src|href)=\"(?!data:,|status\.json)", page) == []
    assert "innerHTML" not in page, "what others wrote must not be read as HTML"


def test_the_server_reads_and_no_more(server: StatusServer) -> None:
    assert get(server, "/nothing")[0].status == 404
    head, body = get(server, "/status.json", "HEAD")
    assert (head.status, body) == (200, b"")
    for method in ("POST", "PUT", "DELETE"):
        assert get(server, "/status.json", method)[0].status == 501
    assert get(server, "/status.json?x=1")[0].status == 200


def test_a_name_that_was_made_to_mean_loopback_is_refused(server: StatusServer) -> None:
    port = server.server_port
    for host in (
        "localhost",
        "127.0.0.1",
        "[::1]",
        f"localhost:{port}",
        f"127.0.0.1:{port}",
        f"[::1]:{port}",
    ):
        assert get(server, "/status.json", Host=host)[0].status == 200, host
    for host in ("evil.example", f"evil.example:{port}", "", "127.0.0.1.evil.example"):
        assert get(server, "/status.json", Host=host)[0].status == 403, host


def test_many_pages_cost_one_look_an_interval(backend: dprims.Backend, namespace: str) -> None:
    looks = 0

    class Counting(Observer):
        def look(self):  # type: ignore[no-untyped-def]
            nonlocal looks
            looks += 1
            return super().look()

    server = StatusServer(Counting(backend, namespace), "127.0.0.1", 0, 60.0)
    server.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: get(server, "/status.json"), range(40)))
        assert {answer.status for answer, _ in answers} == {200}
        assert len({body for _, body in answers}) == looks == 1
    finally:
        server.close()


def test_threads_are_bounded_and_idle_clients_turned_away(server: StatusServer) -> None:
    """More silent clients than it has threads and places: it turns some away, and serves again later."""
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(THREADS + WAITING + 8)]

    def turned_away() -> bool:
        ready = select.select(idle, [], [], 0.05)[0]
        return any(one.recv(1, socket.MSG_PEEK) == b"" for one in ready)

    until(turned_away, "a client that is turned away")
    assert threading.active_count() == before
    for one in idle:
        one.close()
    until(lambda: get_or_none(server) == 200, "service as before")


def test_clients_that_drip_hold_no_thread_for_longer_than_a_request_may_take(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_status_web, "CLIENT_S", 0.5)
    clients = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(THREADS)]
    done = threading.Event()

    def drip() -> None:
        open_ = list(clients)
        while open_ and not done.wait(0.05):
            for client in list(open_):
                try:
                    client.sendall(b"G")
                except OSError:
                    open_.remove(client)

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        until(lambda: len(server._deadlines) == THREADS)
        assert get(server, "/status.json")[0].status == 200
    finally:
        done.set()
        dripping.join()
        for client in clients:
            client.close()


def test_close_ends_the_threads_though_clients_hold_them(backend: dprims.Backend, namespace: str) -> None:
    server = StatusServer(Observer(backend, namespace), "127.0.0.1", 0, 0.2)
    server.start()
    address, clients = ("127.0.0.1", server.server_port), []
    try:
        # one after the other: who comes while more than WAITING wait is refused
        clients += [socket.create_connection(address) for _ in range(THREADS)]
        until(lambda: len(server._deadlines) == THREADS)
        clients += [socket.create_connection(address) for _ in range(WAITING)]
        until(server._connections.full)
        server.close()
        assert not [thread for thread in server._threads if thread.is_alive()]
        assert [client.recv(1) for client in clients] == [b""] * len(clients)
    finally:
        for client in clients:
            client.close()


def get_or_none(server: StatusServer) -> int | None:
    try:
        return get(server, "/status.json")[0].status
    except OSError:
        return None


def test_a_backend_that_went_away_is_said_and_comes_back(private_redis: RedisServer, namespace: str) -> None:
    with dprims.connect(f"{private_redis.url}?timeout=0.3") as backend:
        server = StatusServer(Observer(backend, namespace), "127.0.0.1", 0, 0.1)
        server.start()
        try:
            assert get(server, "/status.json")[0].status == 200
            private_redis.kill()
            until(lambda: get(server, "/status.json")[0].status == 503, "a 503")
            said = json.loads(get(server, "/status.json")[1])
            assert said["error"] == "BackendUnavailable"
            assert "127.0.0.1" in said["message"]
            private_redis.start()
            until(lambda: get(server, "/status.json")[0].status == 200, "an answer again")
        finally:
            server.close()


def test_1024_shards_are_one_answer_of_bounded_size(
    server: StatusServer, backend: dprims.Backend, namespace: str
) -> None:
    big_fleet(backend, namespace)
    until(lambda: json.loads(get(server, "/status.json")[1])["fleets"], "the fleet")
    _, body = get(server, "/status.json")
    assert len(body) < 200_000
    assert len(json.loads(body)["fleets"][0]["shards"]) == SHARDS
