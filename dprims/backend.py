"""What a coordination backend implements, and how one is found.

A backend offers two things: **queues** (a FIFO lock with tokens) and **cells** (small values that
can be compared and set, and waited for). Policy (renewal, deadlines, errors, ``with``) lives above,
in :mod:`dprims.lock` and :mod:`dprims.roster`, and is the same for every backend.

Rules that hold for each implementation:

* every call is bounded and raises :class:`~dprims.exceptions.BackendUnavailable` when its time is up;
* every call may be made from any thread;
* a wake-up carries no authority: :meth:`Backend.await_turn` proves ownership at the server before it
  says yes, also after the process was frozen;
* calls are idempotent per ticket, so that a lost reply is answered by asking again;
* only the server's clock, or durations on one host's own clock, decide that somebody is dead.

``dprims.testing.backend_conformance`` checks these rules on any backend.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import SplitResult

from .exceptions import BackendMisconfigured, MissingExtra

ENTRY_POINTS = "dprims.backends"
ENVIRONMENT = "DPRIMS_BACKEND"

# The schemes of our own backends, so that a plain checkout needs no installed metadata.
_BUILT_IN = {
    "memory": "dprims.backends.memory:MemoryBackend",
    "tcpstore": "dprims.backends.tcpstore:TCPStoreBackend",
    "redis": "dprims.backends.redis:RedisBackend",
    "rediss": "dprims.backends.redis:RedisBackend",
    "unix": "dprims.backends.redis:RedisBackend",
    "etcd": "dprims.backends.etcd:EtcdBackend",
    "etcds": "dprims.backends.etcd:EtcdBackend",
}
# Which scheme understands a client object, by the package that its class comes from.
_BY_PACKAGE = {"torch": "tcpstore", "redis": "redis", "valkey": "redis", "etcd3": "etcd"}


def boottime() -> float:
    """Seconds on a clock that never goes back and, where the system has one, counts suspended time."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(frozen=True, slots=True)
class Guarantees:
    """What a backend promises; the table in the documentation is made from this."""

    scope: str
    """``"process"`` (threads of one process) or ``"hosts"``."""
    survives_restart: bool
    """Locks, queues and cells outlive a restart of the server."""
    tokens_survive_restart: bool
    """Tokens keep growing across a restart of the server, also when its data is lost."""
    min_ttl: float
    """The shortest ttl in seconds that the server can keep; shorter ones are raised to it."""
    detects_killed_holder: str
    """How long after its death a killed or frozen holder's lock passes on."""
    clock: str
    """Whose clock measures a ttl."""
    limits: str
    """What is *not* promised, in a sentence."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself, for ``dprims doctor``; empty where it says nothing."""

    version: str = ""
    clock: float | None = None
    """Its wall clock, in Unix seconds, when it answered."""
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock or waits for it, for people and logs.

    ``since`` is when it asked, on its own host's wall clock; ``token`` is None for a waiter.
    """

    host: str
    pid: int
    thread: str
    rank: int | None
    since: float
    token: int | None
    label: str

    def __str__(self) -> str:
        who = f"{self.label} " if self.label else ""
        rank = "" if self.rank is None else f" rank {self.rank}"
        return f"{who}pid {self.pid} on {self.host}{rank} ({self.thread})"


@dataclass(slots=True, eq=False)
class Ticket:
    """One attempt of one caller to hold one lock: its place in the queue.

    Backends subclass it for what they must remember, and set ``token``, ``proven`` and ``gone``.
    """

    name: str
    ttl: float
    record: bytes
    """What others see of the caller; opaque to the backend."""
    token: int | None = None
    """The fencing token once the lock is held; None while waiting."""
    proven: float = 0.0
    """``backend.clock()`` just before the last request that proved this ticket to be in place."""
    gone: bool = False
    """True when the server no longer knows this ticket, or it was released. Never reset."""

    @property
    def held(self) -> bool:
        """Whether the server granted the lock to this ticket and nothing was heard of its end."""
        return self.token is not None and not self.gone


@dataclass(frozen=True, slots=True)
class Place:
    """One place in a queue as :meth:`Backend.queue` reads it; only the holder's has a token."""

    name: str
    token: int | None
    record: bytes


