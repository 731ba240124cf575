"""The doctor on set-ups that are really broken: servers, processes, names, packages."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dprims
from dprims.cli import main
from dprims.doctor import BadUrl, examine, gather, probe
from dprims.doctor._check_backend import check_backend
from dprims.doctor._check_network import check_network
from dprims.doctor.checks import check_etcd, check_gpus, check_torch
from dprims.doctor.findings import RULES, Finding
from dprims.doctor.report import as_text
from dprims.testing.servers import EtcdServer, RedisServer

ROOT = Path(dprims.__file__).parents[1]
LIMIT_S = 100.0
PASSWORD = "correct-horse-battery"


def of_backend(url: str) -> dict[str, Finding]:
    return {one.code: one for one in check_backend(gather.backend_facts(url))}


def wrong(found: dict[str, Finding]) -> set[str]:
    return {code for code, one in found.items() if one.level in ("warning", "error")}


# -- backends ----------------------------------------------------------------------------------------------


def test_a_redis_that_is_fine(redis_server: RedisServer) -> None:
    found = of_backend(redis_server.url)
    assert wrong(found) == set()
    fine = {"backend-ok", "latency-ok", "backend-lock", "backend-guarantees", "backend-limits", "clock-ok"}
    assert found.keys() == fine | {"redis-forgets"}
    assert "version " in found["backend-ok"].what


def test_a_redis_that_remembers(private_redis: RedisServer) -> None:
    assert "redis-forgets" not in of_backend(private_redis.url)


def test_an_etcd_that_is_fine(etcd_server: EtcdServer) -> None:
    found = of_backend(etcd_server.url)
    assert wrong(found) == set()
    assert {"backend-ok", "backend-lock", "clock-none"} <= found.keys()
    assert ", version 3." in found["backend-ok"].what


def test_a_store_that_is_fine() -> None:
    with dprims.connect("tcpstore://127.0.0.1:0?serve=1") as served:
        found = of_backend(served.url)
    assert wrong(found) == set()
    assert {"backend-ok", "backend-lock", "clock-none"} <= found.keys()


def test_a_memory_backend_is_of_one_process() -> None:
    assert wrong(of_backend("memory://doctor")) == {"process-only"}


@pytest.mark.parametrize("scheme", ["redis", "rediss", "etcd", "tcpstore"])
def test_nothing_listens(scheme: str) -> None:
    with socket.socket() as taken:  # bound, and not listening: nobody else can be there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        found = of_backend(f"{scheme}://127.0.0.1:{port}")
    assert found.keys() == {"refused"}
    assert f"127.0.0.1:{port}" in found["refused"].what


def test_one_of_two_members_listens(etcd_server: EtcdServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        found = of_backend(f"etcd://127.0.0.1:{port},127.0.0.1:{etcd_server.port}")
    assert wrong(found) == {"refused"}
    assert "backend-lock" in found


def test_a_name_that_nobody_knows() -> None:
    assert of_backend("redis://no-such-host.invalid:6379").keys() == {"name-unknown"}


def test_no_way_to_a_host() -> None:
    # the network of documentation: nothing answers there
    found = of_backend("etcd://[2001:db8::dead]:2379")
    assert found.keys() == {"unreachable"}


def test_a_socket_file_that_is_not_there(tmp_path: Path, redis_server: RedisServer) -> None:
    assert of_backend(f"unix://{tmp_path}/none").keys() == {"socket-missing"}
    assert wrong(of_backend(redis_server.unix_url)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "etcd"])
def test_a_frozen_server(kind: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(f"private_{kind}")
    server.freeze()
    try:
        assert of_backend(server.url).keys() == {"silent"}
    finally:
        server.thaw()


@contextlib.contextmanager
def listener(says: bytes = b"") -> Iterator[int]:
    """A server that accepts connections and says *says*, whatever it is asked."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    kept[-1].sendall(says)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for connection in kept:
                connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["redis", "tcpstore"])
def test_something_else_listens(scheme: str) -> None:
    with listener() as port:
        assert of_backend(f"{scheme}://127.0.0.1:{port}").keys() == {"silent"}


def test_something_else_answers() -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        found = of_backend(f"redis://127.0.0.1:{port}")
    assert wrong(found) == found.keys()
    assert found.keys() <= {"silent", "rejected", "failed"}
    assert found


@pytest.mark.slow
def test_a_wrong_password_is_said_and_not_shown() -> None:
    with RedisServer(password="the-right-one") as server:
        url = f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0"
        found = of_backend(url)
        assert found.keys() == {"rejected"}
        done = doctor(url)
        assert done.returncode == 1
        assert "[rejected]" in done.stdout
        assert PASSWORD not in done.stdout + done.stderr
        assert "***" in done.stdout
        assert wrong(of_backend(server.url)) == set()


