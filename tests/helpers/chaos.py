"""A history of a lock under random faults, and what must be true of it.

Workers take the lock again and again, each in a process of its own, while it is frozen, killed and cut
off at random. In each critical section a worker writes its token to a fenced register, and samples for
how long its grant says that it is not lost. All clocks are the host's monotonic one, so the sections can
be compared.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import dprims
from dprims import BackendError, BackendUnavailable, LockError

from .services import LIMIT_S, process_state, until

HOLD_S, REST_S = 0.02, 0.01


class Cutter:
    """A TCP relay in front of a server; :meth:`cut` breaks every connection through it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        for pair in list(self._pairs):
            for side in pair:
                with suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._thread.join(LIMIT_S)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            self._pairs.add(pair := (client, server))
            try:
                while True:
                    for side in select.select(pair, [], [])[0]:
                        if not (data := side.recv(65536)):
                            return
                        (server if side is client else client).sendall(data)
            finally:
                self._pairs.discard(pair)


@dataclass
class Section:
    """One critical section: its token, and between when its worker knows that it was not lost."""

    worker: int
    token: int
    begin: float
    end: float


@dataclass
class Register:
    """The fenced resource: it takes a token that is not lower than any before."""

    highest: int = 0
    accepted: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, token: int) -> bool:
        with self.lock:
            if token < self.highest:
                return False
            self.highest = token
            self.accepted.append(token)
            return True


@dataclass
class Worker:
    """One process that takes the lock again and again, and what it has told."""

    number: int
    process: Any
    sections: list[Section] = field(default_factory=list)
    refused_unlost: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    frozen_until: float = 0.0

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


