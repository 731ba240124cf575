"""Looks at one thing in a process of its own, so that whatever hangs or crashes there takes nothing with it.

``python -m dprims.doctor.probe torch|etcd|backend`` prints one JSON object. A backend's URL comes on stdin,
as command lines are seen by everybody.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

ROUND_TRIPS = 9
LIMIT_S = 12.0
"""How long the calls to a backend may take, its client being imported."""
LOCK_TTL_S = 5.0
LOCK_WAIT_S = 3.0
CLIENTS = {
    "tcpstore": "torch.distributed",
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
    "etcd": "dprims.backends.etcd",
    "etcds": "dprims.backends.etcd",
}
KEY = "dprims/doctor/round-trip"
"""A cell that nobody writes."""


def look_at_torch() -> dict[str, Any]:
    """Fields of TorchFacts."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # noqa: BLE001 - it is the finding
        return {"version": installed("torch"), "error": one_line(error)}
    found: dict[str, Any] = {"version": str(torch.__version__), "cuda": torch.version.cuda or ""}
    found["distributed"] = dist.is_available()
    found["gloo"] = dist.is_available() and dist.is_gloo_available()
    if dist.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if found["cuda"]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]
                found["devices"] = [
                    torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())
                ]
            except Exception as error:  # noqa: BLE001 - it is the finding
                found["device_error"] = one_line(error)
        if said and "device_error" not in found:
            found["device_error"] = one_line(said[0].message)
    return found


def look_at_etcd() -> dict[str, Any]:
    """Fields of EtcdFacts."""
    package = "etcd3" if installed("etcd3") else "etcd3-fc"
    found = {"package": package, "version": installed(package), "protobuf": installed("protobuf") or "none"}
    found["implementation"] = "unknown"
    try:
        api = import_module("google.protobuf.internal.api_implementation")
        found["implementation"] = api.Type()
        from ..backends._etcd3_shim import load_etcdrpc

        load_etcdrpc()
    except Exception as error:  # noqa: BLE001 - it is the finding
        found["error"] = one_line(error)
    return found


def look_at_backend() -> dict[str, Any]:
    """Fields of BackendFacts, all but the URL and whether it can be reached."""
    from ..backend import connect
    from ..exceptions import DprimsError

    url = sys.stdin.read()
    found: dict[str, Any] = {}
    _import_client(url)

    def use() -> None:
        try:
            backend = connect(url)
        except DprimsError as error:
            found.update(error=one_line(error), error_type=type(error).__name__)
            return
        found["guarantees"] = asdict(backend.guarantees)
        try:
            _use(backend, found)
        except DprimsError as error:
            found.update(error=one_line(error), error_type=type(error).__name__)
        backend.close()

    guarded(use, found)
    return found


def _import_client(url: str) -> None:
    """Have the time for imports over before the clock starts; what fails here is told by connect."""
    scheme = url.partition("://")[0]
    with suppress(Exception):
        if scheme in CLIENTS:
            import_module(CLIENTS[scheme])


def guarded(use: Callable[[], None], found: dict[str, Any]) -> None:
    """Run *use* for LIMIT_S at most; what it raises, or that it hangs, is noted in *found*."""

    def run() -> None:
        try:
            use()
        except Exception as error:  # noqa: BLE001 - it is the finding
            found.update(error=one_line(error), error_type=type(error).__name__)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if thread.is_alive() and not found.get("error"):
        found.update(error=f"no end within {LIMIT_S:g} s", error_type="hung")


def _use(backend: Any, found: dict[str, Any]) -> None:
    from ..exceptions import DprimsError
    from ..lock import DistributedLock

    trips: list[float] = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        backend.get(KEY)
        trips.append(time.perf_counter() - began)
    found["round_trips_s"] = trips[1:]  # the first one may have opened the connection
    try:
        before, server, after = time.time(), backend.server_facts(), time.time()
    except DprimsError:
        pass  # the server keeps it to itself
    else:
        found["version"], found["settings"] = server.version, dict(server.settings)
        if server.clock is not None:
            found["clock_off_s"] = server.clock - (before + after) / 2
            found["clock_error_s"] = (after - before) / 2
    try:
        began = time.perf_counter()
        lock = DistributedLock(
            "doctor", backend, namespace="dprims-doctor", ttl=LOCK_TTL_S, label="dprims doctor"
        )
        grant = lock.acquire(LOCK_WAIT_S)
        if grant is not None:
            grant.release()
            found["lock_s"] = time.perf_counter() - began
    except DprimsError as error:
        found["lock_error"] = one_line(error)


def installed(package: str) -> str:
    """The version of a distribution; empty when it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def one_line(error: object) -> str:
    """What an error or a warning says, in one line of bearable length."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, Exception) and not type(error).__module__.startswith("dprims"):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 400 else f"{text[:397]}..."


LOOKS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": look_at_torch,
    "etcd": look_at_etcd,
    "backend": look_at_backend,
}

if __name__ == "__main__":
    print(json.dumps(LOOKS[sys.argv[1]]()), flush=True)  # noqa: T201 - it is what this process is for
    os._exit(0)  # whatever still hangs on a thread
