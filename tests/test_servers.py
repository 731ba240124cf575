"""The servers that other tests rely on, and the check that nothing is left running."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dprims import BackendUnavailable, MissingExtra
from dprims.testing import servers
from dprims.testing.servers import HOST, EtcdServer, RedisServer, Server

from .helpers.services import in_thread, process_state

KINDS = pytest.mark.parametrize("kind", [RedisServer, EtcdServer])
ONCE = Retry(NoBackoff(), 0)
LEFTOVERS = Path(__file__).parent / "helpers" / "leftovers.py"


def wait_until(condition: Callable[[], bool], limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {limit:g} s"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process has this id and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def etcdctl(server: EtcdServer, *arguments: str) -> str:
    program = Path(server.program).with_name("etcdctl")
    command = [str(program), "--endpoints", f"{HOST}:{server.port}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout


@KINDS
def test_server_is_one_process_that_ends_with_its_block(kind: type[Server]) -> None:
    with kind() as server:
        assert Path(f"/proc/{server.pid}/exe").resolve() == Path(server.program).resolve()
        assert all(runs(pid) for pid in server.pids)
        pids, directory, port = server.pids, server.directory, server.port
    assert not any(runs(pid) for pid in pids)
    assert not directory.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), 1)
    with pytest.raises(BackendUnavailable, match="has no process"):
        _ = server.pid


def test_redis_keeps_what_it_answered_through_a_kill(private_redis: RedisServer) -> None:
    client = redis.Redis.from_url(private_redis.url)
    client.set("kept", "1")
    url = private_redis.url
    private_redis.kill()
    with pytest.raises(redis.ConnectionError):
        client.get("kept")
    private_redis.start()
    assert private_redis.url == url
    assert client.get("kept") == b"1"
    private_redis.restart(wipe=True)
    assert client.get("kept") is None
    client.close()


def test_redis_has_read_all_that_it_kept_when_it_is_started_again(private_redis: RedisServer) -> None:
    with redis.Redis.from_url(private_redis.url, retry=ONCE) as client:
        client.eval("for i = 1, 200000 do redis.call('set', i, i) end", 0)
        for _ in range(3):
            private_redis.kill()
            private_redis.start()
            client.connection_pool.disconnect()
            assert client.get("200000") == b"200000"


def test_redis_without_persist_starts_empty_and_asks_for_its_password() -> None:
    with RedisServer(password="secret", options=("--databases", "3")) as server:
        for url in (server.url, server.unix_url):
            client = redis.Redis.from_url(url)
            client.set("gone", "1")
            assert client.config_get("databases") == {"databases": "3"}
            client.close()
        server.restart()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("gone") is None
        with redis.Redis(HOST, server.port, retry=ONCE) as client, pytest.raises(redis.AuthenticationError):
            client.get("gone")


def test_etcd_keeps_its_data_until_it_is_wiped(private_etcd: EtcdServer) -> None:
    etcdctl(private_etcd, "put", "kept", "1")
    private_etcd.kill()
    private_etcd.start()
    assert etcdctl(private_etcd, "get", "kept") == "kept\n1\n"
    private_etcd.restart(wipe=True)
    assert etcdctl(private_etcd, "get", "kept") == ""


def test_frozen_server_holds_its_connections_and_answers_nothing(private_redis: RedisServer) -> None:
    with socket.create_connection((HOST, private_redis.port), 5) as connection:
        private_redis.freeze()
        connection.sendall(b"PING\r\n")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(16)
        private_redis.thaw()
        connection.settimeout(10)
        assert connection.recv(16) == b"+PONG\r\n"


@KINDS
def test_frozen_server_can_be_stopped(kind: type[Server]) -> None:
    with kind() as server:
        server.freeze()
        pid = server.pid
        server.stop()
        assert not runs(pid)


def test_a_server_may_be_frozen_again_and_by_several_threads(private_redis: RedisServer) -> None:
    for _ in range(3):
        freezing = [in_thread(private_redis.freeze) for _ in range(4)]
        for frozen in freezing:
            frozen()
        private_redis.freeze()
        assert process_state(private_redis.pid) == "T"
        private_redis.thaw()
        wait_until(private_redis._answers)


@KINDS
def test_a_server_that_ended_by_itself_says_so_and_can_be_started_again(kind: type[Server]) -> None:
    with kind() as server:
        for used in (server.freeze, server.thaw, lambda: server.pid):
            pids, url = server.pids, server.url
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not server.running)
            assert not any(runs(pid) for pid in pids)
            assert server.pids == frozenset()
            for _ in range(2):
                with pytest.raises(BackendUnavailable, match=r"pid \d+> ended by itself, -9: "):
                    used()
            server.start()
            assert server._answers()
            assert server.url == url
            assert len(server.pids - pids) == 2
        server.kill()
        with pytest.raises(BackendUnavailable, match="has no process"):
            server.thaw()


def test_a_frozen_server_that_is_killed_is_seen_by_whoever_freezes_it_next(
    private_redis: RedisServer,
) -> None:
    private_redis.freeze()
    pid = private_redis.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: process_state(pid) == "Z")
    with pytest.raises(BackendUnavailable, match="ended by itself, -9"):
        private_redis.freeze()
    private_redis.start()
    assert private_redis._answers()


@KINDS
def test_taken_port_is_left_alone_and_another_one_used(
    kind: type[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = servers._free_port
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        offered = iter([taken])
        monkeypatch.setattr(servers, "_free_port", lambda: next(offered, None) or free())
        with kind() as server:
            assert server.port != taken
            assert next(offered, None) is None


def test_start_that_fails_says_what_the_server_said() -> None:
    server = RedisServer(options=("--no-such-option", "1"))
    with pytest.raises(BackendUnavailable, match=r"(?s)exit status 1.*no-such-option"):
        server.start()
    assert server.pids == frozenset()
    server.close()


def test_server_dies_with_the_process_that_started_it() -> None:
    code = """
