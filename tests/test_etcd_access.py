"""Ways to reach etcd: clients that are passed in, users, TLS, clusters, forked children."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dprims
from dprims.backends.etcd import EtcdBackend
from dprims.exceptions import BackendMisconfigured, BackendUnavailable
from dprims.testing.servers import EtcdServer

from .helpers.services import until

LIMIT = 30.0


@pytest.fixture
def backend(etcd_server: EtcdServer) -> Iterator[EtcdBackend]:
    with dprims.connect(etcd_server.url) as backend:
        yield backend


# -- clients, logins, TLS --------------------------------------------------------------------------


def test_a_client_that_was_passed_in_is_used_and_left_open(
    etcd_server: EtcdServer, backend: EtcdBackend
) -> None:
    import etcd3

    with etcd3.client(port=etcd_server.port) as client:
        lock = dprims.DistributedLock("passed in", client)
        assert isinstance(lock.backend, EtcdBackend)
        assert dprims.DistributedLock("another", client).backend is lock.backend
        with lock as grant:
            assert [place.token for place in backend.queue("dprims/passed in")] == [grant.token]
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(lock.acquire, LIMIT)
                until(lambda: len(lock.waiters()) == 1)
                lock.release()
                waiting.result(LIMIT).release()
        lock.backend.close()
        client.put("still", "open")
        assert client.get("still")[0] == b"open"
        client.delete("still")


def etcdctl(server: EtcdServer, *arguments: str) -> None:
    program = Path(server.program).with_name("etcdctl")
    command = [str(program), f"--endpoints=127.0.0.1:{server.port}", *arguments]
    environment = {**os.environ, "ETCDCTL_API": "3"}
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT, env=environment)


def with_users(server: EtcdServer) -> None:
    """Users root and worker; worker may use the keys under ``dprims/`` only."""
    etcdctl(server, "user", "add", "root:pw")
    etcdctl(server, "user", "grant-role", "root", "root")
    etcdctl(server, "user", "add", "worker:p@:/w")
    etcdctl(server, "role", "add", "locks")
    etcdctl(server, "role", "grant-permission", "locks", "--prefix=true", "readwrite", "dprims/")
    etcdctl(server, "user", "grant-role", "worker", "locks")
    etcdctl(server, "auth", "enable")


def test_users_and_tokens_that_run_out() -> None:
    with EtcdServer(options=("--bcrypt-cost", "4")) as server:
        use_with_users(server)


def use_with_users(private_etcd: EtcdServer) -> None:
    place = f"127.0.0.1:{private_etcd.port}"
    url = f"etcd://worker:p%40%3A%2Fw@{place}"
    with dprims.connect(url) as backend:  # a login where none is needed
        backend.write_once("cell", b"1")
    with_users(private_etcd)
    for wrong in ("worker:nope@", "nobody:pw@", ""):
        with pytest.raises(BackendMisconfigured, match=re.escape(place)):
            read_a_cell(f"etcd://{wrong}{place}")
    with pytest.raises(BackendMisconfigured, match="permission"):
        read_a_cell(f"{url}/elsewhere")
    with dprims.connect(url) as backend, dprims.connect(url) as other, ThreadPoolExecutor(1) as pool:
        assert "p@" not in repr(backend)
        grant = dprims.DistributedLock("x", backend).acquire()
        waiting = pool.submit(dprims.DistributedLock("x", other).acquire, LIMIT)
        until(lambda: len(backend.queue("dprims/x")) == 2)
        private_etcd.restart()  # it has forgotten every token
        grant.verify()
        other._life().link._metadata = (("token", "run out"),)
        other._life().hub._restart()
        grant.release()
        waiting.result(LIMIT).release()
    import etcd3

    with etcd3.client(port=private_etcd.port, user="worker", password="p@:/w") as client:
        lock = dprims.DistributedLock("x", client)
        with lock:
            pass
        lock.backend.close()


def read_a_cell(url: str) -> bytes | None:
    with dprims.connect(url) as backend:
        return backend.get("cell")


def certificates(folder: Path) -> None:
    """An authority, and certificates of a server and of a client that it has signed."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder, timeout=LIMIT)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    for name, extra in (("server", "subjectAltName=IP:127.0.0.1"), ("client", "keyUsage=digitalSignature")):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "extra").write_text(f"{extra}\nextendedKeyUsage=serverAuth,clientAuth\n")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extra")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)


