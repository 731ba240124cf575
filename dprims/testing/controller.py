"""A controller in a process of its own, over ranks that another keeps: to kill it and see who goes on.

The engines' processes end with whoever started them. Here the ranks' owner stays, and only the synchronizer
runs elsewhere: its calls come back over a pipe, and are made here.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ..engines.fleet import WorkerGroup
from ..engines.process import WorkerProcess, _portable
from ..exceptions import PeerLost
from ..synchronizer.calls import METHODS, RankInfo, RefitCall, RefitSite
from ..synchronizer.settle import as_future

__all__ = ["ControllerProcess"]


class ControllerProcess:
    """A ``CollectiveWeightSynchronizer(**options)`` in a process of its own; *backend* has to be a URL.

    *policy* and *generation* stay with the caller. :meth:`call` reaches the synchronizer's methods and, by
    name, its properties. The process can be signalled and killed at any time; the ranks live on.
    """

    def __init__(self, policy: Any, generation: Any, **options: Any) -> None:
        ours, theirs = Pipe()
        self._sides = {"policy": policy, "generation": generation}
        self._pipe = ours
        self._replies = threading.Lock()
        shape = (policy.world_size, tuple(generation.worker_group.sizes))
        self.process = WorkerProcess("controller", _Controller, (theirs, shape, options))
        theirs.close()
        threading.Thread(target=self._serve, name="dprims-controller-calls", daemon=True).start()
        self.process.ready.result(60.0)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the synchronizer, or read a property; calls run one after another."""
        return self.process.call("do", name, args, kwargs)

    def close(self) -> None:
        """End the process, frozen or not. Idempotent."""
        self.process.kill()
        self._pipe.close()

    def _serve(self) -> None:
        while True:
            try:
                number, side, method, args = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError, TypeError):  # TypeError: closed while it was being read
                return
            try:
                futures = [as_future(one) for one in getattr(self._sides[side], method)(*args)]
            except Exception as error:  # noqa: BLE001 - it is the answer
                self._reply(number, None, error)
                continue
            for place, future in enumerate(futures):
                future.add_done_callback(
                    lambda done, place=place, number=number: self._reply(  # type: ignore[misc]
                        number, place, done.exception() or done.result()
                    )
                )

    def _reply(self, number: int, place: int | None, outcome: Any) -> None:
        with self._replies, suppress(OSError, ValueError):
            self._pipe.send_bytes(pickle.dumps((number, place, _portable(number, outcome))))


class _Controller:
    """What lives in the controller's process."""

    def __init__(self, pipe: Connection, shape: tuple[int, tuple[int, ...]], options: Any) -> None:
        from ..synchronizer.collective import CollectiveWeightSynchronizer

        caller = _Caller(pipe)
        policy, generation = _RemotePolicy(caller, shape[0]), _RemoteGeneration(caller, shape[1])
        self.sync = CollectiveWeightSynchronizer(policy, generation, **options)

    def do(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = getattr(self.sync, name)
        return found(*args, **kwargs) if callable(found) else found

    def close(self) -> None:
        self.sync.shutdown()


class _Caller:
    """Makes calls over the pipe; each has as many futures as ranks that it is to."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._open: dict[int, list[Future[Any]]] = {}
        self._number = 0
        threading.Thread(target=self._receive, name="dprims-controller-replies", daemon=True).start()

    def __call__(self, ranks: int, side: str, method: str, *args: Any) -> list[Future[Any]]:
        futures: list[Future[Any]] = [Future() for _ in range(ranks)]
        with self._lock:
            self._number += 1
            self._open[self._number] = futures
            self._pipe.send_bytes(pickle.dumps((self._number, side, method, args)))
        return futures

    def _receive(self) -> None:
        while True:
            try:
                number, place, answer = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                break
            _, outcome = pickle.loads(answer)
            futures = self._open[number]
            for future in futures if place is None else [futures[place]]:
                _settle(future, outcome)
            if all(future.done() for future in futures):
                del self._open[number]
        for futures in list(self._open.values()):
            for future in futures:
                _settle(future, PeerLost("whoever started the ranks is gone"))


def _settle(future: Future[Any], outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class _RemotePolicy:
    def __init__(self, caller: _Caller, world_size: int) -> None:
        self.world_size = world_size
        self.host = "127.0.0.1"
        self._caller = caller

    def prepare_refit_info(self, site: RefitSite, known: Mapping[int, str]) -> Sequence[Future[RankInfo]]:
        return self._caller(self.world_size, "policy", "prepare_refit_info", site, dict(known))

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS["policy"].values():
            raise AttributeError(name)
        return lambda call: self._send(name, call)

    def _send(self, name: str, call: RefitCall) -> Sequence[Future[Any]]:
        return self._caller(len(call.incarnations), "policy", name, call)


class _RemoteGeneration:
    def __init__(self, caller: _Caller, sizes: tuple[int, ...]) -> None:
        self.worker_group = WorkerGroup(sizes)
        self._caller = caller

    def get_inference_world_size(self) -> int:
        return sum(self.worker_group.sizes)

    def prepare_refit_info(self, site: RefitSite) -> Sequence[Future[RankInfo]]:
        return self._caller(self.get_inference_world_size(), "generation", "prepare_refit_info", site)

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS["generation"].values():
            raise AttributeError(name)
        return lambda call: self._send(name, call)

    def _send(self, name: str, call: RefitCall) -> Sequence[Future[Any]]:
        return self._caller(len(call.incarnations), "generation", name, call)
