"""What each rank of a fleet without a controller does: stay in the roster, find and follow the leader."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from ..backend import Backend, connect
from ..exceptions import DprimsError, HandshakeMismatch
from ..roster import Roster
from ..synchronizer.calls import RefitAnswer, RefitSite
from ..synchronizer.shell import is_first_hand
from ..synchronizer.workers import WeightReceiver, WeightSender
from .letters import Document, read_call, write_answer, write_info
from .mailbox import SLICE_S, Handler, Letterbox, mailbox_name, then

log = logging.getLogger("dprims.engines.spmd")

LOOK_S = 0.2
"""Pause between two looks at who is in, and between two tries to reach a leader's store."""
SAY_AFTER_S = 5.0
SAY_EVERY_S = 30.0
CLOSE_S = 10.0
"""How long closing waits for a thread that is in the middle of something."""


class Address(NamedTuple):
    """Where a leader is, as it stands in the backend."""

    term: int
    store: str
    trainers: int
    shard_sizes: tuple[int, ...]
    roster_ttl_s: float


def address_key(site: RefitSite) -> str:
    """The fenced cell of the leader's address."""
    return f"{site.prefix}/spmd/leader"


def enrolment(site: RefitSite, backend: Backend) -> Roster:
    """The roster in which generation ranks say what they are, before they know their seats."""
    return Roster(f"{site.fleet}.generation", backend, namespace=site.namespace, ttl=site.roster_ttl_s)


def write_address(address: Address) -> bytes:
    """An address as it stands in the backend, without the term, which fences it."""
    return json.dumps(address[1:], separators=(",", ":")).encode()


def read_address(backend: Backend, site: RefitSite) -> Address | None:
    """The address of the newest leader; None before the first."""
    found = backend.read_fenced(address_key(site))
    if found is None:
        return None
    term, value = found
    store, trainers, sizes, ttl = json.loads(value)
    return Address(term, str(store), int(trainers), tuple(map(int, sizes)), float(ttl))


class Waiting:
    """Says what a long wait is for, so that nobody has to guess: after SAY_AFTER_S, then each SAY_EVERY_S."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._began = time.monotonic()
        self._due = self._began + SAY_AFTER_S

    def still(self, why: str) -> None:
        """The wait goes on, for this reason."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + SAY_EVERY_S
            log.warning("%s has waited for %.0f s: %s", self._who, now - self._began, why)


class Attendant:
    """The thread that keeps a rank in the roster, finds the leader, and takes its letters."""

    def __init__(
        self,
        worker: WeightSender | WeightReceiver,
        site: RefitSite,
        backend: Backend,
        more: Mapping[str, Handler] | None = None,
        upkeep: Callable[[Address | None], None] = lambda _: None,
    ) -> None:
        """*upkeep* is called at least each second with what stands in the backend; its HandshakeMismatch
        ends this rank's part."""
        self.worker, self.site, self.backend = worker, site, backend
        self.leader: int | None = None
        """The term of the leader whose store is reached; None while none is."""
        self._upkeep = upkeep
        self._looked = 0.0
        self._handlers: dict[str, Handler] = {"prepare": self._prepare, "call": self._call, **(more or {})}
        self._letterbox: Letterbox | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"dprims-spmd-{worker.seat}", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether this rank takes part no more."""
        return self._stop.is_set()

    def close(self) -> None:
        """Leave the roster and end the threads. Bounded; idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            if self._letterbox is not None:
                self._letterbox.leave()
            self.worker.close()
        self._thread.join(CLOSE_S)

    def _prepare(self, body: Any) -> Future[Any]:
        return then(self.worker.prepare_refit_info(self.site, str(body)), write_info)

    def _call(self, body: Any) -> Future[Any]:
        return then(self.worker.submit(read_call(body)), self._said)

    def _said(self, answer: RefitAnswer) -> Document:
        """The answer on its way; what went wrong here, and not because of others, is also said here."""
        if answer.error is not None and is_first_hand(answer.error):
            kind = type(answer.error).__name__
            log.warning("seat %d, to its leader: %s: %s", self.worker.seat, kind, answer.error)
        return write_answer(answer)

    def _run(self) -> None:
        pause = LOOK_S
        while not self._stop.is_set():
            try:
                if self._follow():
                    pause = LOOK_S
            except HandshakeMismatch as error:
                log.error("seat %d takes part no more: %s", self.worker.seat, error)
                self._stop.set()
                self.worker.close()
            except (DprimsError, TimeoutError) as error:
                log.info("seat %d has no leader: %s", self.worker.seat, error)
            except Exception:
                log.exception("seat %d: its mail is out of order", self.worker.seat)
            self.leader = None
            self._stop.wait(pause)
            pause = min(2 * pause, SLICE_S)

    def _follow(self) -> bool:
        """Take the letters of the leader that stands in the backend until it, or we, are another."""
        address = self._look()
        if not self.worker.incarnation:
            joined = self.worker.prepare_refit_info(self.site)
            while not joined.done() and not self._stop.is_set():  # a worker that is closed answers nothing
                wait([joined], LOOK_S)
            if joined.done():
                joined.result()
        incarnation = self.worker.incarnation
        if not incarnation:
            return False
        if address is None:
            self.backend.wait(address_key(self.site), SLICE_S)
            return True
        name = mailbox_name(self.site.prefix, address.term, self.worker.seat, incarnation)
        if self._letterbox is None or self._letterbox.name != name:
            self._letterbox = Letterbox(name, self._handlers)
        if self._letterbox.dismissed:
            return False
        with connect(address.store) as cells:
            self.leader = address.term
            self._letterbox.serve(cells, lambda: self._stays(address, incarnation))
        return True

    def _stays(self, address: Address, incarnation: int) -> bool:
        if self._stop.is_set() or self.worker.incarnation != incarnation:
            return False
        return time.monotonic() - self._looked < SLICE_S or self._look() == address

    def _look(self) -> Address | None:
        address = read_address(self.backend, self.site)
        self._upkeep(address)
        self._looked = time.monotonic()
        return address
