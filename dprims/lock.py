"""``DistributedLock``: a FIFO mutex between processes and hosts, with fencing tokens.

What belongs to one holding lives in its :class:`Grant`; the lock object only remembers which grants
are current. The queue itself is the backend's; this module is policy: timeouts, errors, ``with``.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from . import metrics
from .backend import Backend, Owner, Ticket, check_name, resolve
from .exceptions import (
    AlreadyHeld,
    BackendError,
    BackendMisconfigured,
    BackendUnavailable,
    DprimsError,
    LockError,
    LockLost,
    LockTimeout,
    NotHeld,
)
from .record import make_record, owner_of
from .session import Session

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType

log = logging.getLogger("dprims.lock")

REPORT_EVERY_S = 30.0
"""How often a wait without a timeout says who holds the lock."""

_UNSET: Any = object()


class Grant:
    """One holding of one lock, from acquire to release.

    ``token`` is larger than that of every earlier grant of the same name: hand it to the resource
    that the lock protects, and let the resource refuse a smaller one (:class:`FencedResource`).
    Only that is safe under pauses; ``lost`` and ``check`` are as good as this host's clock.
    """

    def __init__(self, session: Session, ticket: Ticket, key: tuple[str, object], display_name: str) -> None:
        if ticket.token is None:
            raise NotHeld(f"lock {display_name!r}: its ticket was not granted")
        self.name = display_name
        self.token: int = ticket.token
        self.acquired_at = session.backend.clock()
        self._session = session
        self._ticket = ticket
        self._key = key
        self._lock = threading.Lock()
        self._released = False
        self._ambiguous = False
        self._was_lost = False
        self._counted = False

    @property
    def lost(self) -> bool:
        """Whether the lock stopped being ours before we released it. Sticky; read against the clock.

        False does not promise that nobody else holds it at the resource: only the token does.
        """
        if not self._released:
            self._was_lost = self._session.lost(self._ticket)
        return self._was_lost

    def check(self) -> None:
        """Raise :class:`LockLost` or :class:`NotHeld` unless this grant is still good. No round trip."""
        if self._released:
            raise NotHeld(f"lock {self.name!r} (token {self.token}) has been released")
        if self._session.lost(self._ticket):
            raise LockLost(f"lock {self.name!r} (token {self.token}) is lost: {self._why()}")

    def verify(self) -> None:
        """Like :meth:`check`, but asks the server: one round trip. Raises BackendUnavailable as well."""
        self.check()
        self._session.prove(self._ticket)
        self.check()

    def release(self) -> None:
        """Hand the lock to the next waiter. Any thread may do it.

        Raises :class:`LockLost` when it was no longer ours, :class:`NotHeld` when it was released
        before. After :class:`BackendUnavailable` it may be called again; a retry that finds the
        lock gone is a success, as the first try may have reached the server.
        """
        if self._session.pid != os.getpid():
            raise NotHeld(
                f"lock {self.name!r} (token {self.token}) is held by process {self._session.pid}, "
                f"not by its forked child {os.getpid()}"
            )
        with self._lock:
            if self._released:
                raise NotHeld(f"lock {self.name!r} (token {self.token}) has been released")
            self._session.drop(self._ticket)
            self._session.disown(self._key, self._ticket)
            was_ours = not self._session.lost(self._ticket)
            try:
                freed = self._give_back()
            except BackendError:
                self._ambiguous = True
                raise
            self._released = True
            self._was_lost = not self._ambiguous and not (freed and was_ours)
            self._count(lost=self._was_lost)
            if not freed and not self._ambiguous:
                raise LockLost(
                    f"lock {self.name!r} (token {self.token}) was lost before its release: {self._why()}"
                )
            if not was_ours and not self._ambiguous:
                raise LockLost(f"lock {self.name!r} (token {self.token}) outlived its ttl before its release")

    def _give_back(self) -> bool:
        backend, seen = self._session.backend, metrics.recorder
        if seen is None:
            return backend.release(self._ticket)
        return seen.releases(backend.url, self.name, self._key[0], lambda: backend.release(self._ticket))

    def _count(self, *, lost: bool) -> None:
        """Tell the metrics, once, that this holding is over."""
        seen = metrics.recorder
        if seen is not None and not self._counted:
            self._counted = True
            backend = self._session.backend
            seen.held(backend.url, self.name, backend.clock() - self.acquired_at, lost=lost)

    def _why(self) -> str:
        if self._session.pid != os.getpid():
            return f"it is held by process {self._session.pid}, not by its forked child {os.getpid()}"
        silent = self._session.backend.clock() - self._ticket.proven
        return f"last proven {silent:.3f} s ago with a ttl of {self._ticket.ttl:g} s, or taken by another"

    def __repr__(self) -> str:
        state = "released" if self._released else "lost" if self.lost else "held"
        return f"<Grant {self.name!r} token={self.token} {state}>"


class DistributedLock:
    """A mutex named *name*, shared by everybody who uses the same name, namespace and backend.

    FIFO among the live. Frees itself when its holder dies or freezes for longer than *ttl* seconds;
    the holder learns so through ``grant.lost``, ``grant.check()`` and *on_lost*, which is called
    with the grant on a thread of its own and may use the lock. Not re-entrant: the thread (or task)
    that holds it gets :class:`AlreadyHeld` at once. It does not promise mutual exclusion at the
    protected resource while processes can pause: pass ``grant.token`` there.

    *backend*: None (``$DPRIMS_BACKEND``, else torch's default store), a URL, a torch Store, a redis or
    etcd3 client, or a Backend. *timeout* is what ``with`` waits (None: for ever, saying every 30 s
    who holds it). *label*, and *payload* (any JSON value), are shown to others.
    """

    def __init__(
        self,
        name: str,
        backend: object = None,
        *,
        namespace: str = "dprims",
        ttl: float = 10.0,
        timeout: float | None = None,
        on_lost: Callable[[Grant], object] | None = None,
        label: str = "",
        payload: Any = None,
    ) -> None:
        self.name = check_name("lock name", name)
        self._full_name = check_name("lock name", f"{check_name('namespace', namespace)}/{name}")
        self.timeout = _check_timeout(timeout)
        if on_lost is not None and not callable(on_lost):
            raise BackendMisconfigured(
                f"lock {name!r}: on_lost is {on_lost!r}; expected None or a function that takes the grant"
            )
        self.backend = resolve(backend)
        self.ttl = _raise_ttl(ttl, self.backend.guarantees.min_ttl, name)
        self.on_lost = on_lost
        self.label = label
        self.payload = payload
        self._grants: dict[object, Grant] = {}

    # -- acquire ----------------------------------------------------------------------------------

    def acquire(self, timeout: float | None = _UNSET) -> Grant | None:
        """Wait for the lock and return its grant, or None when *timeout* seconds ran out.

        0 tries once, None waits for ever, nothing means ``lock.timeout``. Raises
        :class:`AlreadyHeld` when this thread holds it, and BackendUnavailable when the backend does
        not answer.
        """
        limit = self.timeout if timeout is _UNSET else _check_timeout(timeout)
        return self._acquire(limit, _identity(), _Attempt())

    def _acquire(self, timeout: float | None, who: object, attempt: _Attempt) -> Grant | None:
        seen = metrics.recorder
        if seen is None:
            return self._have(timeout, who, attempt)
        full_name = self._full_name
        return seen.waits(self.backend.url, self.name, full_name, lambda: self._have(timeout, who, attempt))

    def _have(self, timeout: float | None, who: object, attempt: _Attempt) -> Grant | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        session = Session.of(self.backend)
        key = (self._full_name, who)
        mine = session.owners.get(key)
        if mine is not None and not session.lost(mine):
            raise AlreadyHeld(
                f"lock {self.name!r} (token {mine.token}) is held by this thread or task already"
            )
        record = make_record(self.label, self.payload, attempt.thread)
        ticket = self.backend.enqueue(self._full_name, self.ttl, record)
        attempt.ticket = ticket
        if not ticket.held and not self._wait(session, ticket, deadline, attempt):
            return None
        grant = Grant(session, ticket, key, self.name)
        session.owners[key] = ticket
        self._grants[who] = grant
        session.keep(ticket, lambda: self._tell(grant))
        return grant

    def _tell(self, grant: Grant) -> None:
        """A heartbeat found that *grant* is lost."""
        grant._count(lost=True)
        if self.on_lost is not None:
            self.on_lost(grant)

    def _wait(self, session: Session, ticket: Ticket, deadline: float | None, attempt: _Attempt) -> bool:
        """Wait for the ticket's turn until *deadline*; whatever ends that otherwise leaves the queue."""
        held = False
        session.keep(ticket, _nothing)
        try:
            while not (held or attempt.cancelled):
                left = math.inf if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                held = self.backend.await_turn(ticket, min(left, REPORT_EVERY_S))
                if ticket.gone and not attempt.cancelled:
                    raise BackendUnavailable(
                        f"{self.backend!r} was closed while waiting for lock {self.name!r}"
                    )
                if not held and deadline is None and not attempt.cancelled:
                    log.info("lock %r: still waiting; held by %s", self.name, self._holder())
        finally:
            if not held:
                session.drop(ticket)
                self.backend.leave(ticket)
        return held

    def release(self) -> None:
        """Release this thread's grant, else the current grant of another thread.

        Raises :class:`NotHeld` when this lock object holds nothing, :class:`LockLost` when it was lost.
        """
        grants = self._current()
        if not grants:
            raise NotHeld(f"lock {self.name!r} is not held by this lock object")
        (grants.get(_identity()) or max(grants.values(), key=lambda grant: grant.token)).release()

    def _current(self) -> dict[object, Grant]:
        """The grants that were not released, by who acquired them."""
        for who, grant in list(self._grants.items()):
            if grant._released and self._grants.get(who) is grant:
                self._grants.pop(who, None)
        return dict(self._grants)

    # -- with -------------------------------------------------------------------------------------

    def __enter__(self) -> Grant:
        grant = self.acquire()
        if grant is None:
            raise LockTimeout(self._timed_out())
        return grant

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(_identity(), error)

    def _leave(self, who: object, error: BaseException | None) -> None:
        grant = self._current().get(who)
        if grant is None:  # the body has released it
            return
        try:
            grant.release()
        except (LockLost, BackendError) as failure:
            if error is None:
                raise
            log.warning("while %s was in flight: %s", type(error).__name__, failure)

    async def __aenter__(self) -> Grant:
        import asyncio

        who, attempt = _identity(), _Attempt()
        waiting = _in_thread(lambda: self._acquire(self.timeout, who, attempt))
        try:
            grant = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(lambda done: self._undo(done, who))
            attempt.cancelled = True
            _in_thread(lambda: attempt.cancel(self.backend))
            raise
        if grant is None:
            raise LockTimeout(await _in_thread(self._timed_out))
        return grant

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        who = _identity()
        await asyncio.shield(_in_thread(lambda: self._leave(who, error)))

    def _undo(self, acquired: asyncio.Future[Grant | None], who: object) -> None:
        """A cancelled ``async with`` keeps neither a place in the queue nor the lock."""
        if acquired.cancelled() or acquired.exception() is not None or acquired.result() is None:
            return

        def give_back() -> None:
            try:
                self._leave(who, None)
            except DprimsError as error:  # the task that would care was cancelled
                log.warning("lock %r, granted to a cancelled task: %s", self.name, error)

        _in_thread(give_back)

    # -- look -------------------------------------------------------------------------------------

    def owner(self) -> Owner | None:
        """Who holds the lock now, from the server; None when nobody does. One round trip or two."""
        places = self.backend.queue(self._full_name)
        return owner_of(places[0]) if places and places[0].token is not None else None

    def waiters(self) -> list[Owner]:
        """Who waits for the lock, in the order in which they will have it."""
        return [owner_of(place) for place in self.backend.queue(self._full_name) if place.token is None]

    def _holder(self) -> str:
        try:
            return str(self.owner() or "nobody")
        except BackendError as error:
            return f"unknown ({error})"

    def _timed_out(self) -> str:
        if not self.timeout:
            return f"lock {self.name!r} was not acquired: it is held by {self._holder()}"
        return f"lock {self.name!r} was not acquired within {self.timeout} s; held by {self._holder()}"

    def __repr__(self) -> str:
        return f"<DistributedLock {self.name!r} on {self.backend!r}>"


class FencedResource:
    """The guard of a resource in one process: it refuses a token lower than the highest it has seen.

    Call :meth:`check` with the token of each request before the request changes anything. That is
    what keeps a holder that was frozen past its ttl from writing over its successor.
    """

    def __init__(self, name: str = "resource") -> None:
        self.name = name
        self.highest = 0
        self._lock = threading.Lock()

    def check(self, token: int) -> None:
        """Remember *token*, or raise :class:`LockLost` when a higher one has been seen.

        LockError for what is no token: it could not be compared.
        """
        if type(token) is not int:
            raise LockError(f"{self.name}: token is {token!r}; expected the int of a grant")
        with self._lock:
            if token < self.highest:
                raise LockLost(f"{self.name}: token {token} is stale, {self.highest} has been seen")
            self.highest = token


class _Attempt:
    """One call of acquire, as seen by whoever may cancel it, on another thread; made by who calls."""

    __slots__ = ("cancelled", "thread", "ticket")

    def __init__(self) -> None:
        self.cancelled = False
        self.thread = threading.current_thread().name
        self.ticket: Ticket | None = None

    def cancel(self, backend: Backend) -> None:
        """End the wait. A lock that was granted meanwhile is still the caller's to release."""
        self.cancelled = True
        ticket = self.ticket
        if ticket is not None and not ticket.held:
            backend.leave(ticket)


def _nothing() -> None:
    """A waiter has nothing to lose."""


def _identity() -> object:
    """Who asks: the running asyncio task, else the thread."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        try:
            task: object = asyncio.current_task()
        except RuntimeError:  # no loop runs in this thread
            task = None
        if task is not None:
            return task
    return threading.current_thread()


T = TypeVar("T")


def _in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking call on a thread of its own: the loop's shared pool could be full of waiters."""
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_result, call())
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the awaiting task
            outcome = (future.set_exception, error)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            log.warning("the event loop closed before a lock call came back: %r", outcome[1])

    threading.Thread(target=run, name="dprims-lock-call", daemon=True).start()
    return future


def _check_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise BackendMisconfigured(f"timeout is {timeout!r}; expected None or seconds >= 0")
    return None if math.isinf(timeout) else float(timeout)


def check_ttl(ttl: float) -> float:
    """Return *ttl* when it is a length of time above 0, else raise BackendMisconfigured."""
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < math.inf:
        raise BackendMisconfigured(f"ttl is {ttl!r}; expected seconds > 0")
    return float(ttl)


def _raise_ttl(ttl: float, floor: float, name: str) -> float:
    ttl = check_ttl(ttl)
    if ttl < floor:
        warnings.warn(f"lock {name!r}: ttl {ttl} s is raised to the backend's floor, {floor} s", stacklevel=3)
        return floor
    return ttl
