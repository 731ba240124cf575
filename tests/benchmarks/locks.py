"""Our locks beside others, on the same servers, in one run. Run: python tests/benchmarks/locks.py

Prints tables in markdown, then each bound with what was measured, and exits 1 when one is exceeded.
Others take part when they are installed (best in an environment of their own):
pip install python-redis-lock pottery tooz etcd3gw etcd3-fc. ``--write FILE`` puts the tables into a file.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import multiprocessing
import os
import platform
import select
import socket
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for pytest, which does not

from lock_contestants import CONTESTANTS, Contestant, ours

import dprims
from dprims.testing.servers import EtcdServer, RedisServer

# -- under contention -------------------------------------------------------------------------------

Hold = tuple[float, float, float]
"""When it was asked for, begun and ended, on the clock that all processes share."""


@dataclass(frozen=True)
class Contended:
    """What a number of processes saw that all want one lock all the time."""

    holds: list[list[Hold]]
    hold_s: float

    @property
    def counts(self) -> list[int]:
        return [len(one) for one in self.holds]

    @property
    def fairness(self) -> float:
        """Jain's index: 1 when all had it equally often, 1/n when one had it alone."""
        return sum(self.counts) ** 2 / (len(self.counts) * sum(count**2 for count in self.counts))

    @property
    def waits(self) -> list[float]:
        return sorted(begun - asked for one in self.holds for asked, begun, _ in one)

    @property
    def hand_overs(self) -> list[float]:
        """From the end of one hold to the start of the next, where that is another process's."""
        holds = sorted((begun, ended, who) for who, one in enumerate(self.holds) for _, begun, ended in one)
        return sorted(b[0] - a[1] for a, b in pairwise(holds) if a[2] != b[2])

    @property
    def ideal_wait(self) -> float:
        return len(self.counts) * (self.hold_s + statistics.median(self.hand_overs or [0.0]))


