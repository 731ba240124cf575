"""Gathers the facts. Every look is bounded; none changes anything but a lock of the doctor's own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from typing import Any

from .. import __version__
from ..exceptions import BackendMisconfigured
from ..synchronizer.rendezvous import choose_address, is_here
from ._check_environment import READ
from ._check_network import SLOW_S
from .checks import EXTRAS, PROVIDED_BY
from .facts import (
    TORCH_LIMIT_S,
    BackendFacts,
    DriverFacts,
    EtcdFacts,
    Facts,
    Gpu,
    Lookup,
    NetworkFacts,
    Reach,
    SystemFacts,
    TorchFacts,
)
from .places import endpoints
from .secrets import shown

LOOKUP_LIMIT_S = 6.0
REACH_LIMIT_S = 3.0
SMI_LIMIT_S = 15.0
BACKEND_LIMIT_S = 60.0
"""For the process that looks at a backend, the import of its client included."""


def gather(url: str | None, environ: Mapping[str, str]) -> Facts:
    """Look at this machine, and at the backend at *url*, all at once."""
    with ThreadPoolExecutor(8, thread_name_prefix="dprims-doctor") as pool:
        torch = pool.submit(torch_facts)
        driver = pool.submit(driver_facts)
        etcd = pool.submit(etcd_facts)
        backend = pool.submit(backend_facts, url) if url else None
        network = network_facts(environ)
        return Facts(
            system=system_facts(),
            packages=_packages(),
            environment={name: environ[name] for name in sorted(READ) if name in environ},
            network=network,
            torch=torch.result(),
            driver=driver.result(),
            etcd=etcd.result(),
            backend=backend.result() if backend is not None else None,
        )


# -- the machine -------------------------------------------------------------------------------------------


def system_facts() -> SystemFacts:
    """This machine and this interpreter."""
    shm = None
    if os.path.isdir("/dev/shm"):
        found = os.statvfs("/dev/shm")
        shm = found.f_blocks * found.f_frsize
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return SystemFacts(
        python=sys.version.partition(" ")[0],
        platform=sys.platform,
        dprims=__version__,
        wall_clock=time.time(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        shm_bytes=shm,
        open_files=None if soft == resource.RLIM_INFINITY else soft,
    )


def _packages() -> dict[str, str]:
    names = {name for _, package, _, _ in EXTRAS for name in (package, *PROVIDED_BY.get(package, ()))}
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def torch_facts() -> TorchFacts | None:
    """What torch says in a process of its own; None when it is not installed."""
    if "torch" not in _packages():
        return None
    found = _probe("torch", TORCH_LIMIT_S)
    if found is None:
        return TorchFacts(version=_packages()["torch"], hung=True)
    return TorchFacts(**{**found, "devices": tuple(found.get("devices", ()))})


def etcd_facts() -> EtcdFacts | None:
    """Whether etcd3 loads, in a process of its own; None when it is not installed."""
    if not {"etcd3", "etcd3-fc"} & _packages().keys():
        return None
    found = _probe("etcd", TORCH_LIMIT_S)
    return EtcdFacts(**found) if found is not None else None


def driver_facts() -> DriverFacts | None:
    """What nvidia-smi says; None when there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = "--query-gpu=driver_version,mig.mode.current,compute_mode,name"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=SMI_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return DriverFacts(error=f"no answer within {SMI_LIMIT_S:g} s")
    except OSError as error:
        return DriverFacts(error=str(error))
    if done.returncode:
        return DriverFacts(error=" ".join((done.stdout + done.stderr).split())[:300])
    rows = [
        [cell.strip() for cell in line.split(",", 3)] for line in done.stdout.splitlines() if line.strip()
    ]
    gpus = tuple(Gpu(name, mig == "Enabled", mode) for _, mig, mode, name in rows)
    return DriverFacts(rows[0][0] if rows else "", gpus)


# -- names and addresses -----------------------------------------------------------------------------------