class Backend(ABC):
    """A coordination service: queues and cells. Subclasses are found by the scheme of a URL.

    Names and keys are text of at most :data:`MAX_NAME` bytes in UTF-8, printable, never empty;
    callers have checked that. Values are bytes of at most 64 KiB.
    """

    guarantees: Guarantees
    url: str = ""
    clock: Callable[[], float] = staticmethod(boottime)

    # -- queues ---------------------------------------------------------------------------------

    @abstractmethod
    def enqueue(self, name: str, ttl: float, record: bytes) -> Ticket:
        """Join the queue of *name*; the ticket is held at once when the lock is free."""

    @abstractmethod
    def await_turn(self, ticket: Ticket, timeout: float) -> bool:
        """Wait at most *timeout* seconds for the ticket to be held, and say whether it is, proven now.

        Woken by a notification for this ticket alone. A ticket that was dropped while its process was
        frozen joins the queue again, at the end. Returns False early once the ticket is ``gone``.
        """

    @abstractmethod
    def leave(self, ticket: Ticket) -> None:
        """Give up waiting; frees the lock when it was granted meanwhile, and ends an await_turn of it."""

    @abstractmethod
    def release(self, ticket: Ticket) -> bool:
        """Hand the lock to the next live waiter. False when it was no longer this ticket's."""

    @abstractmethod
    def beat(self, tickets: Sequence[Ticket], timeout: float) -> float | None:
        """Prove all *tickets* in one pipelined round trip: set ``proven``, or ``gone`` where one is.

        Returns within how many seconds it wants to be called again at the latest, or None for
        "as the ttl asks".
        """

    @abstractmethod
    def queue(self, name: str) -> list[Place]:
        """The holder, if there is one, then the waiters in the order in which they will have it."""

    @abstractmethod
    def held(self, prefix: str) -> list[Place]:
        """The holder of every lock whose name starts with *prefix*, sorted by name.

        One that has been silent for its ttl is left out; where only clients can tell, one that calls this
        again and again can.
        """

    def silences(self, names: Sequence[str]) -> list[float | None]:
        """For each lock, how many seconds ago its holder was last heard from; None where that is not known.

        For people who look: nothing is decided by it. Where only clients can tell, the ages are as fine as
        this object's calls of :meth:`held` are frequent, and None until two of them differ.
        """
        return [None] * len(names)

    @abstractmethod
    def evict(self, name: str, token: int) -> bool:
        """End the holding of *name* under *token*, as if its holder had died; False if it was not held so."""

    # -- cells ----------------------------------------------------------------------------------

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value of a cell, or None where nothing stands."""

    @abstractmethod
    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        """Write *value* if *expected* stands there (None: nothing), and return what stands afterwards.

        ``value`` back means it stands, whoever wrote it. A deleted cell equals no bytes.
        """

    @abstractmethod
    def wait(self, key: str, timeout: float) -> bytes | None:
        """Wait at most *timeout* seconds for a cell to have a value; None when it has none by then."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a cell; nothing happens when there is none."""

    # -- life -----------------------------------------------------------------------------------

    def server_facts(self) -> ServerFacts:
        """What the server says of itself. Reads only; bounded as every call is."""
        return ServerFacts()

    @abstractmethod
    def disconnect(self) -> None:
        """Close every connection and thread of this backend. Idempotent."""

    @abstractmethod
    def reconnect_after_fork(self) -> None:
        """In a forked child: forget the parent's connections and open new ones at the next call.

        Raises :class:`BackendMisconfigured` when it cannot (a client that the caller passed in).
        """

    def close(self) -> None:
        """Give back all that this process holds through the backend, then disconnect. Idempotent."""
        from .session import Session  # the session is built on the backend, not the other way round

        _forget(self)
        Session.close_of(self)
        self.disconnect()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    # -- what two primitives give -----------------------------------------------------------------

    def write_once(self, key: str, value: bytes) -> bytes:
        """Write a cell that nobody has written yet; return what stands, which is *value* if we won."""
        _check_cell(key, value)
        stands = self.compare_and_set(key, None, value)
        if stands is None:
            raise BackendMisconfigured(f"{self!r}: compare_and_set on {key!r} returned nothing")
        return stands

    def write_fenced(self, key: str, value: bytes, token: int) -> int:
        """Write a cell that remembers the highest token that wrote it.

        Returns the token that stands afterwards: *token* when the write took place, a higher one
        when it was refused. Nothing is raised then: compare.
        """
        _check_cell(key, value, token)
        new = b"%d:" % token + value
        stands = self.get(key)
        while True:
            if stands is not None and (found := int(stands.partition(b":")[0])) > token:
                return found
            if stands == new:
                return token
            after = self.compare_and_set(key, stands, new)
            if after == new:
                return token
            stands = after

    def raise_fence(self, key: str, token: int) -> tuple[int, bytes]:
        """Refuse lower tokens in a fenced cell from now on, and keep its value.

        Returns the token that stands afterwards, higher than *token* when that was refused, and the
        value, empty where none was ever written.
        """
        _check_cell(key, b"", token)
        stands = self.get(key)
        while True:
            head, _, value = (stands or b"0:").partition(b":")
            if int(head) >= token:
                return int(head), value
            after = self.compare_and_set(key, stands, b"%d:" % token + value)
            if after == b"%d:" % token + value:
                return token, value
            stands = after

    def read_fenced(self, key: str) -> tuple[int, bytes] | None:
        """The token and value of a cell written by :meth:`write_fenced`, or None."""
        stands = self.get(key)
        if stands is None:
            return None
        token, _, value = stands.partition(b":")
        return int(token), value


