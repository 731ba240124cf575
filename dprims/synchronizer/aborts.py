"""Aborts of NCCL communicators, each on a thread of its own, and the wait for them.

An abort frees device memory, and the driver then waits, under the context's lock, for all that runs on the
device. A kernel of another communicator that spins because its peer is gone never ends by itself: whoever
would end it then waits for that lock, in the least call, and the process hangs for good. So no communicator
is begun on a device while another one's abort is under way there.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import TYPE_CHECKING

import torch

from ..exceptions import DeviceLost
from .graveyard import bury
from .settle import join_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .guard import Guard

__all__ = ["abort_aside", "wait_for_aborts"]

POLL_S = 0.001
BEGIN_S = 1.0
EXIT_S = 5.0
"""How long the interpreter's end waits for aborts: one that loses its driver ends the process by SIGABRT."""

_log = logging.getLogger("dprims.aborts")
_lock = threading.Lock()
_running: dict[threading.Thread, tuple[torch.device, str]] = {}


def abort_aside(pg: ProcessGroup, device: torch.device, name: str) -> None:
    """Abort NCCL's communicator on a daemon thread, which may never return.

    Returns when it has begun, within BEGIN_S at the latest.
    """
    begun = threading.Event()
    held = [pg]
    del pg

    def abort() -> None:
        try:
            torch.cuda.set_device(device)  # the current device is per thread
            begun.set()
            held[0].abort()
        except Exception:  # noqa: BLE001 - the waiter is long gone, only the log is left
            _log.exception("aborting %s on %s failed", name, device)
        finally:
            begun.set()
            # who drops a group last joins its threads, and an interpreter that ends then ends by SIGABRT
            bury(held)
            with _lock:
                del _running[threading.current_thread()]

    thread = threading.Thread(target=abort, name=f"dprims-abort-{name}", daemon=True)
    with _lock:
        _running[thread] = device, name
    thread.start()
    begun.wait(BEGIN_S)


def wait_for_aborts(device: torch.device, guard: Guard, grace_s: float) -> None:
    """Return when no abort is under way on *device*.

    Raises what *guard* raises, and DeviceLost after *grace_s* seconds: the process has to be replaced.
    """
    deadline = time.monotonic() + grace_s
    while names := _under_way(device):
        guard.check()
        if time.monotonic() >= deadline:
            raise DeviceLost(
                f"{guard.what}: {device} still aborts {', '.join(names)} after {grace_s} s; "
                "this process has to be replaced"
            )
        time.sleep(POLL_S)


def _under_way(device: torch.device) -> list[str]:
    with _lock:
        return sorted(name for where, name in _running.values() if where == device)


@atexit.register
def _see_out() -> None:
    """At the interpreter's end, when no more are begun."""
    with _lock:
        threads = list(_running)
    join_all(threads, EXIT_S)
