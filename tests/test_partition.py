"""A partition between the holder of a lock and its server: two network namespaces, and a link that is cut.

make test-netns        # as root, with iproute2
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dprims.testing.servers import EtcdServer, RedisServer

pytestmark = pytest.mark.netns

LIMIT_S = 40.0
TTL_S = 2.0
NEAR, FAR = "10.213.77.1", "10.213.77.2"
PORT = 6399

CLIENT = """
import sys, threading, dprims
url, ttl = sys.argv[1], float(sys.argv[2])
lost = threading.Event()
lock = dprims.DistributedLock("cut", url, ttl=ttl, on_lost=lambda grant: lost.set())
print("ready", flush=True)
sys.stdin.readline()
grant = lock.acquire(timeout=60)
print("held", grant.token, flush=True)
lost.wait(60)
print("lost", grant.lost, flush=True)
sys.stdin.readline()
try:
    grant.release()
    print("released", flush=True)
except dprims.DprimsError as error:
    print(type(error).__name__, flush=True)
"""

PROBE = """
import socket, sys, time
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()
        break
    except OSError:
        time.sleep(0.02)
print("answers", flush=True)
"""

STORE = """
import sys
from dprims.torchstore import serve_store
store = serve_store(sys.argv[1], int(sys.argv[2]))
sys.stdin.readline()
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=LIMIT_S, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces and a cable between them; nothing else is reachable from either."""
    assert shutil.which("ip"), "install iproute2"
    assert os.geteuid() == 0, "network namespaces are made by root"
    near, far = (f"dprims-{os.getpid()}-{end}" for end in ("near", "far"))
    with ExitStack() as stack:
        for name in (near, far):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("-n", near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", far)
        for name, address in ((near, NEAR), (far, FAR)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield near, far


@contextmanager
def running(namespace: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def server(kind: str, folder: Path) -> tuple[str, list[str]]:
    """The URL of a server in the near namespace, and the command that runs it."""
    where = f"http://{NEAR}:{PORT}"
    if kind == "redis":
        command = [RedisServer().program, "--bind", NEAR, "--port", str(PORT), "--protected-mode", "no"]
        return f"redis://{NEAR}:{PORT}/0", [*command, "--save", "", "--dir", str(folder)]
    if kind == "etcd":
        peers = f"http://127.0.0.1:{PORT + 1}"
        command = [EtcdServer().program, "--data-dir", str(folder), "--log-level", "error"]
        command += ["--listen-client-urls", where, "--advertise-client-urls", where]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        return f"etcd://{NEAR}:{PORT}", [*command, "--initial-cluster", f"default={peers}"]
    return f"tcpstore://{NEAR}:{PORT}", [sys.executable, "-c", STORE, NEAR, str(PORT)]


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("kind", ["redis", "etcd", "tcpstore"])
def test_the_side_that_is_cut_off_learns_so_and_the_other_goes_on(
    namespaces: tuple[str, str], kind: str, tmp_path: Path
) -> None:
    near, far = namespaces
    url, command = server(kind, tmp_path)
    client = [sys.executable, "-c", CLIENT, url, str(TTL_S)]
    with running(near, *command), ExitStack() as stack:
        probe = stack.enter_context(running(far, sys.executable, "-c", PROBE, NEAR, str(PORT)))
        assert hear(probe) == "answers"
        holder = stack.enter_context(running(far, *client))
        waiter = stack.enter_context(running(near, *client))
        assert [hear(holder), hear(waiter)] == ["ready", "ready"]
        say(holder)
        word, token = hear(holder).split()
        assert word == "held"
        say(waiter)
        cut = time.monotonic()
        ip("-n", far, "link", "set", "cable", "down")
        assert hear(holder) == "lost True"
        word, next_token = hear(waiter).split()
        assert word == "held"
        assert int(next_token) > int(token)
        assert time.monotonic() - cut < LIMIT_S
        ip("-n", far, "link", "set", "cable", "up")
        say(holder)
        assert hear(holder) in ("LockLost", "BackendUnavailable")