MAX_NAME = 512


def check_name(what: str, name: str) -> str:
    """Refuse a name that no backend could keep: *what* says what it names."""
    if not isinstance(name, str):
        raise BackendMisconfigured(f"{what} is {name!r}, a {type(name).__name__}; expected text")
    if not name or not name.isprintable() or len(name.encode()) > MAX_NAME:
        shown = name if len(name) <= 40 else f"{name[:40]}... ({len(name.encode())} bytes)"
        raise BackendMisconfigured(
            f"{what} is {shown!r}; expected 1 to {MAX_NAME} bytes of printable UTF-8 "
            "(spaces and slashes may be used)"
        )
    return name


def _check_cell(key: str, value: bytes, token: int = 0) -> None:
    """Refuse a key or value that no backend could keep, and a token that could not be compared."""
    check_name("cell key", key)
    if not isinstance(value, bytes):
        raise BackendMisconfigured(f"cell {key!r}: value is a {type(value).__name__}; expected bytes")
    if type(token) is not int:
        raise BackendMisconfigured(f"cell {key!r}: token is {token!r}; expected the int of a grant")


def connect(url: str, **options: Any) -> Backend:
    """Open the backend that *url* names; the caller closes it.

    ``redis://h:6379/0``, ``rediss://``, ``unix://``, ``etcd://h1:2379,h2:2379``, ``etcds://``,
    ``tcpstore://h:p``, ``tcpstore://:0?serve=1``, ``memory://name``, and what installed packages add
    through the entry-point group ``dprims.backends``. Raises :class:`BackendMisconfigured` for a URL
    that cannot work and :class:`BackendUnavailable` when nothing answers.
    """
    return _load(check_url(url))(url, **options)


def check_url(url: object) -> str:
    """The scheme of a URL that names a backend; what else it may be is seen when it is opened.

    Raises BackendMisconfigured, which shows no more than the scheme where that is unknown: the rest may have
    a password.
    """
    if not isinstance(url, str) or "://" not in url:
        raise BackendMisconfigured(
            f"backend URL is {url!r}; expected scheme://..., one of {', '.join(schemes())}"
        )
    scheme = split_url(url).scheme
    _place_of(scheme)
    return scheme