def network_facts(environ: Mapping[str, str]) -> NetworkFacts:
    """Names and addresses of this machine."""
    host = socket.gethostname()
    forward = lookup(lambda: addresses_of(host))
    chosen = error = ""
    if forward.seconds > SLOW_S:
        # choosing would look it up again, and wait as long
        chosen = _routed() or "127.0.0.1"
    else:
        try:
            chosen = choose_address()
        except BackendMisconfigured as failure:
            error = str(failure)
    if chosen:
        reverse = lookup(lambda: (socket.getnameinfo((chosen, 0), 0)[0],))
    families = [name for name, address in (("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")) if is_here(address)]
    master = environ.get("MASTER_ADDR")
    return NetworkFacts(
        host=host,
        forward=forward,
        mine=tuple(address for address in forward.found if is_here(address)),
        chosen=chosen,
        chosen_error=error,
        reverse=reverse,
        localhost=lookup(lambda: addresses_of("localhost")).found,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        families=tuple(families),
        master=lookup(lambda: addresses_of(master)) if master else None,
    )


def lookup(ask: Callable[[], tuple[str, ...]]) -> Lookup:
    """Ask the resolver, LOOKUP_LIMIT_S at most; a name that is not known has no answer."""
    answer: Future[tuple[str, ...]] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except (OSError, UnicodeError):
            answer.set_result(())

    began = time.monotonic()
    threading.Thread(target=run, daemon=True).start()
    try:
        found = answer.result(LOOKUP_LIMIT_S)
    except FutureTimeout:  # another type than TimeoutError before Python 3.11
        return Lookup((), time.monotonic() - began, timed_out=True)
    return Lookup(found, time.monotonic() - began)


def addresses_of(host: str) -> tuple[str, ...]:
    """The addresses of a name, numeric; OSError when there are none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


# -- the backend -------------------------------------------------------------------------------------------


def backend_facts(url: str) -> BackendFacts:
    """What comes of using a backend, in a process of its own."""
    with ExitStack() as kept:  # a store's server warns of a connection that is gone at once
        reach = tuple(_reach(host, port, kept) for host, port in endpoints(url))
        if reach and all(one.error for one in reach):
            return BackendFacts(shown(url), reach)
        found = _probe("backend", BACKEND_LIMIT_S, url)
    if found is None:
        return BackendFacts(shown(url), reach, f"no end within {BACKEND_LIMIT_S:g} s", "hung")
    return BackendFacts(
        shown(url), reach, **{**found, "round_trips_s": tuple(found.get("round_trips_s", ()))}
    )


def _reach(host: str, port: int, kept: ExitStack) -> Reach:
    if not port and "/" not in host:
        return Reach(host, port)
    if not port:
        return _reach_file(host)
    answer = lookup(lambda: addresses_of(host))
    if not answer.found:
        return Reach(host, port, "name")
    reach = Reach(host, port)
    for address in answer.found:
        try:
            kept.enter_context(socket.create_connection((address, port), REACH_LIMIT_S))
            return Reach(host, port)
        except ConnectionRefusedError:
            reach = Reach(host, port, "refused")
        except OSError as error:
            reach = Reach(host, port, "unreachable", str(error) or type(error).__name__)
    return reach


def _reach_file(path: str) -> Reach:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(REACH_LIMIT_S)
        try:
            probe.connect(path)
        except OSError as error:
            return Reach(path, 0, "missing", f"{error.strerror or error}")
    return Reach(path, 0)


def _probe(what: str, limit_s: float, told: str = "") -> dict[str, Any] | None:
    """What the probe process found; None when it had to be ended."""
    command = [sys.executable, "-m", f"{__package__}.probe", what]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(told, timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    try:
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = " ".join(err.split())[-300:]
        error = f"the process that looked ended with status {process.returncode}: {said}"
        return _crashed(what, error)
    return found


def _crashed(what: str, error: str) -> dict[str, Any]:
    if what == "etcd":
        return {"package": "etcd3", "version": "", "protobuf": "", "implementation": "", "error": error}
    return (
        {"version": _packages().get("torch", ""), "error": error}
        if what == "torch"
        else {
            "error": error,
            "error_type": "crashed",
        }
    )


def _routed() -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("203.0.113.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
