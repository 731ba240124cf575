"""A rank in a Ray actor, as the engine holds it: calls that return futures, and death as Ray tells it.

Ray says of a failed call whether the actor is dead (``ActorDiedError``) or out of reach for now
(``ActorUnavailableError``). The first ends every open call with PeerLost. After the second the engine's own
calls are made again, since every one of them may come twice; if the rank is really cut off, its roster entry
lapses. One watch call is always open, so that a death is known also between refits.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from ..backend import need
from ..exceptions import DprimsError, PeerLost
from ._ray_actor import OtherProcess, Place

log = logging.getLogger("dprims.engines.ray")

AGAIN_S = 0.2
"""Pause before a call is made again to an actor that was out of reach."""
KILL_LIMIT_S = 10.0

Ref = Callable[[], Any]


class RayRank:
    """The handle of a rank: *actor*, once it is attached as the *role* of a seat.

    *build* is what an actor of the engine's own is told to make first; without it the actor is the user's,
    and is never killed.
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        role: str,
        seat: int,
        device: str,
        *,
        build: tuple[Any, ...] | None = None,
    ) -> None:
        self._ray = need("ray", "ray")
        self.name = name
        self.actor = actor
        self.owned = build is not None
        self.place: Place | None = None
        """Where it is; None until it is up."""
        self.ready: Future[Any] = Future()
        self._open: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._lost: PeerLost | None = None
        self._gone = threading.Event()
        self._ending = False
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"dprims-{name}", daemon=True).start()
        if build is None:
            self._attach(role, seat, device)
        else:
            built = self._ask(lambda: actor.build.remote(*build), again=False)
            built.add_done_callback(lambda done: self._attach(role, seat, device, done.exception()))

    # -- what an engine asks for -------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The id of the actor's process on its node; 0 until it is up."""
        return 0 if self.place is None else self.place.pid

    @property
    def alive(self) -> bool:
        """Whether Ray has not said that the actor died; True while it is only out of reach."""
        return self._lost is None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the actor, in the order of the actor's own queue.

        It is made once: an actor that is out of reach is an ActorUnavailableError.
        """
        return self._ask(lambda: getattr(self.actor, method).remote(*args, **kwargs), again=False)

    def call_now(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the rank in the actor, whatever the actor is busy with; made again if need be."""
        identity = "" if self.place is None else self.place.identity
        return self._ask(
            lambda: self.actor.dprims_refit.remote(identity, method, *args, **kwargs), again=True
        )

    def signal(self, number: int) -> None:
        """Have the actor's process send itself a signal; a frozen one cannot."""
        self.call_now("signal", int(number))

    def close(self, timeout: float = 5.0) -> None:
        """Have the rank leave the roster, within *timeout* seconds; then end an actor of the engine's own."""
        if self.alive and self.place is not None:
            with suppress(Exception):  # one that does not answer is left to lapse
                self.call_now("detach").result(timeout)
        self._end()

    def kill(self) -> None:
        """End the actor now and wait until Ray says that it is gone; one that is the user's only leaves."""
        if self.owned:
            self._end()
        else:
            self.close()

    def _end(self) -> None:
        if self.owned and self.alive and self._ray.is_initialized():
            self._ending = True
            with suppress(Exception):  # Ray itself may be on its way down
                self._ray.kill(self.actor, no_restart=True)
                self.call_now("watch")  # so that there is a call that fails
                if not self._gone.wait(KILL_LIMIT_S):
                    log.warning("%s: Ray has not said within %g s that it is gone", self.name, KILL_LIMIT_S)
        self._lose(PeerLost(f"{self.name} was closed"))

    # -- getting up --------------------------------------------------------------------------------------

    def _attach(self, role: str, seat: int, device: str, failed: BaseException | None = None) -> None:
        if failed is not None:
            self._resolve(self.ready, failed)
            return
        attached = self.call_now("attach", role, seat, device)
        attached.add_done_callback(self._attached)

    def _attached(self, done: Future[Place]) -> None:
        error = done.exception()
        if error is not None:
            self._resolve(self.ready, error)
            return
        self.place = place = done.result()
        self.name += f" (actor {place.actor[:8]}, pid {place.pid} on node {place.node})"
        self._watch()
        self._resolve(self.ready, None)

    def _watch(self, last: Future[Any] | None = None) -> None:
        """Keep one call open for as long as the rank is there: its failure is the news."""
        if self.alive and (last is None or last.exception() is None):
            self.call_now("watch").add_done_callback(self._watch)

    # -- calls ---------------------------------------------------------------------------------------------

    def _ask(self, ref: Ref, *, again: bool) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            lost = self._lost
            if lost is None:
                self._open.add(future)
        if lost is not None:
            future.set_exception(lost)
        else:
            self._make(ref, future, again)
        return future

    def _make(self, ref: Ref, future: Future[Any], again: bool) -> None:
        try:
            asked: Future[Any] = ref().future()
        except Exception as error:  # noqa: BLE001 - what cannot be sent is the caller's to see
            self._resolve(future, error)
            return

        def answered(done: Future[Any]) -> None:
            if done.exception() is None:
                self._resolve(future, None, done.result())
            else:  # what a failure leads to may take its time, and Ray's own thread answers for all ranks
                self._steps.put(lambda: self._failed(done.exception(), ref, future, again))

        asked.add_done_callback(answered)

    def _failed(self, error: Any, ref: Ref, future: Future[Any], again: bool) -> None:
        errors = self._ray.exceptions
        if isinstance(error, errors.RayTaskError):  # first: it also is of the type of its cause
            raised = _cause(error)
            if isinstance(raised, OtherProcess):
                self._die(str(raised))
            self._resolve(future, raised)
        elif isinstance(error, errors.ActorDiedError):
            self._die(_why_died(error))
        elif isinstance(error, errors.ActorUnavailableError) and again and self.alive:
            log.warning("%s is out of reach; its call is made again", self.name)
            timer = threading.Timer(AGAIN_S, self._make, (ref, future, again))
            timer.daemon = True
            timer.start()
        else:
            self._resolve(future, error)

    def _die(self, why: str) -> None:
        if self.alive and not self._ending:
            log.warning("%s died: %s", self.name, why)
        self._gone.set()
        self._lose(PeerLost(f"{self.name} died: {why}"))

    def _lose(self, lost: PeerLost) -> None:
        with self._lock:
            if self._lost is None:
                self._lost = lost
            lost = self._lost
            still_open = list(self._open)
        for future in still_open:
            self._resolve(future, lost)
        self._resolve(self.ready, lost)
        self._steps.put(None)

    def _resolve(self, future: Future[Any], error: BaseException | None, result: Any = None) -> None:
        with self._lock:
            self._open.discard(future)
        with suppress(InvalidStateError):  # settled before, or cancelled by whoever waited
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            step()

    def __repr__(self) -> str:
        return f"<RayRank {self.name} {'alive' if self.alive else 'gone'}>"


def _cause(error: Any) -> BaseException:
    """What was raised in the actor, with its own type and the traceback from there as its cause."""
    raised = error.cause
    if not isinstance(raised, BaseException):
        return DprimsError(str(error))
    if type(raised).__module__ == "ray.exceptions" and type(raised).__name__ == "RayError":
        return DprimsError(str(raised))  # what Ray makes of one that cannot be pickled
    raised.__cause__ = error
    return raised


def _why_died(error: BaseException) -> str:
    """Ray's reason in one line: it comes after a list of what the caller knows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("The actor")), lines[0] if lines else "")
    for opening in ("The actor is dead because ", "The actor died because "):
        said = said.removeprefix(opening)
    return said.partition(" Some common causes")[0].rstrip(".")
