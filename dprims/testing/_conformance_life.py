"""Checks of life and death: a backend that is closed, processes that are killed, frozen and forked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from ..exceptions import BackendUnavailable, LockLost
from ..lock import DistributedLock
from ._conformance import Suite, done, expect, result, until


class LifeChecks(Suite):
    """What a backend owes to processes, also to those that end."""

    def test_close_gives_everything_back(self) -> None:
        """close releases what is held, leaves the queues, and ends every thread; it may be repeated."""
        before = set(threading.enumerate())
        mine = self._connect()
        lock = DistributedLock(self.name, mine, namespace="conformance", ttl=20 * self.ttl)
        expect(lock.acquire(0) is not None, "a free lock was not had")
        theirs = DistributedLock(self.name, self.b, namespace="conformance", ttl=20 * self.ttl)
        waiting = self._pool.submit(theirs.acquire, self.long_s)
        self._wait_for_waiters(theirs, 1)
        mine.close()
        mine.close()
        expect(result(waiting, self.patience_s, "a waiter after close") is not None, "close kept the lock")
        theirs.release()
        self.b.close()

        def left() -> list[str]:
            new = set(threading.enumerate()) - before
            return [thread.name for thread in new if not thread.name.startswith("conformance")]

        until(lambda: not left(), self.patience_s, f"the end of the closed backends' threads {left()}")

    def test_a_closed_backend_is_of_no_use(self) -> None:
        """After close every call that asks for something raises BackendUnavailable, also one that waits.

        Left out for a suite that does not say ``refuses_after_close``.
        """
        if not self.refuses_after_close:
            return
        mine = self._connect()
        expect(self._join_for_long(self.b).held, "a free lock was not had")
        lock = DistributedLock(self.name, mine, namespace="conformance", ttl=self.ttl)
        waits: list[Future[bytes | bool | None]] = [
            self._pool.submit(mine.wait, self._name("nobody writes it"), self.long_s),
            self._pool.submit(mine.await_turn, self._join_for_long(mine), self.long_s),
        ]
        mine.close()
        for wait in waits:
            expect(done(wait, self.patience_s), "a wait outlasts close")
        expect(isinstance(waits[0].exception(), BackendUnavailable), "a wait for a cell ended quietly")
        expect(waits[1].exception() is not None or not waits[1].result(), "a closed backend gave a lock")
        calls: dict[str, Callable[[], object]] = {
            "acquire": lambda: lock.acquire(0),
            "queue": lambda: mine.queue(self.name),
            "held": lambda: mine.held(self.name),
            "get": lambda: mine.get(self._name("cell")),
            "compare_and_set": lambda: mine.compare_and_set(self._name("cell"), None, b"1"),
            "wait": lambda: mine.wait(self._name("cell"), 0),
        }
        for what, call in calls.items():
            asked = self._pool.submit(call)
            expect(done(asked, self.patience_s), f"{what} on a closed backend: nothing")
            expect(isinstance(asked.exception(), BackendUnavailable), f"{what} works on a closed backend")
        expect(self.b.get(self._name("cell")) is None, "a closed backend wrote a cell")

    def test_killed_holder_and_waiters(self) -> None:
        """When holder and waiters are killed, the next live waiter is in after one ttl."""
        if not (processes := self._spawn(3)):
            return
        self._line_up(processes)
        lock = self._lock()
        waiting = self._pool.submit(lock.acquire, self.long_s)
        self._wait_for_waiters(lock, 3)
        for process in reversed(processes):
            process.kill()
        expect(
            result(waiting, self.lapse_s, "the next after three that were killed") is not None, "not let in"
        )
        lock.release()

    def test_frozen_holder_and_waiter(self) -> None:
        """A frozen holder loses the lock and knows it once thawed; a frozen waiter queues again."""
        if not (processes := self._spawn(2)):
            return
        tokens = self._line_up(processes)
        for process in processes:
            process.freeze()
        lock = self._lock()
        grant = lock.acquire(self.lapse_s)
        expect(grant is not None, f"frozen processes block the queue for {self.lapse_s} s")
        for process in processes:
            process.thaw()
        holder = processes[0]
        lost = result(holder.lost(self.name), self.patience_s, "an answer of the thawed holder")
        expect(lost, "a holder that was frozen for its ttl does not know that the lock is lost")
        told = result(holder.reported(self.name), self.patience_s, "on_lost of the thawed holder")
        expect(told == tokens[0].result(), "on_lost was called with another grant")
        expect(
            isinstance(holder.release(self.name).exception(self.patience_s), LockLost),
            "release of a lost lock did not raise LockLost",
        )
        expect(not done(tokens[1], self.ttl), "a thawed waiter holds the lock beside its holder")
        if grant is not None:
            grant.verify()
        lock.release()
        token = result(tokens[1], self.patience_s, "the thawed waiter")
        expect(grant is not None and (token or 0) > grant.token, "the thawed waiter's token is not larger")

    def test_forked_child(self) -> None:
        """A forked child does not hold its parent's lock, cannot release it, and can lock for itself."""
        if not (processes := self._spawn(1)):
            return
        self._line_up(processes)
        saw = result(processes[0].fork(self.name, self.ttl), 4 * self.patience_s, "the forked child")
        expect("error" not in saw, f"the child's own lock failed: {saw.get('error')}")
        expect(
            saw["lost"] is True and saw["released"] is not True, f"the child uses its parent's lock: {saw}"
        )
        expect(saw["taken"] is None, "the child was given the lock that its parent holds")
        expect(saw["own"] is not None, "the child could not lock for itself")
        lost = result(processes[0].lost(self.name), self.patience_s, "an answer of the parent")
        expect(not lost, "the fork cost the parent its lock")
        result(processes[0].release(self.name), self.patience_s, "the parent's release")
