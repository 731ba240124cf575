"""A backend: whether it can be reached, how quick it is, what it promises, how its server is set up."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from .facts import BackendFacts, Reach
from .findings import Finding, find

HIGH_S = 0.05
"""A round trip that takes longer is felt in every lock."""
CLOCK_OFF_S = 5.0
REDIS_LEAST = (6, 0, 6)

_REACH = {"name": "name-unknown", "refused": "refused", "missing": "socket-missing"}
_ERRORS = {
    "BackendUnavailable": "silent",
    "hung": "silent",
    "BackendMisconfigured": "rejected",
    "MissingExtra": "extra-needed",
}

_WORDS = {"no leader": "etcd-no-leader", "database space exceeded": "etcd-full"}
"""What a server says of itself in the words of an error."""


def check_backend(backend: BackendFacts | None) -> Iterator[Finding]:
    """Everything about a backend."""
    if backend is None:
        yield find("backend-none")
        return
    for reach in backend.reach:
        if reach.error:
            yield _unreached(backend, reach)
    if backend.error:
        if any(not one.error for one in backend.reach) or not backend.reach:
            code = _ERRORS.get(backend.error_type, "failed")
            code = next((known for words, known in _WORDS.items() if words in backend.error), code)
            yield find(code, url=backend.url, error=backend.error, alarm="NOSPACE")
        return
    if not backend.guarantees:  # it was not even tried: nothing of it can be reached
        return
    version = f", version {backend.version}" if backend.version else ""
    yield find("backend-ok", url=backend.url, version=version)
    if backend.guarantees["scope"] == "process":
        yield find("process-only", url=backend.url)
    yield from _latency(backend)
    if backend.lock_error:
        yield find("backend-lock-fails", error=backend.lock_error)
    elif backend.lock_s is not None:
        yield find("backend-lock", ms=backend.lock_s * 1e3)
    yield from _guarantees(backend)
    yield from _clock(backend)
    yield from _redis(backend)
    yield from _etcd(backend)


def _unreached(backend: BackendFacts, reach: Reach) -> Finding:
    return find(
        _REACH.get(reach.error, "unreachable"),
        url=backend.url,
        host=reach.host,
        port=reach.port,
        error=reach.words,
    )


def _latency(backend: BackendFacts) -> Iterator[Finding]:
    if not backend.round_trips_s:
        return
    middle, most = statistics.median(backend.round_trips_s), max(backend.round_trips_s)
    code = "latency-high" if middle > HIGH_S else "latency-ok"
    yield find(code, ms=middle * 1e3, most=most * 1e3, count=len(backend.round_trips_s))


def _guarantees(backend: BackendFacts) -> Iterator[Finding]:
    known = backend.guarantees
    yield find(
        "backend-guarantees",
        scope="every host that reaches it" if known["scope"] == "hosts" else "one process",
        survives="yes" if known["survives_restart"] else "no",
        tokens="yes" if known["tokens_survive_restart"] else "no",
        min_ttl=known["min_ttl"],
        killed=known["detects_killed_holder"],
        clock=known["clock"],
    )
    yield find("backend-limits", limits=known["limits"])


def _clock(backend: BackendFacts) -> Iterator[Finding]:
    off = backend.clock_off_s
    if off is None:
        yield find("clock-none")
    elif abs(off) - backend.clock_error_s > CLOCK_OFF_S:
        yield find("clock-off", seconds=off)
    else:
        yield find("clock-ok", seconds=off, error=backend.clock_error_s)


def _redis(backend: BackendFacts) -> Iterator[Finding]:
    settings = backend.settings
    if settings.get("server") != "redis":
        return
    numbers = tuple(int(part) for part in backend.version.split(".") if part.isdecimal())
    if numbers and numbers < REDIS_LEAST:
        yield find("redis-old", version=backend.version)
    if settings.get("role") == "slave":
        yield find("redis-replica", master=settings.get("master", "another server"))
    if settings.get("maxmemory", "0") != "0" and settings.get("maxmemory_policy") != "noeviction":
        yield find("redis-evicts", policy=settings.get("maxmemory_policy"))
    if settings.get("aof_enabled") == "0":
        yield find("redis-forgets")


def _etcd(backend: BackendFacts) -> Iterator[Finding]:
    settings = backend.settings
    if settings.get("server") != "etcd":
        return
    if settings.get("leader") == "none":
        yield find("etcd-no-leader", error="the member that was asked knows none")
    for alarm in filter(None, settings.get("alarms", "").split(",")):
        yield find("etcd-full", alarm=alarm)