class TlsEtcdServer(EtcdServer):
    """Its clients use TLS on a second port, as the first is what the server is asked on."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__()
        self.folder = folder
        self.tls_port = port

    def _arguments(self) -> list[str]:
        arguments = super()._arguments()
        at = arguments.index("--listen-client-urls") + 1
        arguments[at] += f",https://127.0.0.1:{self.tls_port}"
        return [
            *arguments,
            *("--cert-file", str(self.folder / "server.pem"), "--key-file", str(self.folder / "server.key")),
            *("--trusted-ca-file", str(self.folder / "ca.pem"), "--client-cert-auth"),
        ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    certificates(tmp_path)
    with TlsEtcdServer(tmp_path, free_port()) as server:
        place = f"etcds://127.0.0.1:{server.tls_port}?timeout=2"
        ca, mine = f"&ca={tmp_path}/ca.pem", f"&cert={tmp_path}/client.pem&key={tmp_path}/client.key"
        with dprims.connect(place + ca + mine) as backend, dprims.DistributedLock("x", backend) as grant:
            grant.verify()
        for incomplete in (ca, mine, ""):
            with pytest.raises(BackendUnavailable, match=str(server.tls_port)):
                dprims.connect(place.replace("timeout=2", "timeout=0.5") + incomplete)


# -- a cluster -------------------------------------------------------------------------------------


def cluster(size: int) -> list[EtcdServer]:
    """Members that know of each other, started."""
    servers = [EtcdServer() for _ in range(size)]
    peers = {server: f"http://127.0.0.1:{free_port()}" for server in servers}
    everyone = ",".join(f"{server._member}={peer}" for server, peer in peers.items())
    for server, peer in peers.items():
        server.options = (
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", everyone),
        )
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(EtcdServer.start, servers))  # none answers before most of them run
    return servers


def answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except BackendUnavailable:
        return False
    return True


@pytest.mark.slow
def test_a_cluster_that_loses_member_after_member_and_gets_them_back() -> None:
    servers = cluster(3)
    try:
        url = "etcd://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
        with dprims.connect(url) as backend, dprims.connect(url) as other, ThreadPoolExecutor(1) as pool:
            assert backend.url == url
            lock = dprims.DistributedLock("x", backend, ttl=10)
            tokens = []
            for server, fault in ((servers[0], "freeze"), (servers[1], "kill"), (servers[2], "kill")):
                grant = lock.acquire(LIMIT)
                tokens.append(grant.token)
                waiting = pool.submit(dprims.DistributedLock("x", other, ttl=10).acquire, LIMIT)
                until(lambda: len(backend.queue("dprims/x")) == 2)
                getattr(server, fault)()
                until(lambda held=grant: answers(held.verify))  # not while a leader is elected
                grant.release()
                next_grant = waiting.result(LIMIT)
                tokens.append(next_grant.token)
                next_grant.release()
                server.thaw() if fault == "freeze" else server.start()
            assert tokens == sorted(set(tokens))

            for server in servers[1:]:  # too few are left to agree on anything
                server.kill()
            started = time.monotonic()
            with pytest.raises(BackendUnavailable, match=str(servers[0].port)):
                backend.get("cell")
            assert time.monotonic() - started < 2 * LIMIT
            with ThreadPoolExecutor(2) as starting:
                list(starting.map(EtcdServer.start, servers[1:]))
            assert backend.write_once("cell", b"back") == b"back"
    finally:
        for server in servers:
            server.close()


# -- forks and the end of a process ----------------------------------------------------------------


def in_child(work: Callable[[], object]) -> None:
    """Run *work* in a forked child, and fail unless it returned in time."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - a child must not go on into pytest
            traceback.print_exc()
        os._exit(status)
    deadline = time.monotonic() + LIMIT
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hung")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns of threads
def test_a_forked_child_has_connections_of_its_own(etcd_server: EtcdServer, backend: EtcdBackend) -> None:
    lock = dprims.DistributedLock("forked", backend)
    with lock as grant:

        def child() -> None:
            assert backend.get("no such cell") is None
            assert grant.lost
            assert lock.acquire(timeout=0) is None
            with pytest.raises(dprims.exceptions.NotHeld):
                grant.release()
            with dprims.DistributedLock("of the child", backend, ttl=5) as own:
                own.verify()
            backend.close()

        for _ in range(3):
            in_child(child)
        grant.verify()
    with lock:
        pass


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_client_that_was_passed_in_is_refused_in_a_forked_child(etcd_server: EtcdServer) -> None:
    import etcd3

    def child() -> None:
        with pytest.raises(BackendMisconfigured, match="pass a URL"):
            backend.get("cell")
        with pytest.raises(BackendMisconfigured, match="pass a URL"):
            backend.reconnect_after_fork()

    with etcd3.client(port=etcd_server.port) as client:
        backend = EtcdBackend(client=client)
        in_child(child)
        backend.close()