def test_a_user_who_may_only_read(private_redis: RedisServer) -> None:
    import redis

    with redis.Redis.from_url(private_redis.url) as client:
        client.execute_command(
            "ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~*", "&*", "+@read", "+ping"
        )
        client.execute_command("ACL", "SETUSER", "reader", "+hello", "+client", "+select", "+auth")
    found = of_backend(f"redis://reader:{PASSWORD}@127.0.0.1:{private_redis.port}/0")
    assert wrong(found) == {"backend-lock-fails"}
    assert "clock-none" in found, "a server that keeps its clock to itself is no failure"


@pytest.mark.slow
def test_a_replica(redis_server: RedisServer) -> None:
    with RedisServer(options=("--replicaof", f"127.0.0.1 {redis_server.port}")) as replica:
        found = of_backend(replica.url)
    assert wrong(found) == {"redis-replica", "backend-lock-fails"}
    assert str(redis_server.port) in found["redis-replica"].what


def test_a_redis_that_drops_keys() -> None:
    options = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with RedisServer(options=options) as server:
        found = of_backend(server.url)
    assert wrong(found) == {"redis-evicts"}
    assert "allkeys-lru" in found["redis-evicts"].what


@pytest.mark.slow
def test_an_etcd_that_is_full() -> None:
    with EtcdServer(options=("--quota-backend-bytes", "65536")) as server:
        with dprims.connect(server.url) as backend, contextlib.suppress(dprims.BackendError):
            for number in range(64):
                backend.compare_and_set(f"filler/{number}", None, bytes(32 << 10))
        found = of_backend(server.url)
    assert found.keys() == {"etcd-full"}
    assert "NOSPACE" in found["etcd-full"].what


