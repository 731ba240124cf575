"""One process's dealings with one backend: the heartbeats of all its locks, on one thread.

A lock is *lost* by arithmetic, not by a signal: it was proven at some moment, its ttl is known, and
the clock says whether that is over. So :attr:`Session.lost` is right even when the heartbeat thread
has not run since the process was frozen. The thread's work is to prove again in time, and to call
``on_lost`` when it could not.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
from collections.abc import Callable

from . import metrics
from .backend import Backend, Ticket
from .exceptions import BackendError, BackendUnavailable

log = logging.getLogger("dprims.session")

_jitter = random.Random()  # of our own: who seeds the global one counts on its sequence

IDLE_S = 5.0
"""How long the heartbeat thread outlives the last ticket."""

MAX_PAUSE_S = 3600.0
"""How long the heartbeat thread sleeps at a time: a thread cannot wait for as long as a ttl may be."""

RETRY_S = 1.0
"""How soon at the latest the heartbeat thread goes on after an error of its own."""

CLOSE_S = 2.0
"""How long closing gives back tickets one by one; a server that does not answer frees the rest by itself."""


class Session:
    """The heartbeats of every ticket that this process has with one backend.

    Made by :meth:`of`, never shared with a forked child: the child gets one of its own.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.pid = os.getpid()
        self.owners: dict[tuple[str, object], Ticket] = {}
        """Which thread or task holds which name, for :class:`~dprims.exceptions.AlreadyHeld`."""
        self._changed = threading.Condition()
        self._tickets: dict[Ticket, Callable[[], object]] = {}
        self._thread: threading.Thread | None = None
        self._due = 0.0
        self._idle = False

    @classmethod
    def of(cls, backend: Backend) -> Session:
        """The session of this process with *backend*, opened when there is none."""
        with _SESSIONS_LOCK:
            session = _SESSIONS.get(id(backend))
            if session is not None and session.backend is backend and session.pid == os.getpid():
                return session
            if session is not None and session.backend is backend:
                backend.reconnect_after_fork()
            session = _SESSIONS[id(backend)] = cls(backend)
            return session

    @classmethod
    def close_of(cls, backend: Backend) -> None:
        """End the session with *backend*, if there is one: release what it holds, leave its queues."""
        with _SESSIONS_LOCK:
            session = _SESSIONS.get(id(backend))
            if session is None or session.backend is not backend:
                return
            del _SESSIONS[id(backend)]
        if session.pid == os.getpid():
            session._close()

    # -- tickets --------------------------------------------------------------------------------

    def keep(self, ticket: Ticket, on_lost: Callable[[], object]) -> None:
        """Beat for *ticket* from now on; *on_lost* is called once, on a thread of its own, if it is lost."""
        now = self.backend.clock()
        # a waiter is looked at once straight away: backends time those ahead of it from then on
        due = now if ticket.token is None else now + _beat_interval(ticket)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._idle, self._due = False, due
                thread = threading.Thread(target=self._run, name="dprims-session", daemon=True)
                thread.start()
                self._thread = thread
            self._tickets[ticket] = on_lost
            if due < self._due:
                self._due = due
                self._changed.notify()

    def drop(self, ticket: Ticket) -> None:
        """Stop beating for *ticket*; what becomes of it is not reported any more."""
        with self._changed:
            self._tickets.pop(ticket, None)

    def disown(self, key: tuple[str, object], ticket: Ticket) -> None:
        """Forget that *ticket* is what its thread or task holds, unless it holds another by now."""
        if self.owners.get(key) is ticket:
            self.owners.pop(key, None)

    def lost(self, ticket: Ticket) -> bool:
        """Whether a ticket that was held is held no more. Reads the clock; no round trip; never goes back."""
        if not ticket.gone and self.pid == os.getpid() and self.backend.clock() < ticket.proven + ticket.ttl:
            return False
        ticket.gone = True
        return True

    def prove(self, ticket: Ticket) -> bool:
        """Ask the server, in one round trip, whether *ticket* still holds its lock."""
        if not self.lost(ticket):
            self.backend.beat([ticket], ticket.ttl / 3)
        return not self.lost(ticket)

    # -- the heartbeat thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception:  # whatever it is, the other locks need their beats
                log.exception("the heartbeat of %r failed; it goes on", self.backend)
                with self._changed:
                    pause = min([RETRY_S, *map(_beat_interval, self._tickets)])
                    self._due = min(self._due, self.backend.clock() + pause)

    def _turn(self) -> bool:
        """Wait until a beat is due, then beat once; False when the thread has nothing more to do."""
        with self._changed:
            while (pause := self._due - self.backend.clock()) > 0:
                self._changed.wait(min(pause, MAX_PAUSE_S))
            tickets = list(self._tickets)
            if not tickets:
                if self._idle:
                    self._thread = None
                    return False
                self._idle, self._due = True, self.backend.clock() + IDLE_S
                return True
            self._idle, self._due = False, math.inf
        wanted = self._beat(tickets)
        told = self._report_losses()
        with self._changed:
            pause = min((_beat_interval(ticket) for ticket in self._tickets), default=IDLE_S)
            due = self.backend.clock() + (pause if wanted is None else min(pause, wanted))
            due = due if told else min(due, self.backend.clock() + RETRY_S)
            self._due = min(self._due, due)  # keep() may have asked for an earlier one meanwhile
        return True

    def _beat(self, tickets: list[Ticket]) -> float | None:
        for ticket in tickets:  # a gap longer than the ttl is a loss, whatever the server says now
            if ticket.token is not None:
                self.lost(ticket)
        alive = [ticket for ticket in tickets if not ticket.gone]
        if not alive:
            return None
        limit = min(ticket.ttl for ticket in alive) / 3
        held = [ticket for ticket in alive if ticket.token is not None]
        try:
            wanted = self.backend.beat(alive, limit)
            _count(self.backend, sum(not ticket.gone for ticket in held), ok=True)
            return wanted
        except BackendError as error:
            log.warning("heartbeat of %d locks to %r failed: %s", len(alive), self.backend, error)
        except Exception:
            log.exception("heartbeat of %d locks to %r failed", len(alive), self.backend)
        _count(self.backend, len(held), ok=False)
        return limit / 4  # again soon: what is held lives until its ttl

    def _report_losses(self) -> bool:
        """Call ``on_lost`` of what was lost; False when the process had no thread left for one of them."""
        with self._changed:
            lost = [(t, call) for t, call in self._tickets.items() if t.token is not None and self.lost(t)]
        for key, ticket in list(self.owners.items()):
            if ticket.gone:
                self.disown(key, ticket)
        for ticket, call in lost:
            with self._changed:
                if ticket not in self._tickets:  # released meanwhile: its owner knows
                    continue
                try:
                    threading.Thread(target=call, name=f"dprims-lost-{ticket.name}", daemon=True).start()
                except RuntimeError as error:
                    log.warning("lock %r is lost, and on_lost cannot be called yet: %s", ticket.name, error)
                    return False
                del self._tickets[ticket]
            log.warning("lock %r (token %s) is lost", ticket.name, ticket.token)
        return True

    def _close(self) -> None:
        with self._changed:
            tickets, self._tickets = list(self._tickets), {}
            self._due, self._idle = 0.0, True
            self._changed.notify()
        if tickets:
            self._give_back(tickets)
        for ticket in tickets:
            ticket.gone = True

    def _give_back(self, tickets: list[Ticket]) -> None:
        """Release or leave *tickets* for at most CLOSE_S; what is left ends with the connections or a ttl."""
        late = threading.Event()

        def give_back() -> None:
            for ticket in tickets:
                if late.is_set():
                    return
                try:
                    if ticket.held:
                        self.backend.release(ticket)
                    else:
                        self.backend.leave(ticket)
                except BackendUnavailable:  # the next one would only wait as long
                    return
                except BackendError:
                    continue
                except Exception:
                    log.exception("lock %r was not given back to %r", ticket.name, self.backend)

        # on a thread of its own: a call that has begun takes as long as the backend lets it
        thread = threading.Thread(target=give_back, name="dprims-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process has no thread left, or the interpreter ends
            give_back()
            return
        thread.join(CLOSE_S)
        late.set()


def _count(backend: Backend, held: int, *, ok: bool) -> None:
    """Tell the metrics how many held locks were renewed, or were not."""
    seen = metrics.recorder
    if seen is not None:
        seen.renewed(backend.url, held, ok=ok)


def _beat_interval(ticket: Ticket) -> float:
    """A third of the ttl, up to a tenth earlier, so that sessions do not beat in step."""
    return ticket.ttl / 3 * _jitter.uniform(0.9, 1.0)


_SESSIONS: dict[int, Session] = {}
_SESSIONS_LOCK = threading.Lock()
os.register_at_fork(after_in_child=_SESSIONS_LOCK._at_fork_reinit)  # type: ignore[attr-defined]
