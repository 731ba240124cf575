"""The shell around a rank's protocol machine: its inbox, its roster entry, the watch for decisions.

One thread owns the :class:`~dprims.synchronizer.protocol.Member` and takes steps from an inbox. A call only
puts a step there, so a call never blocks, and its future is done when the machine answers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..backend import Backend, connect
from ..exceptions import (
    BackendError,
    DprimsError,
    PeerLost,
    RefitAborted,
    RefitError,
    RefitTimeout,
    TornWeights,
)
from ..roster import Roster
from .calls import RankInfo, RefitAnswer, RefitCall, RefitSite
from .clocks import Times, this_clock
from .protocol import (
    Answer,
    Broke,
    Cancel,
    CellRead,
    Drop,
    Holding,
    Join,
    Joined,
    Member,
    Message,
    Perform,
    Performed,
    ReadTerm,
    Reply,
    Started,
    TermRead,
    Version,
    WriteAbort,
    decision_key,
    decode_decision,
    encode_decision,
    next_key,
)

if TYPE_CHECKING:
    from ..lock import Grant
    from .transfer import TransferStats

log = logging.getLogger("dprims.synchronizer.shell")

WATCH_SLICE_S = 1.0
"""How long the watch for a decision outlives its epoch: a wait for a cell cannot be cancelled."""
REJOIN_S = 1.0
"""Pause before a rank whose entry lapsed tries again to join, when the backend does not answer."""


class MemberShell(ABC):
    """A rank in a fleet, without what it does to weights: subclasses perform what the machine asks for."""

    def __init__(self, seat: int, *, sends: bool) -> None:
        self.seat = seat
        self._member = Member(sends=sends)
        self._site: RefitSite | None = None
        self._backend: Backend | None = None
        self._roster: Roster | None = None
        self._entry: Grant | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: dict[Message, RefitCall] = {}
        self._waiting: dict[Message, list[tuple[Future[RefitAnswer], float]]] = {}
        self._outcome: dict[Message, tuple[BaseException | None, Mapping[int, TransferStats]]] = {}
        self._watched: set[tuple[Any, int]] = set()
        self._highest = 0
        self._closed = False
        threading.Thread(target=self._run_machine, name=f"dprims-machine-{seat}", daemon=True).start()

    # -- what a subclass does ----------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, message: Message, call: RefitCall) -> None:
        """Start a build or receive on another thread, which ends by calling :meth:`_finished`."""

    @abstractmethod
    def _cancel(self, action: Cancel) -> None:
        """Make the build or receive of this message end soon."""

    @abstractmethod
    def _act(self, message: Message) -> None:
        """Pause, commit or resume, here and now."""

    @abstractmethod
    def _drop(self, action: Drop) -> None:
        """Discard what is staged."""

    def _info(self, known: str) -> RankInfo:
        """Say who this rank is, and what it sends where the caller does not know it by this digest."""
        return RankInfo(self.seat, self._member.incarnation, version=self._highest)

    @abstractmethod
    def _end(self) -> None:
        """Cancel what runs and end the threads."""

    def _before(self, message: Message) -> None:  # noqa: B027 - nothing to do is a sound default
        """Called before the machine sees a message; what it raises is the answer."""

    def _finished(
        self,
        event: Performed | Broke,
        error: BaseException | None = None,
        stats: Mapping[int, TransferStats] | None = None,
    ) -> None:
        """A build or receive is over; any thread may say so."""

        def tell() -> None:
            self._outcome[event.message] = (error, stats or {})
            self._handle(event)

        self._inbox.put(tell)

    # -- calls: none of them blocks ---------------------------------------------------------------------

    def prepare_refit_info(self, site: RefitSite, known: str = "") -> Future[RankInfo]:
        """Join the roster at *site*, unless that is done, and say who this rank is and what it sends.

        *known* is the digest of the metadata that the caller has; equal metadata is not sent again.
        """
        future: Future[RankInfo] = Future()
        asked = time.monotonic()
        self._inbox.put(lambda: self._prepare(site, known, future, asked))
        return future

    def submit(self, call: RefitCall) -> Future[RefitAnswer]:
        """Hand one call of the protocol to the machine; the future has its answer."""
        future: Future[RefitAnswer] = Future()
        message = call.message(self.seat)
        asked = time.monotonic()

        def take() -> None:
            if self._closed:
                future.set_exception(RefitError(f"rank at seat {self.seat} has been closed"))
                return
            self._calls[message] = call
            self._waiting.setdefault(message, []).append((future, asked))
            try:
                self._before(message)
                self._handle(message)
            except Exception as error:  # noqa: BLE001 - it is the answer
                self._outcome[message] = (error, {})
                self._answer(Answer(message, Reply("error", why(error), self._member.seen)))

        self._inbox.put(take)
        return future

    ask = init_collective = rollback = submit

    @property
    def holding(self) -> Holding:
        """What this rank has live and staged, and whether it is paused."""
        return Holding(self._member.live, self._member.staged, self._member.paused)

    @property
    def version(self) -> Version | None:
        """The version that is live here, or None."""
        return self._member.live

    @property
    def incarnation(self) -> int:
        """The token of this rank's roster entry; 0 while it is not in."""
        return self._member.incarnation

    def close(self) -> None:
        """Leave the roster and end the threads. What runs is cancelled. Idempotent, bounded."""
        done = threading.Event()

        def leave() -> None:
            self._closed = True
            self._end()
            if self._backend is not None:
                with suppress(DprimsError):
                    self._backend.close()
            self._inbox.put(None)
            done.set()

        self._inbox.put(leave)
        done.wait(10.0)

    # -- the machine's thread ----------------------------------------------------------------------------

    def _run_machine(self) -> None:
        while (step := self._inbox.get()) is not None:
            try:
                step()
            except Exception:
                log.exception("rank at seat %d: an event of the protocol failed", self.seat)

    def _handle(self, event: Any) -> None:
        for action in self._member.handle(event):
            getattr(self, self._ACTIONS[type(action)])(action)

    _ACTIONS: ClassVar = {
        Join: "_join",
        ReadTerm: "_read_term",
        Perform: "_perform",
        Cancel: "_cancel",
        Drop: "_drop",
        WriteAbort: "_write_abort",
        Answer: "_answer",
    }

    def _prepare(self, site: RefitSite, known: str, future: Future[RankInfo], asked: float) -> None:
        try:
            if self._site != site or self._backend is None:
                self._attach(site)
            if not self._member.ready or self._entry is None or self._entry.lost:
                self._handle(Started())
            info = self._info(known)
            future.set_result(replace(info, times=Times(asked, time.monotonic(), this_clock())))
        except Exception as error:  # noqa: BLE001 - it is the answer
            future.set_exception(error)

    def _attach(self, site: RefitSite) -> None:
        old, self._backend = self._backend, None
        if old is not None:
            log.warning(
                "rank at seat %d leaves fleet %s for %s of another controller: if the one before still "
                "runs, it leads this rank no more",
                self.seat,
                self._at_site(self._site).prefix,
                site.prefix,
            )
            with suppress(DprimsError):
                old.close()
        self._backend = connect(site.backend)
        self._site = site
        self._roster = Roster(site.fleet, self._backend, namespace=site.namespace, ttl=site.roster_ttl_s)

    def _join(self, action: Join) -> None:
        roster = self._at_site(self._roster)
        self._entry = roster.join(str(self.seat), on_lost=lambda: self._inbox.put(self._lapsed))
        self._handle(Joined(self._entry.token))

    def _lapsed(self) -> None:
        """The roster entry is gone: stop serving, and come back as somebody new."""
        if self._closed or self._entry is None or not self._entry.lost:
            return
        log.warning("rank at seat %d: its roster entry lapsed; it joins again, stale", self.seat)
        try:
            self._handle(Started())
        except DprimsError as error:
            log.warning("rank at seat %d could not join again yet: %s", self.seat, error)
            timer = threading.Timer(REJOIN_S, lambda: self._inbox.put(self._lapsed))
            timer.daemon = True
            timer.start()

    def _read_term(self, action: ReadTerm) -> None:
        backend, site = self._at_site(self._backend), self._at_site(self._site)
        found = backend.read_fenced(next_key(site.prefix))
        self._handle(TermRead(0 if found is None else found[0]))

    def _perform(self, action: Perform) -> None:
        message = action.message
        if message.kind in ("build", "recv"):
            self._watch(message)
            self._begin(message, self._calls[message])
            return
        try:
            self._act(message)
        except Exception as error:  # noqa: BLE001 - a sink's own error is the answer
            self._outcome[message] = (error, {})
            self._handle(Broke(message, why(error)))
        else:
            if message.kind == "commit":
                self._highest = max(self._highest, message.version.number)
            self._handle(Performed(message))

    def _write_abort(self, action: WriteAbort) -> None:
        backend, site = self._at_site(self._backend), self._at_site(self._site)
        key = decision_key(site.prefix, action.epoch, action.number)
        try:
            backend.write_once(key, encode_decision(f"abort: rank at seat {self.seat}: {action.why}"))
        except BackendError as error:
            log.warning("rank at seat %d could not write the abort of %s: %s", self.seat, key, error)

    def _answer(self, action: Answer) -> None:
        error, stats = self._outcome.pop(action.message, (None, {}))
        self._calls.pop(action.message, None)
        for future, asked in self._waiting.pop(action.message, ()):
            times = Times(asked, time.monotonic(), this_clock())
            future.set_result(RefitAnswer(action.reply, error, stats, times))

    def _watch(self, message: Message) -> None:
        """Have the decision of this epoch and version told to the machine once it stands."""
        cell = (message.epoch, message.version.number)
        if cell in self._watched:
            return
        self._watched.add(cell)
        backend, site = self._at_site(self._backend), self._at_site(self._site)
        key = decision_key(site.prefix, *cell)

        def watch() -> None:
            while not self._closed and self._member.seen <= message.epoch:
                try:
                    value = backend.wait(key, WATCH_SLICE_S)
                except BackendError as error:
                    if self._closed:
                        return
                    log.warning("rank at seat %d cannot watch %s: %s", self.seat, key, error)
                    time.sleep(REJOIN_S)
                    continue
                if value is not None:
                    read = CellRead(cell[0], cell[1], decode_decision(value))
                    self._inbox.put(partial(self._handle, read))
                    break
            self._inbox.put(lambda: self._watched.discard(cell))

        threading.Thread(target=watch, name=f"dprims-watch-{self.seat}", daemon=True).start()

    @staticmethod
    def _at_site(value: Any) -> Any:
        if value is None:
            raise RefitError("this rank was never told where its fleet meets: call prepare_refit_info first")
        return value


def why(error: BaseException) -> str:
    """An error in one line, with its type."""
    return f"{type(error).__name__}: {error}"


def is_first_hand(error: BaseException) -> bool:
    """Whether a rank found this by itself: not that it was aborted, lost a peer, or waited in vain."""
    if isinstance(error, TornWeights):
        return error.first_hand
    return not isinstance(error, RefitAborted | PeerLost | RefitTimeout)
