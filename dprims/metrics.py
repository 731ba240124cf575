"""Prometheus metrics of locks and refits, for processes that ask for them (the extra ``metrics``).

::

    import dprims.metrics

    dprims.metrics.enable()  # once, in each process that locks or leads refits
    prometheus_client.start_http_server(9100)

Until :func:`enable` is called nothing is counted, and each place that could count looks at one variable.
Labels are few and bounded: never a holder, a lock's name, an epoch or a shard. ``docs/operating.md`` says
what each metric means.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .exceptions import DprimsError, MissingExtra

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["disable", "enable", "recorder"]

T = TypeVar("T")

LOCK_BUCKETS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    300,
    1800,
)
"""Bounds in seconds of the histograms of waits, holds and hand-overs."""
REFIT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
"""Bounds in seconds of the histograms of refits and outages."""
NAMES = 1024
"""Of how many locks the last release is remembered, for hand-overs."""


class Recorder:
    """Counts into one registry; made by :func:`enable`. Any thread may call it; nothing here blocks."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        try:
            import prometheus_client as prom
        except ModuleNotFoundError:
            raise MissingExtra("prometheus_client is not installed; pip install 'dprims[metrics]'") from None
        where: dict[str, Any] = {"registry": prom.REGISTRY if registry is None else registry}
        self._collectors: list[Any] = []
        self.registry = where["registry"]

        def made(kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
            self._collectors.append(collector := kind(f"dprims_{name}", text, labels, **where, **more))
            return collector

        lock = ("backend", "use")
        times, long = {"buckets": LOCK_BUCKETS}, {"buckets": REFIT_BUCKETS}
        self._wait = made(
            prom.Histogram,
            "lock_wait_seconds",
            "From asking for a lock to the answer",
            *lock,
            "outcome",
            **times,
        )
        self._hold = made(
            prom.Histogram, "lock_hold_seconds", "From having a lock to its release, or loss", *lock, **times
        )
        self._release = made(
            prom.Histogram, "lock_release_seconds", "Until the backend had passed the lock on", *lock, **times
        )
        self._hand_over = made(
            prom.Histogram,
            "lock_hand_over_seconds",
            "From a release to the next grant, both in this process",
            *lock,
            **times,
        )
        self._losses = made(prom.Counter, "lock_losses", "Locks that stopped being held unasked", *lock)
        self._renewals = made(
            prom.Counter, "lock_renewals", "Held locks renewed, or not, by a heartbeat", "backend", "outcome"
        )
        self._refits = made(prom.Counter, "refits", "Syncs by outcome: ok or the error", "fleet", "outcome")
        self._seconds = made(
            prom.Histogram, "refit_seconds", "A successful sync, dispatch to return", "fleet", **long
        )
        self._bytes = made(prom.Counter, "refit_bytes", "Bytes of weights sent, once each", "fleet")
        self._speed = made(prom.Gauge, "refit_gb_per_second", "Bytes over wire time, last sync", "fleet")
        self._outage = made(
            prom.Histogram,
            "refit_outage_seconds",
            "From the first failure of a sync to the sync that succeeded",
            "fleet",
            **long,
        )
        self._failing = made(prom.Gauge, "refit_failing", "1 while an outage lasts", "fleet")
        self._rebuilds = made(prom.Counter, "refit_rebuilds", "Builds of the weight groups", "fleet")
        self._term = made(prom.Gauge, "refit_epoch_term", "The leader's term, as near as a float", "fleet")
        self._build = made(prom.Gauge, "refit_epoch_build", "Builds within the term", "fleet")
        self._version = made(prom.Gauge, "refit_version", "Number of the version that is served", "fleet")
        self._stale = made(prom.Gauge, "refit_stale", "1 if the trainers' weights differ from it", "fleet")
        self._last = made(
            prom.Gauge, "refit_last_success_timestamp_seconds", "When a sync last succeeded", "fleet"
        )
        self._shards = made(prom.Gauge, "refit_shards", "Shards of the fleet, present or not", "fleet")
        self._absent = made(prom.Gauge, "refit_absent_shards", "Shards that do not serve it", "fleet")
        self._released: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._mutex = threading.Lock()

    # -- locks --------------------------------------------------------------------------------------

    def waits(self, backend: str, name: str, full_name: str, acquire: Callable[[], T | None]) -> T | None:
        """Time *acquire*, which returns None when it was not had in time."""
        labels = _labels(backend, name)
        began = time.monotonic()
        outcome = "failed"
        try:
            grant = acquire()
            outcome = "timeout" if grant is None else "granted"
            return grant
        finally:
            now = time.monotonic()
            self._wait.labels(*labels, outcome).observe(now - began)
            if outcome == "granted":
                with self._mutex:
                    released = self._released.pop((backend, full_name), None)
                if released is not None and released > began:  # it was waited for
                    self._hand_over.labels(*labels).observe(now - released)

    def releases(self, backend: str, name: str, full_name: str, release: Callable[[], T]) -> T:
        """Time *release*, which passes the lock on."""
        began = time.monotonic()
        with self._mutex:
            self._released[backend, full_name] = began
            self._released.move_to_end((backend, full_name))
            if len(self._released) > NAMES:
                self._released.popitem(last=False)
        freed = release()
        self._release.labels(*_labels(backend, name)).observe(time.monotonic() - began)
        return freed

    def held(self, backend: str, name: str, seconds: float, *, lost: bool) -> None:
        """A holding is over."""
        labels = _labels(backend, name)
        self._hold.labels(*labels).observe(seconds)
        if lost:
            self._losses.labels(*labels).inc()

    def renewed(self, backend: str, locks: int, *, ok: bool) -> None:
        """A heartbeat proved this many held locks, or failed to."""
        self._renewals.labels(_scheme(backend), "ok" if ok else "failed").inc(locks)

    # -- refits -------------------------------------------------------------------------------------

    def leads(self, fleet: str, term: int, build: int, version: int, shards: int, serving: int) -> None:
        """How the fleet stands after an operation of its leader."""
        self._term.labels(fleet).set(term)
        self._build.labels(fleet).set(build)
        self._version.labels(fleet).set(version)
        self._shards.labels(fleet).set(shards)
        self._absent.labels(fleet).set(shards - serving)

    def synced(self, fleet: str, seconds: float, nbytes: int, gb_per_s: float) -> None:
        """A sync succeeded."""
        self._refits.labels(fleet, "ok").inc()
        self._seconds.labels(fleet).observe(seconds)
        self._bytes.labels(fleet).inc(nbytes)
        self._speed.labels(fleet).set(gb_per_s)
        self._last.labels(fleet).set_to_current_time()

    def failed(self, fleet: str, error: BaseException) -> None:
        """A sync failed; an error that is none of dprims' own counts as ``other``."""
        self._refits.labels(fleet, type(error).__name__ if isinstance(error, DprimsError) else "other").inc()

    def failing(self, fleet: str, outage_s: float | None) -> None:
        """An outage has begun (None), or is over after so many seconds."""
        self._failing.labels(fleet).set(outage_s is None)
        if outage_s is not None:
            self._outage.labels(fleet).observe(outage_s)

    def rebuilt(self, fleet: str) -> None:
        """Weight groups were built."""
        self._rebuilds.labels(fleet).inc()

    def stale(self, fleet: str, stale: bool) -> None:
        """Whether the trainers' weights differ from what the fleet serves."""
        self._stale.labels(fleet).set(stale)

    def unregister(self) -> None:
        """Take all metrics out of the registry."""
        for collector in self._collectors:
            self.registry.unregister(collector)


recorder: Recorder | None = None
"""Who counts in this process; None until :func:`enable`."""


def enable(registry: CollectorRegistry | None = None) -> Recorder:
    """Count from now on in this process, into *registry* (None: prometheus-client's default one).

    A second call with the same registry changes nothing, with another one it moves there. Locks that are
    held already are counted when they end. MissingExtra without prometheus-client. A forked child counts
    into its own copy.
    """
    global recorder
    if recorder is not None:
        if registry is None or registry is recorder.registry:
            return recorder
        disable()
    recorder = Recorder(registry)
    return recorder


def disable() -> None:
    """Count no more, and take the metrics out of their registry."""
    global recorder
    old, recorder = recorder, None
    if old is not None:
        old.unregister()


def _labels(backend: str, name: str) -> tuple[str, str]:
    """The scheme of a backend's URL, and whether a lock is an entry of a roster."""
    return _scheme(backend), "roster" if name.startswith("roster/") else "lock"


def _scheme(backend: str) -> str:
    return backend.partition("://")[0] if "://" in backend else "other"
