"""Run a function in real processes, one a rank, joined by a gloo process group.

For tests of code that calls ``torch.distributed``: the collectives are real, the processes are real, and a
hang ends at the limit with every process killed. Needs the extra ``torch``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, TypeVar

from ..backend import need
from ..exceptions import PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

__all__ = ["RankTraceback", "run_ranks"]

R = TypeVar("R")

_GOODBYE_S = 10.0
"""How long processes that have returned may take to end by themselves."""
_STACKS_S = 0.5
"""How long before the limit a process that still runs writes its stacks to stderr."""


class RankTraceback(Exception):
    """The cause of what `run_ranks` raises: which rank raised it, and its traceback there."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"on rank {self.rank}\n\n{self.text}"


def run_ranks(n: int, fn: Callable[..., R], *args: Any, timeout: float = 60.0) -> list[R]:
    """Run ``fn(rank, world_size, *args)`` in `n` processes and return what they returned, in rank order.

    Each process is rank `rank` of an initialised default process group with the backend gloo, whose own
    timeout is longer than `timeout`. `fn` is a function of a module, not a closure or a lambda; it, its
    arguments and its results travel by pickle. The module may be a test file that no name imports.

    The first failure is raised here as it was there, with a `RankTraceback` as its cause; a process that
    dies without a result is PeerLost. Then, and after `timeout` seconds (TimeoutError, which names the ranks
    that had not returned and leaves their stacks on stderr), all processes are killed: none outlives the
    call. A process that has returned keeps its connections open until all have. Each uses one torch thread.

    Processes are forked from a server that has torch loaded, so that a call costs a fraction of a second;
    they see the environment as it was at the first call. On Windows they are spawned.
    """
    dist = need("torch.distributed", "torch")
    if n < 1:
        raise ValueError(f"n={n}: at least one rank is needed")
    deadline = time.monotonic() + timeout
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = pickle.dumps((fn, args))
    module = sys.modules[fn.__module__]
    task = _Task(n, store.port, timeout, fn.__module__, getattr(module, "__file__", None), call)
    context = _context()
    workers: list[_Worker] = []
    try:
        for rank in range(n):
            workers.append(_Worker.start(context, rank, task))
        results = _collect(workers, deadline, timeout)
        for worker in workers:
            worker.dismiss()
        for worker in workers:
            worker.process.join(_GOODBYE_S)
        return results
    finally:
        for worker in workers:
            worker.kill()


@dataclass(frozen=True, slots=True)
class _Task:
    """What every process is told: the world, where its store is, and the call."""

    world_size: int
    port: int
    timeout: float
    module: str
    path: str | None
    call: bytes


@dataclass(slots=True)
class _Worker:
    """One process and this side of its pipe."""

    rank: int
    process: BaseProcess
    pipe: Connection
    pending: bool = True

    @classmethod
    def start(cls, context: BaseContext, rank: int, task: _Task) -> _Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank_main, args=(rank, task, theirs), name=f"rank {rank}")  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        return cls(rank, process, ours)

    def receive(self) -> _Outcome:
        """Return what came through the pipe; one that ended without a word is a death."""
        self.pending = False
        try:
            outcome = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(_GOODBYE_S)
            code = self.process.exitcode
            lost = PeerLost(f"rank {self.rank} ended with exit code {code} before it returned")
            return _Outcome(time.monotonic(), error=lost, text=str(lost))
        if not isinstance(outcome, _Outcome):
            raise TypeError(f"rank {self.rank} sent {outcome!r}")
        return outcome

    def dismiss(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"")

    def kill(self) -> None:
        """End the process if it still runs, and wait until it is gone."""
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join(_GOODBYE_S)
        self.pipe.close()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a rank has to say: its result, or what it raised, with its traceback; `at` orders failures."""

    at: float
    result: Any = None
    error: BaseException | None = None
    text: str = ""


def _collect(workers: list[_Worker], deadline: float, timeout: float) -> list[Any]:
    """Return every rank's result, or raise the earliest failure."""
    results: list[Any] = [None] * len(workers)
    while pending := [worker for worker in workers if worker.pending]:
        left = deadline - time.monotonic()
        ready = connection.wait([worker.pipe for worker in pending], max(0.0, left))
        if not ready and left <= 0:
            names = ", ".join(str(worker.rank) for worker in pending)
            raise TimeoutError(f"of {len(workers)} ranks these had not returned after {timeout:g} s: {names}")
        failures: list[tuple[float, int, BaseException, str]] = []
        for worker in pending:
            if worker.pipe not in ready:
                continue
            outcome = worker.receive()
            results[worker.rank] = outcome.result
            if outcome.error is not None:
                failures.append((outcome.at, worker.rank, outcome.error, outcome.text))
        if failures:
            _, rank, error, text = min(failures, key=lambda failure: failure[:2])
            raise error from RankTraceback(rank, text)
    return results


def _context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # What this process has loaded of them, the function will need too, and each rank would load it anew.
    loaded = [
        name for name in sys.modules if name in ("numpy", "pytest") or name.startswith("torch.distributed")
    ]
    context.set_forkserver_preload([__name__, "torch.distributed", *loaded])
    return context


def _rank_main(rank: int, task: _Task, pipe: Connection) -> None:
    """Be one rank: join the group, call the function, report, and leave when told."""
    faulthandler.dump_traceback_later(max(task.timeout - _STACKS_S, task.timeout / 2), exit=False)
    try:
        message = pickle.dumps(_Outcome(0.0, result=_call(rank, task)))
    except BaseException as error:  # noqa: BLE001 - raised in the parent
        message = _failure(error)
    faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(OSError, EOFError):
        pipe.send_bytes(message)
        pipe.recv_bytes()
    # A group whose peers are gone can hang in its destructors, so nothing of it is torn down.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _call(rank: int, task: _Task) -> Any:
    dist = need("torch.distributed", "torch")
    need("torch", "torch").set_num_threads(1)
    _make_importable(task.module, task.path)
    fn, args = pickle.loads(task.call)
    limit = timedelta(seconds=2 * task.timeout)  # the parent's limit comes first
    store = dist.TCPStore("127.0.0.1", task.port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.world_size, timeout=limit)
    return fn(rank, task.world_size, *args)


def _make_importable(name: str, path: str | None) -> None:
    """Load the module of the function under its name, from its file where the name alone does not do."""
    if name == "__main__":
        return  # multiprocessing has loaded it
    try:
        if getattr(importlib.import_module(name), "__file__", None) == path:
            return
    except ImportError:
        pass
    if path is None:
        raise ImportError(f"module {name} has no file to be loaded from")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name} cannot be loaded from {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _failure(error: BaseException) -> bytes:
    """Return the outcome of a failure, with an error of its own text where the error itself cannot travel."""
    at, text = time.monotonic(), "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps(_Outcome(at, error=error, text=text))
        pickle.loads(message)
    except Exception:  # noqa: BLE001 - whatever pickling an unknown error raises
        stand_in = RuntimeError(f"{type(error).__qualname__}: {error}")
        message = pickle.dumps(_Outcome(at, error=stand_in, text=text))
    return message
