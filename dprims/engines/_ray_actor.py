"""What lives in a Ray actor: the rank, and the one method through which the engine reaches it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..backend import need
from ..exceptions import PeerLost, RefitAborted, RefitError
from ..synchronizer.calls import RefitAnswer
from .rank import Rank

GROUP = "dprims"
REFIT_THREADS: Mapping[str, int] = {GROUP: 8}
"""For ``@ray.remote(concurrency_groups=REFIT_THREADS)``: threads of their own for refits, so that a refit,
its abort and the question who may serve are answered side by side, whatever the actor is busy with."""
WATCH_S = 30.0
"""How long one watch call stays open: one that a dead controller left behind gives its thread back."""


class OtherProcess(PeerLost):
    """The actor lives, but its process is not the one that was attached: Ray has restarted it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor's rank is."""

    identity: str
    """Names this process: every later call carries it, so that none reaches a successor."""
    actor: str
    pid: int
    node: str


class Attachment:
    """The rank inside an actor, from when an engine attached to it until it is detached."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._identity = uuid.uuid4().hex
        self._as: tuple[str, int, str] | None = None
        self._rank: Rank | None = None
        self._watches: list[Future[None]] = []

    def serve(self, actor: Any, identity: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """One call of the engine: its result, or a Future of it. Never blocks long."""
        if method == "attach":
            return self._attach(actor, *args)
        if identity != self._identity:
            raise OtherProcess("Ray has restarted the actor; what was attached is gone")
        if method == "detach":
            return self._detach()
        if method == "watch":
            return self._watch()
        if method == "signal":
            os.kill(os.getpid(), signal.Signals(*args))
            return None
        rank = self._rank
        if rank is None:
            raise RefitError("the actor was detached from its engine")
        if method == "submit":
            return _portable_answer(rank.submit(*args))
        return getattr(rank, method)(*args, **kwargs)

    def _watch(self) -> Future[None]:
        """Done when the rank is detached, or after a while."""
        future: Future[None] = Future()
        timer = threading.Timer(WATCH_S, _end, (future,))
        timer.daemon = True
        timer.start()
        with self._lock:
            self._watches = [one for one in self._watches if not one.done()] + [future]
        return future

    def _attach(self, actor: Any, role: str, seat: int, device: str) -> Place:
        ray = need("ray", "ray")
        with self._lock:
            wanted = (role, seat, device)
            if self._rank is None or self._as != wanted:
                self._leave()
                app = actor.refit_source() if role == "sender" else actor.refit_sink()
                self._rank = Rank(role, seat, app, device, _gloo_address())
                self._as = wanted
            context = ray.get_runtime_context()
            node = f"{ray.util.get_node_ip_address()} ({context.get_node_id()[:8]})"
            return Place(self._identity, context.get_actor_id() or "", os.getpid(), node)

    def _detach(self) -> None:
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        rank, self._rank = self._rank, None
        for watch in self._watches:
            _end(watch)
        if rank is not None:
            rank.close()


class RefitActor:
    """Base of your own actor class, for weights that live in an actor of yours.

    ::

        @ray.remote(num_gpus=1, concurrency_groups=REFIT_THREADS)
        class Sampler(RefitActor):
            def refit_sink(self): return self.sink

    A trainer defines ``refit_source()``, a generation rank ``refit_sink()``; they are called once, when an
    engine is built over the actor's handle. Where the actor has the weights on a device, the sink's methods
    run on a thread of dprims, beside the actor's own methods: the sink's ``pause`` is where to stop them.
    For an actor with ``async`` methods take :class:`AsyncRefitActor`.
    """

    def refit_source(self) -> Any:
        """A WeightSource over the weights of this trainer."""
        raise RefitError(f"{type(self).__name__} does not define refit_source(), which a trainer has to")

    def refit_sink(self) -> Any:
        """A WeightSink over the weights of this generation rank."""
        raise RefitError(
            f"{type(self).__name__} does not define refit_sink(), which a generation rank has to"
        )

    def dprims_refit(self, identity: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """For the engine alone: one call to the rank in this actor."""
        if _on_an_event_loop():
            raise RefitError(f"{type(self).__name__} has async methods: its base has to be AsyncRefitActor")
        outcome = _attachment(self).serve(self, identity, method, *args, **kwargs)
        return outcome.result() if isinstance(outcome, Future) else outcome


class AsyncRefitActor(RefitActor):
    """The same base for an actor that has ``async`` methods: no call of the engine blocks an event loop."""

    async def dprims_refit(self, identity: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """For the engine alone: one call to the rank in this actor."""
        attachment = _attachment(self)
        if method in ("attach", "detach"):  # the first imports torch, the second waits for threads
            return await asyncio.to_thread(attachment.serve, self, identity, method, *args, **kwargs)
        outcome = attachment.serve(self, identity, method, *args, **kwargs)
        return await asyncio.wrap_future(outcome) if isinstance(outcome, Future) else outcome


def _attachment(actor: Any) -> Attachment:
    found: Attachment = vars(actor).setdefault("_dprims_attachment", Attachment())  # atomic
    return found


class OwnedActor(RefitActor):
    """The actor of an engine that starts its ranks itself: it builds the user's object, and has no other."""

    def build(self, make: Callable[..., Any], args: tuple[Any, ...], device: str) -> None:
        """Make the source or sink, where an exception keeps its type."""
        if device.startswith("cuda"):
            import torch

            torch.cuda.set_device(device)  # before anything of the user's is made
        self._app = make(*args)

    def refit_source(self) -> Any:
        """What was built."""
        return self._app

    refit_sink = refit_source

    def app_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of the user's own object."""
        return getattr(self._app, method)(*args, **kwargs)


def _in_group(actor_class: type) -> None:
    """Have the engine's calls run on threads of their own: Ray refuses the class where there are none."""
    ray = need("ray", "ray")
    method = vars(actor_class)["dprims_refit"]
    ray.method(concurrency_group=GROUP)(method)


_in_group(RefitActor)
_in_group(AsyncRefitActor)


def _on_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _end(watch: Future[None]) -> None:
    with suppress(InvalidStateError):
        watch.set_result(None)


def _gloo_address() -> str:
    """The address of this node that other nodes of the Ray cluster reach."""
    address: str = need("ray", "ray").util.get_node_ip_address()
    return address


def _portable_answer(future: Future[RefitAnswer]) -> Future[RefitAnswer]:
    """An answer whose error another process can read: one that does not travel goes by its text."""
    made: Future[RefitAnswer] = Future()

    def pass_on(done: Future[RefitAnswer]) -> None:
        error = done.exception()
        if error is not None:
            made.set_exception(error)
            return
        answer = done.result()
        if answer.error is not None and not travels(answer.error):
            text = f"{type(answer.error).__name__}: {answer.error}"
            answer = replace(answer, error=RefitAborted(text))
        made.set_result(answer)

    future.add_done_callback(pass_on)
    return made


def travels(error: BaseException) -> bool:
    """Whether an exception can be read back from what it is pickled to; some pickle, and yet cannot."""
    cloudpickle = need("ray.cloudpickle", "ray")
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs code of any kind
        return False
    return True