def check_shared(backend: Backend, whose: str) -> None:
    """Refuse a backend that no other process sees, for ranks that are in others."""
    if backend.guarantees.scope == "process":
        raise BackendMisconfigured(
            f"backend is {backend.url or backend!r}, which is seen by the threads of one process alone; the "
            f"ranks of {whose} are in others: use redis://, etcd:// or tcpstore://"
        )


def split_url(url: str) -> SplitResult:
    """The parts of a backend's URL; never raises.

    urllib's own splitter does the same, but newer releases refuse a list of hosts with an IPv6 one in it.
    """
    scheme, _, rest = url.partition("://")
    rest, _, fragment = rest.partition("#")
    rest, _, query = rest.partition("?")
    netloc, slash, path = rest.partition("/")
    return SplitResult(scheme.lower(), netloc, slash + path, query, fragment)


def schemes() -> list[str]:
    """The URL schemes that :func:`connect` understands, sorted."""
    return sorted({*_BUILT_IN, *_installed()})


def resolve(backend: object) -> Backend:
    """The backend meant by what a caller passed: a Backend, a URL, a torch Store, a client, or None.

    None means ``$DPRIMS_BACKEND``, else the store of torch's default process group. The same URL or
    object gives the same backend in one process, so that its locks share one session.
    """
    if isinstance(backend, Backend):
        return backend
    if backend is None:
        backend = _default()
    if isinstance(backend, str):
        return _shared(backend, lambda: connect(backend))
    for base in type(backend).__mro__:
        scheme = _BY_PACKAGE.get(base.__module__.partition(".")[0])
        if scheme is not None:
            return _shared(id(backend), partial(_load(scheme), client=backend))
    raise BackendMisconfigured(
        f"backend is a {type(backend).__name__}; expected None, a URL, a torch Store, "
        "a redis or etcd3 client, or a Backend"
    )


@dataclass
class _Shared:
    """The backends that :func:`resolve` opened for this process."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    open: dict[object, Backend] = field(default_factory=dict)
    pid: int = field(default_factory=os.getpid)


_SHARED = _Shared()


def _shared(key: object, make: Callable[[], Backend]) -> Backend:
    global _SHARED
    if _SHARED.pid != os.getpid():  # a forked child opens its own
        _SHARED = _Shared()
    with _SHARED.lock:
        if key not in _SHARED.open:
            _SHARED.open[key] = make()  # keeps a client that was passed in alive, and so its id
        return _SHARED.open[key]


def _forget(backend: Backend) -> None:
    with _SHARED.lock:
        for key in [key for key, shared in _SHARED.open.items() if shared is backend]:
            del _SHARED.open[key]


@atexit.register
def _close_shared() -> None:
    if _SHARED.pid == os.getpid():
        for backend in list(_SHARED.open.values()):
            try:
                backend.close()
            except Exception:  # noqa: BLE001 - the process is ending; the ttl frees what could not be given back
                continue


def _default() -> object:
    import sys

    if url := os.environ.get(ENVIRONMENT):
        return url
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    raise BackendMisconfigured(
        f"no backend given: pass backend=URL, set ${ENVIRONMENT}, or initialise torch.distributed first"
    )


def _installed() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def _place_of(scheme: str) -> str:
    """Where the backend of a scheme is, as module:name. Raises BackendMisconfigured for one unknown."""
    place = _BUILT_IN.get(scheme) or _installed().get(scheme)
    if place is None:
        raise BackendMisconfigured(f"backend scheme is {scheme!r}; expected one of {', '.join(schemes())}")
    return place


def _load(scheme: str) -> Callable[..., Backend]:
    module, _, name = _place_of(scheme).partition(":")
    loaded: Callable[..., Backend] = getattr(import_module(module), name)
    return loaded


def need(module: str, extra: str) -> Any:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingExtra(f"{module} is not installed; pip install 'dprims[{extra}]'") from error