from dprims.testing.servers import RedisServer
server = RedisServer()
server.start()
print(server.pid, server.directory, flush=True)
os._exit(1)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid, directory = ran.stdout.split()
    wait_until(lambda: not runs(int(pid)))
    shutil.rmtree(directory)


@KINDS
def test_missing_program_says_what_to_install(kind: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert kind()._find_program().endswith(kind.program_in_wheel.rpartition("/")[2])
    monkeypatch.setattr(kind, "program_in_wheel", "no_such_wheel/program")
    with pytest.raises(MissingExtra, match=f"pip install {kind.distribution}"):
        kind()


def test_launcher_script_on_the_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (("etcd", "#!/bin/sh\n"), ("redis-server", "\x7fELF")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert EtcdServer._find_program() != str(tmp_path / "etcd")
    assert RedisServer._find_program() == str(tmp_path / "redis-server")


LEAVES = {
    "plain": "subprocess.Popen(['sleep', '300']).returncode = 0",
    "session": "subprocess.Popen(['sleep', '300'], start_new_session=True).returncode = 0",
    "orphan": "subprocess.run(['/bin/sh', '-c', 'sleep 300 & exit 0'], check=True)",
    "forkserver": "multiprocessing.get_context('forkserver').Process(target=time.sleep, args=(300,)).start()",
}
LEAVES_NOTHING = {
    "ended": "multiprocessing.get_context('forkserver').Process(target=time.sleep, args=(0,)).start()",
    "ending": "subprocess.Popen(['sleep', '0.1']).returncode = 0",
    "shared": "request.getfixturevalue('redis_server')",
}


SHARED_SERVER = """
from dprims.testing.servers import RedisServer

@pytest.fixture(scope="session")
def redis_server(outliving):
    with RedisServer() as server:
        outliving.append(server)
        yield server
"""


def test_a_test_that_leaves_a_process_fails(tmp_path: Path) -> None:
    plugin = LEFTOVERS.read_text()
    assert "LEFT_S = 5.0" in plugin
    (tmp_path / "conftest.py").write_text(plugin.replace("LEFT_S = 5.0", "LEFT_S = 0.5") + SHARED_SERVER)
    bodies = LEAVES_NOTHING | LEAVES
    tests = "".join(f"def test_{name}(request):\n    {body}\n" for name, body in bodies.items())
    (tmp_path / "test_it.py").write_text("import multiprocessing, subprocess, time\n" + tests)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:valkey",
        "--rootdir",
        ".",
        ".",
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    told = [line for line in ran.stdout.splitlines() if line.startswith("ERROR ")]
    assert len(told) == len(LEAVES)
    for name, line in zip(LEAVES, told, strict=True):
        assert f"::test_{name} - Failed: left running, and killed now" in line
    assert f"{len(bodies)} passed, {len(LEAVES)} errors" in ran.stdout