class History:
    """Workers on one lock, the register that they write to, and the faults that befall them."""

    def __init__(self, url: str, ttl: float, workers: int, seed: int) -> None:
        self.url, self.ttl, self.random = url, ttl, random.Random(seed)
        self.register = Register()
        self.workers: list[Worker] = []
        self.log: list[str] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed"])
        self._readers: list[threading.Thread] = []
        self._name = f"chaos-{seed}-{os.getpid()}-{time.monotonic_ns()}"
        self._active = [self.spawn() for _ in range(workers)]

    def spawn(self) -> Worker:
        ours, theirs = self._context.Pipe()
        args = (self.url, self._name, self.ttl, self.random.randrange(1 << 30), theirs)
        process = self._context.Process(target=_work, args=args, daemon=True)
        process.start()
        theirs.close()
        worker = Worker(len(self.workers), process)
        self.workers.append(worker)
        self._readers.append(threading.Thread(target=self._read, args=(worker, ours), daemon=True))
        self._readers[-1].start()
        return worker

    def _read(self, worker: Worker, pipe: Connection) -> None:
        with suppress(EOFError, OSError), pipe:
            while True:
                kind, *told = pipe.recv()
                if kind == "write":
                    pipe.send(self.register.write(told[0]))
                elif kind == "refused":
                    worker.refused_unlost.append(told[0])
                elif kind == "error":
                    worker.errors.append(told[0])
                elif worker.sections and worker.sections[-1].token == told[0]:
                    worker.sections[-1].end = told[1]
                else:
                    worker.sections.append(Section(worker.number, told[0], told[1], told[1]))

    def run(self, seconds: float, faults: dict[str, float], server: Any = None, cutter: Any = None) -> None:
        """Let faults happen for *seconds*, each kind as often a second as *faults* says."""
        end = time.monotonic() + seconds
        thaw_server = 0.0
        while (now := time.monotonic()) < end:
            for worker in self._active:
                if worker.frozen_until and now >= worker.frozen_until:
                    worker.frozen_until = 0.0
                    worker.signal(signal.SIGCONT)
            if "restart" in faults and not server.running:  # etcd 3.5.1 panics now and then after a restart
                self._revive(server, now)
                thaw_server = 0.0
            if thaw_server and now >= thaw_server:
                thaw_server = 0.0
                server.thaw()
            for kind, rate in faults.items():
                happens = self.random.random() < rate * 0.02
                if happens and not (thaw_server and kind in ("stall", "restart")):
                    thaw_server = self._inflict(kind, now, server, cutter) or thaw_server
            time.sleep(0.02)
        if "restart" in faults and not server.running:
            self._revive(server, end)
        elif thaw_server:
            server.thaw()
        for worker in self._active:
            worker.signal(signal.SIGCONT)

    def _revive(self, server: Any, now: float) -> None:
        said = server.log
        self.log.append(f"{now:.3f} the server ended by itself: {said[said.rfind('panic:') :][:2000]}")
        print(self.log[-1])
        server.kill()
        server.start()

    def _inflict(self, kind: str, now: float, server: Any, cutter: Any) -> float:
        i = self.random.randrange(len(self._active))
        worker = self._active[i]
        self.log.append(f"{now:.3f} {kind} {worker.number if kind in ('kill', 'freeze') else ''}")
        if kind == "kill":
            worker.process.kill()
            worker.process.join(LIMIT_S)
            self._active[i] = self.spawn()
        elif kind == "freeze":
            worker.signal(signal.SIGSTOP)
            worker.frozen_until = now + self.random.uniform(0.2, 2.5) * self.ttl
        elif kind == "cut":
            cutter.cut()
        elif kind == "restart":
            server.kill()
            server.start()
        elif kind == "stall":
            try:
                server.freeze()
            except BackendUnavailable:  # it has ended by itself
                return 0.0
            return now + self.random.uniform(0.1, 1.5) * self.ttl
        return 0.0

    def settle(self) -> None:
        """Wait until each survivor has had the lock anew, without faults."""
        seen = {worker.number: len(worker.sections) for worker in self._active}
        for worker in self._active:
            until(lambda w=worker: process_state(w.process.pid) not in "Tt", "a thawed worker")
            until(
                lambda w=worker: len(w.sections) > seen[w.number] + 1,
                f"progress of worker {worker.number} after the faults: {worker.errors[-3:]}",
                LIMIT_S + 4 * self.ttl,
            )

    def close(self) -> None:
        for worker in self._active:
            worker.process.kill()
            worker.process.join(LIMIT_S)
        for reader in self._readers:
            reader.join(LIMIT_S)

    def check(self) -> int:
        """Assert what the lock promises; return how many sections there were."""
        assert self.register.accepted == sorted(self.register.accepted), "accepted tokens go back"
        for worker in self.workers:
            assert not worker.refused_unlost, f"tokens refused though not lost: {worker.refused_unlost}"
        sections = sorted((s for w in self.workers for s in w.sections), key=lambda s: s.begin)
        for before, after in pairwise(sections):
            assert before.end < after.begin, f"{before} and {after} overlap, both not lost; {self.log[-20:]}"
            assert before.token < after.token, f"{after} follows {before}"
        return len(sections)


def _work(url: str, name: str, ttl: float, seed: int, pipe: Connection) -> None:
    chance = random.Random(seed)
    backend: dprims.Backend | None = None
    while True:
        try:
            if backend is None:
                backend = dprims.connect(url)
            lock = dprims.DistributedLock(name, backend, ttl=ttl)
            grant = lock.acquire(timeout=chance.choice([None, None, 5 * ttl, 0.05]))
            if grant is not None:
                _section(grant, HOLD_S * chance.uniform(0.1, 2), pipe)
                grant.release()
        except BackendUnavailable as error:
            pipe.send(("error", str(error)))
            if "another store" in str(error) and backend is not None:
                backend.close()
                backend = None
        except (LockError, BackendError) as error:
            pipe.send(("error", str(error)))
        time.sleep(REST_S * chance.random())


def _section(grant: dprims.Grant, hold: float, pipe: Connection) -> None:
    end = time.monotonic() + hold
    if not _told(grant, pipe):
        return
    pipe.send(("write", grant.token))
    accepted = pipe.recv()
    if not accepted and not grant.lost:
        pipe.send(("refused", grant.token))
    while _told(grant, pipe) and time.monotonic() < end:
        time.sleep(0.002)


def _told(grant: dprims.Grant, pipe: Connection) -> bool:
    """Report that the grant was good at this moment, if it was."""
    now = time.monotonic()  # before the look, so that it was not lost at this time
    if grant.lost:
        return False
    pipe.send(("held", grant.token, now))
    return True