def contend(entry: Contestant, url: str, processes: int, hold_s: float, seconds: float) -> Contended:
    context = multiprocessing.get_context("spawn")
    results, together = context.SimpleQueue(), context.Barrier(processes)
    workers = [
        context.Process(
            target=_contender, args=(CONTESTANTS.index(entry), url, hold_s, seconds, together, results)
        )
        for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    holds = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    return Contended(holds, hold_s)


def _contender(entry: int, url: str, hold_s: float, seconds: float, together: Any, results: Any) -> None:
    acquire, release = CONTESTANTS[entry].make(url)
    holds: list[Hold] = []
    together.wait(120)
    until = time.monotonic() + seconds
    while (asked := time.monotonic()) < until:
        acquire()
        begun = time.monotonic()
        time.sleep(hold_s)
        ended = time.monotonic()
        release()
        holds.append((asked, begun, ended))
    results.put([hold for hold in holds if hold[1] < until])
    os._exit(0)  # without what peers do at exit


# -- alone ------------------------------------------------------------------------------------------


def alone(entry: Contestant, url: str) -> tuple[float, float]:
    """Seconds per acquire and release of ours and of *entry*, which take turns in a process of their own."""
    context = multiprocessing.get_context("spawn")
    result = context.SimpleQueue()
    process = context.Process(target=_take_turns, args=(CONTESTANTS.index(entry), url, result))
    process.start()
    spent: tuple[float, float] = result.get()
    process.join()
    return spent


def _take_turns(entry: int, url: str, result: Any, rounds: int = 150, pairs: int = 20) -> None:
    ready = [ours(url), CONTESTANTS[entry].make(url)]
    best = [math.inf, math.inf]
    for turn in range(2 * rounds):
        acquire, release = ready[turn % 2]
        began = time.perf_counter()
        for _ in range(pairs):
            acquire()
            release()
        best[turn % 2] = min(best[turn % 2], (time.perf_counter() - began) / pairs)
    result.put(tuple(best))
    os._exit(0)  # without what peers do at exit


# -- work at the server -----------------------------------------------------------------------------


def work(entry: Contestant, url: str, count: Callable[[], int], waiters: int) -> float:
    """What *count* counts, per acquire and release, while *waiters* threads wait."""
    each = max(256 // (waiters + 1), 4)
    ready, go = threading.Barrier(waiters + 2), threading.Event()

    def worker() -> None:
        acquire, release = entry.make(url)
        for n in range(each + 1):
            acquire()
            release()
            if not n:  # connections are open, scripts are loaded
                ready.wait(120)
                go.wait(120)

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(waiters + 1)]
    for thread in threads:
        thread.start()
    ready.wait(120)
    before = count()
    go.set()
    for thread in threads:
        thread.join(120)
    return (count() - before) / (each * len(threads))


def redis_commands(url: str) -> Callable[[], int]:
    """All commands that the server has run, those inside scripts too."""
    import redis

    client = redis.Redis.from_url(url)

    def count() -> int:
        stats = client.info("commandstats")
        connecting = ("info", "client|setinfo", "client|maint_notifications", "hello", "select", "auth")
        return sum(v["calls"] for k, v in stats.items() if k.removeprefix("cmdstat_") not in connecting)

    return count


def etcd_calls(url: str) -> Callable[[], int]:
    """All unary calls that the server has answered."""

    def count() -> int:
        address = url.replace("etcd://", "http://")
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        handled = [
            line for line in lines if line.startswith("grpc_server_handled_total") and '"unary"' in line
        ]
        return int(sum(float(line.rpartition(" ")[2]) for line in handled))

    return count


@contextmanager
def counting_proxy(url: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """A store's address by way of a proxy, and how often clients have spoken there."""
    host, port = url.removeprefix("tcpstore://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    spoken = [0]

    def serve(client: socket.socket) -> None:
        with client, socket.create_connection((host, int(port))) as server:
            while True:
                for side in select.select([client, server], [], [])[0]:
                    data = side.recv(65536)
                    if not data:
                        return
                    spoken[0] += side is client
                    (server if side is client else client).sendall(data)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"tcpstore://127.0.0.1:{listener.getsockname()[1]}", lambda: spoken[0]
    finally:
        listener.close()


# -- the whole --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """What is asked for, and what was measured."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return (
            f"- {'holds' if self.holds else 'FAILS'}: {self.what}: {self.value:.3g} {sign} {self.limit:.3g}"
        )


def measure(
    servers: Sequence[str], processes: int, hold_s: float, seconds: float
) -> tuple[list[str], list[Bound]]:
    """The tables' lines, and the bounds."""
    lines: list[str] = []
    bounds: list[Bound] = []
    for server in servers:
        with ExitStack() as stack:
            url, count, proxied = _serve(server, stack)
            for opened in (url, proxied):
                stack.callback(lambda url: dprims.DistributedLock("bench", url).backend.close(), opened)
            here = [entry for entry in CONTESTANTS if entry.server == server and entry.here]
            away = [entry.name for entry in CONTESTANTS if entry.server == server and not entry.here]
            missing = f" Not installed: {', '.join(away)}." if away else ""
            lines += [f"## {server}", "", f"{ALONE}{missing}", ""]
            rows = []
            for entry in here[1:]:
                us, them = alone(entry, url)
                rows.append((entry.name, f"{1e6 * them:.0f}", f"{1e6 * us:.0f}", f"{us / them:.2f}"))
                if limit := PAIR_LIMITS.get(entry.name):
                    bounds.append(Bound(f"{server}: a pair, of {entry.name}'s", us / them, limit))
            lines += table(("", "us a pair", "dprims", "ratio"), rows)

            lines += [f"{processes} processes, each holding {1e3 * hold_s:.0f} ms, {seconds:g} s.", ""]
            seen = {entry.name: contend(entry, url, processes, hold_s, seconds) for entry in here}
            lines += table(CONTENDED, [(name, *_row(one)) for name, one in seen.items()])
            bounds += _bounds(server, seen)

            lines += [f"Work at the server for one acquire and release, in {WORK[server]}, by waiters.", ""]
            amounts = [work(here[0], proxied, count, waiters) for waiters in (0, 2, 8, 64)]
            lines += table(("waiters", "0", "2", "8", "64"), [("dprims", *(f"{one:.1f}" for one in amounts))])
            bounds.append(
                Bound(f"{server}: work with 64 waiters, of that with 2", amounts[3] / amounts[1], 1.1)
            )
            if server == "tcpstore":
                bounds.append(Bound("tcpstore: store operations of a pair", amounts[0], 8))
    return lines, bounds


ALONE = "Acquire and release by one process, the quickest of 150 rounds of 20; each takes turns with dprims."
PAIR_LIMITS = {"redis-py": 1.25, "etcd3-fc": 0.6}
CONTENDED = (
    "",
    "had",
    "least",
    "most",
    "fairness",
    "wait p50",
    "p99",
    "max ms",
    "hand-overs",
    "p50",
    "p99 ms",
)
WORK = {
    "redis": "commands, those inside scripts too",
    "etcd": "calls",
    "tcpstore": "messages to the store",
}


def _serve(server: str, stack: ExitStack) -> tuple[str, Callable[[], int], str]:
    """A server's URL, what counts its work, and the URL by which that is counted."""
    if server == "redis":
        url = stack.enter_context(RedisServer()).url
        return url, redis_commands(url), url
    if server == "etcd":
        url = stack.enter_context(EtcdServer(options=("--unsafe-no-fsync=false",))).url
        return url, etcd_calls(url), url
    url = stack.enter_context(dprims.connect("tcpstore://127.0.0.1:0?serve=1")).url
    proxied, count = stack.enter_context(counting_proxy(url))
    return url, count, proxied


def _row(one: Contended) -> list[str]:
    waits, hand_overs = one.waits, one.hand_overs
    quick = (statistics.median(hand_overs), _p99(hand_overs)) if hand_overs else ()
    return [
        *(str(count) for count in (sum(one.counts), min(one.counts), max(one.counts))),
        f"{one.fairness:.3f}",
        *(f"{1e3 * value:.0f}" for value in (statistics.median(waits), _p99(waits), waits[-1])),
        str(len(hand_overs)),
        *([f"{1e3 * value:.2f}" for value in quick] or ["", ""]),
    ]


def _bounds(server: str, seen: dict[str, Contended]) -> list[Bound]:
    us = seen["dprims"]
    slack = 0.05
    bounds = [
        Bound(f"{server}: fairness", us.fairness, 0.99, at_least=True),
        Bound(f"{server}: wait p99 in s", _p99(us.waits), 1.5 * us.ideal_wait + slack),
        Bound(f"{server}: longest wait in s", us.waits[-1], 2 * us.ideal_wait + slack),
    ]
    # who hands over only when a poll happens to hit the right moment looks quick
    enough = len(us.hand_overs) / 4
    peers = [one.hand_overs for one in seen.values() if one is not us and len(one.hand_overs) >= enough]
    if peers:
        best, best_p99 = min(map(statistics.median, peers)), min(map(_p99, peers))
        bounds += [
            Bound(f"{server}: hand-over p50 in ms", 1e3 * statistics.median(us.hand_overs), 1e3 * best),
            Bound(f"{server}: hand-over p99 in ms", 1e3 * _p99(us.hand_overs), 1e3 * best_p99),
        ]
    return bounds


def _p99(values: Sequence[float]) -> float:
    """Of sorted values."""
    return values[min(int(0.99 * len(values)), len(values) - 1)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows)] + [
        ""
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", default="redis,etcd,tcpstore")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--hold", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args(arguments)
    lines, bounds = measure(given.servers.split(","), given.processes, given.hold, given.seconds)
    text = "\n".join([HEAD.format(machine=_machine()), *lines, "## Bounds", "", *map(str, bounds), ""])
    if given.write:
        given.write.write_text(text)
    print(text)
    return 0 if all(bound.holds for bound in bounds) else 1


HEAD = """# Locks: speed

Repeat with `python tests/benchmarks/locks.py --write docs/benchmarks-locks.md`; peers take part when they are
installed (`pip install python-redis-lock pottery tooz etcd3gw etcd3-fc`). Compare numbers of one table
only: all contestants of a table met the same server in the same run. Redis keeps nothing on disk here, and
etcd waits for the disk.

{machine}
"""


def _machine() -> str:
    packages = ("redis", "python-redis-lock", "pottery", "tooz", "etcd3", "etcd3-fc", "etcd3gw", "torch")
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {', '.join(versions)}."


def test_the_bounds_hold() -> None:
    assert main([]) == 0


if __name__ == "__main__":
    sys.exit(main())