class _Member(EtcdServer):
    """One member of a cluster, whose peers are named by port."""

    def __init__(self, place: int, peers: list[int]) -> None:
        super().__init__()
        self._place = place
        self._peers = [f"http://127.0.0.1:{port}" for port in peers]

    def _arguments(self) -> list[str]:
        given = super()._arguments()
        for option, value in {
            "--name": f"m{self._place}",
            "--listen-peer-urls": self._peers[self._place],
            "--initial-advertise-peer-urls": self._peers[self._place],
            "--initial-cluster": ",".join(f"m{place}={peer}" for place, peer in enumerate(self._peers)),
        }.items():
            given[given.index(option) + 1] = value
        return given

    def _answers(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.mark.slow
def test_an_etcd_without_a_majority() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        peers = [one.getsockname()[1], two.getsockname()[1]]
    with _Member(0, peers) as first:
        with _Member(1, peers) as second:
            with dprims.connect(f"{first.url}?timeout=30") as backend:
                backend.get("up")
            second.kill()
        for _ in range(3):  # at first it still believes in its leader
            found = of_backend(first.url)
            if found.keys() != {"silent"}:
                break
    assert found.keys() == {"etcd-no-leader"}


def test_a_client_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> None:
    (tmp_path / "redis.py").write_text("raise ModuleNotFoundError(\"No module named 'redis'\", name='redis')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    found = of_backend(redis_server.url)
    assert found.keys() == {"extra-needed"}
    assert "dprims[redis]" in found["extra-needed"].what


def test_a_client_that_breaks_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "redis.py").write_text("1 / 0")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with listener() as port:
        found = of_backend(f"redis://127.0.0.1:{port}")
    assert found.keys() == {"failed"}
    assert "ZeroDivisionError" in found["failed"].what


def test_a_look_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LIMIT_S", 0.05)
    found: dict[str, Any] = {}
    never = threading.Event()
    probe.guarded(lambda: never.wait(LIMIT_S) and None, found)
    never.set()
    assert found["error_type"] == "hung"


# -- torch, etcd3, GPUs ------------------------------------------------------------------------------------


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    facts = gather.torch_facts()
    assert facts is not None
    (found,) = check_torch(facts)
    assert found.code == "torch-broken"
    assert "libcudart" in found.what


def test_a_torch_that_crashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    facts = gather.torch_facts()
    assert facts is not None
    (found,) = check_torch(facts)
    assert (found.code, "-6" in found.what) == ("torch-broken", True)


def test_a_torch_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(gather, "TORCH_LIMIT_S", 1.0)
    facts = gather.torch_facts()
    assert facts is not None
    assert [one.code for one in check_torch(facts)] == ["torch-hangs"]


def test_a_protobuf_that_etcd3_does_not_load_under(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "cpp")  # gone since protobuf 4
    facts = gather.etcd_facts()
    assert facts is not None
    (found,) = check_etcd(facts)
    assert found.code == "etcd-broken"
    assert "(cpp)" in found.what


CPU = "2.13.0+cpu"


@pytest.mark.parametrize(
    ("script", "codes"),
    [
        ("echo '580.1, Disabled, Default, NVIDIA H200'", {"gpu-ok", "gpu-cpu-torch"}),
        ("echo '580.1, Enabled, Default, NVIDIA H200'", {"gpu-ok", "gpu-cpu-torch", "gpu-mig"}),
        ("echo '580.1, [N/A], Exclusive_Process, NVIDIA L4'", {"gpu-ok", "gpu-cpu-torch", "gpu-exclusive"}),
        ("echo 'Driver/library version mismatch'; exit 18", {"gpu-smi-fails"}),
        ("sleep 100", {"gpu-smi-fails"}),
        ("true", {"gpu-none"}),
    ],
)
def test_what_nvidia_smi_says(
    script: str, codes: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexec 2>&1\n{'exec ' if script.startswith('sleep') else ''}{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gather, "SMI_LIMIT_S", 0.5 if script.startswith("sleep") else LIMIT_S)
    torch = gather.TorchFacts(CPU, gloo=True, distributed=True)
    found = {one.code: one for one in check_gpus(gather.driver_facts(), torch)}
    assert found.keys() == codes
    if "gpu-ok" in codes:
        assert "NVIDIA" in found["gpu-ok"].what
        assert "driver 580.1" in found["gpu-ok"].what


# -- names and addresses -----------------------------------------------------------------------------------

LOOK = """
import json, os
from dprims.doctor.gather import network_facts
from dprims.doctor._check_network import check_network
print(json.dumps([(one.code, one.what) for one in check_network(network_facts(os.environ))]), flush=True)
os._exit(0)
"""


def elsewhere(
    folder: Path,
    *,
    hosts: str = "127.0.0.1 localhost\n",
    resolv: str = "",
    net: str = "",
    name: str = "node-7",
) -> dict[str, str]:
    """The doctor's word on the network, with a host name, /etc/hosts and /etc/resolv.conf of its own."""
    (folder / "hosts").write_text(hosts)
    (folder / "resolv.conf").write_text(resolv)
    (folder / "nsswitch.conf").write_text("hosts: files dns\n")
    mounts = " && ".join(
        f"mount --bind {folder / file} /etc/{file}"
        for file in ("hosts", "resolv.conf", "nsswitch.conf")
        if Path("/etc", file).exists()
    )
    flags = ["--mount", "--uts", *(["--net"] if net else [])]
    script = f"hostname {name} && {mounts} && {net or 'true'} && exec {sys.executable} -c '{LOOK}'"
    command = [shutil.which("unshare") or "unshare", *flags, "sh", "-c", script]
    clean = {key: value for key, value in os.environ.items() if key != "RES_OPTIONS"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, env=clean)
    except OSError as error:
        pytest.skip(f"needs unshare: {error}")
    if "unshare" in done.stderr or "mount:" in done.stderr or "hostname:" in done.stderr:
        pytest.skip(f"needs root: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def mine() -> str:
    """An address of this machine that is not loopback."""
    address = gather.network_facts({}).chosen
    if address.startswith("127.") or ":" in address:
        pytest.skip("needs an IPv4 address that is not loopback")
    return address


def test_a_host_name_that_is_fine(tmp_path: Path) -> None:
    found = elsewhere(tmp_path, hosts=f"127.0.0.1 localhost\n{mine()} node-7\n")
    assert found.keys() == {"host-ok"}
    assert f"node-7 at {mine()}" in found["host-ok"]


def test_a_host_name_that_nobody_knows(tmp_path: Path) -> None:
    found = elsewhere(tmp_path, hosts=f"127.0.0.1 localhost\n{mine()} other\n")
    assert found.keys() == {"host-unresolvable"}
    assert mine() in found["host-unresolvable"]


def test_a_host_name_that_is_loopback(tmp_path: Path) -> None:
    found = elsewhere(tmp_path, hosts=f"127.0.0.1 localhost\n127.0.1.1 node-7\n{mine()} other\n")
    assert found.keys() == {"host-loopback"}
    assert "127.0.1.1" in found["host-loopback"]


def test_a_host_name_that_is_another_machine(tmp_path: Path) -> None:
    found = elsewhere(tmp_path, hosts=f"127.0.0.1 localhost\n198.51.100.9 node-7\n{mine()} other\n")
    assert found.keys() == {"host-elsewhere"}


def test_localhost_that_is_v6_alone(tmp_path: Path) -> None:
    found = elsewhere(tmp_path, hosts=f"::1 localhost\n{mine()} node-7\n")
    assert found.keys() == {"localhost-v6"}


@pytest.mark.slow
def test_a_nameserver_that_is_silent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        try:
            silent.bind(("127.0.0.99", 53))
        except OSError as error:
            pytest.skip(f"needs root: {error}")
        resolv = "nameserver 127.0.0.99\n"
        found = elsewhere(tmp_path, hosts="127.0.0.1 localhost\n", resolv=resolv)
        assert {"lookup-slow", "reverse-slow"} <= found.keys()
        assert "given up" in found["lookup-slow"]
        known = f"127.0.0.1 localhost\n{mine()} node-7\n"
        assert elsewhere(tmp_path, hosts=known, resolv=resolv).keys() == {"host-ok"}


def test_a_machine_without_a_network(tmp_path: Path) -> None:
    up = "ip link set lo up"
    if shutil.which("ip") is None:
        up = f"{sys.executable} -c {_UP!r}"
    found = elsewhere(tmp_path, hosts="127.0.0.1 localhost node-7\n", net=up)
    assert found.keys() == {"host-only-loopback"}


_UP = (
    'import fcntl,socket,struct; s=socket.socket(); fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 0x49))'
)


def test_a_machine_without_even_loopback() -> None:
    facts = gather.network_facts({})
    gone = gather.NetworkFacts(
        **{name: getattr(facts, name) for name in facts.__dataclass_fields__}
        | {"chosen": "", "chosen_error": "no address"}
    )
    assert [one.code for one in check_network(gone)] == ["host-none"]


def test_a_lookup_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "LOOKUP_LIMIT_S", 0.05)
    never = threading.Event()
    found = gather.lookup(lambda: (str(never.wait(LIMIT_S)),))
    never.set()
    assert (found.found, found.timed_out) == ((), True)


# -- the whole of it ---------------------------------------------------------------------------------------


def doctor(*arguments: str, flags: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-m", "dprims.doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )


def test_a_run_with_a_backend_that_is_fine(
    redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["doctor", redis_server.url, "--json"])
    answer = json.loads(capsys.readouterr().out)
    codes = {one["code"] for one in answer["findings"]}
    assert codes <= RULES.keys()
    assert {"python-ok", "torch-ok", "extra-ok", "etcd-ok", "backend-ok", "backend-lock"} <= codes
    assert status == int(answer["worst"] == "error")


def test_variables_that_are_set_are_reported() -> None:
    done = doctor(
        flags=("-S",),  # which torch is there makes no difference
        TORCH_NCCL_BLOCKING_WAIT="1",
        NCCL_SOCKET_IFNAME="none0",
        MASTER_ADDR="no-such-host.invalid",
        CUDA_LAUNCH_BLOCKING="1",
        DPRIMS_BACKEND="unix:///no/such/socket",
    )
    assert done.returncode == 1
    for code in (
        *("env-torch-nccl-blocking-wait", "env-interface-missing", "env-master-unresolvable"),
        *("env-cuda-launch-blocking", "socket-missing"),
    ):
        assert f"[{code}]" in done.stdout


def test_a_python_with_nothing_installed() -> None:
    done = doctor("redis://127.0.0.1:1", flags=("-S",))
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    for package in ("torch", "redis", "etcd3", "ray", "prometheus-client", "typer", "rich"):
        assert f"{package} is not installed" in done.stdout
    assert "[refused]" in done.stdout


def test_few_files() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "dprims.doctor"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
    )
    assert "256 files" in done.stdout
    assert "[files-few]" in done.stdout


@pytest.mark.parametrize("url", ["localhost:6379", "mysql://h/0", f"nonsense://me:{PASSWORD}@h"])
def test_what_is_no_url_is_wrong_use(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "expected scheme://..." in said.err
    assert PASSWORD not in said.err
    with pytest.raises(BadUrl):
        examine(url)


def test_wrong_options_are_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--wrong"]) == 2
    assert doctor("--wrong").returncode == 2
    assert doctor("no-url", flags=("-S",)).returncode == 2


def test_a_terminal_gets_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    import io

    from dprims.doctor.findings import find
    from dprims.doctor.report import show

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    findings = [
        find("python-ok", version="3.12", platform="linux", dprims="1"),
        find("platform", platform="x"),
    ]
    terminal, pipe = Terminal(), io.StringIO()
    show(findings, terminal)
    show(findings, pipe)
    assert pipe.getvalue() == as_text(findings)
    assert "platform" in terminal.getvalue()
    assert "-> run it on Linux" in terminal.getvalue()
    assert terminal.getvalue() != pipe.getvalue()
