"""What a backend must do, as checks that run against any: ours, and yours.

With pytest::

    from dprims.testing.backend_conformance import BackendConformance


    class TestMyBackend(BackendConformance):
        def make_backend(self):
            return MyBackend("mine://localhost")

Without: ``failures(TestMyBackend)`` runs every check and returns what each failed one said.

The checks of one process always run; those with processes that are killed and frozen run when
``guarantees.scope`` is ``"hosts"``, and need the backend's ``url`` to lead other processes to the same
service. Every check uses names of its own, so a shared server will do. They take about half a minute
at the default ttl.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager
from typing import TypeVar

from ..backend import Backend, Ticket
from ..exceptions import LockLost
from ..lock import DistributedLock
from ..session import Session
from .lock_process import LockProcess

__all__ = ["BackendConformance", "checks", "failures"]

T = TypeVar("T")

RECORD = b'{"who": "\xc3\xa9", "raw": "\x00\xff\n"}'


class BackendConformance:
    """Subclass it, and say in :meth:`make_backend` how to connect."""

    ttl: float = 1.0
    """What the checks use, in seconds; raised to the backend's ``min_ttl``."""
    patience_s: float = 5.0
    """How much longer than it should anything may take before a check fails."""

    def make_backend(self) -> Backend:
        """A new backend object each time, connected to the same service; the checks close it."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to make a backend")

    # -- set-up ---------------------------------------------------------------------------------------

    def setup_method(self) -> None:
        """Before each check."""
        self._backends: list[Backend] = []
        self._processes: list[LockProcess] = []
        self._pool = ThreadPoolExecutor(32, thread_name_prefix="conformance")
        self._run = uuid.uuid4().hex[:8]
        self.a, self.b = self._connect(), self._connect()
        self.ttl = max(self.ttl, self.a.guarantees.min_ttl)
        self.lapse_s = self.ttl * 1.25 + self.patience_s
        self.long_s = 6 * self.patience_s  # of a wait that something else should end
        self.name = self._name("lock")

    def teardown_method(self) -> None:
        """After each check: nothing stays behind."""
        for process in self._processes:
            process.close()
        for backend in self._backends:
            backend.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    # -- queues ---------------------------------------------------------------------------------------

    def test_a_free_lock_is_had_at_once(self) -> None:
        """The first to ask holds it, under an int token."""
        ticket = self._join(self.a)
        _expect(ticket.held, "a ticket for a free lock is not held")
        _expect(type(ticket.token) is int, f"its token is {ticket.token!r}, not an int")
        _expect(not self._join(self.b).held, "a second ticket is held beside the first")

    def test_tokens_grow(self) -> None:
        """Each grant of a name has a larger token than the one before, whoever asks."""
        tokens = []
        for backend in (self.a, self.b, self.b, self.a):
            ticket = self._join(backend)
            tokens.append(ticket.token or 0)
            _expect(backend.release(ticket), "release of a held lock said it was not held")
        self.a.close()
        tokens.append(self._join(self.b).token or 0)
        _expect(tokens == sorted(set(tokens)), f"tokens do not grow: {tokens}")

    def test_first_come_first_served(self) -> None:
        """Waiters have the lock in the order in which they asked."""
        order = (self.a, self.b, self.a, self.b, self.a)
        queue = [self._join_for_long(backend) for backend in order]
        tokens = []
        for i, ticket in enumerate(queue):
            backend = (self.a, self.b)[i % 2]
            _expect(ticket.held or backend.await_turn(ticket, self.patience_s), f"waiter {i} is passed over")
            for later, other in list(enumerate(queue))[i + 1 :]:
                _expect(not (self.a, self.b)[later % 2].await_turn(other, 0), f"{later} is in with {i}")
            tokens.append(ticket.token or 0)
            backend.release(ticket)
        _expect(tokens == sorted(set(tokens)), f"tokens do not follow the queue: {tokens}")

    def test_a_wait_ends_when_its_time_is_up(self) -> None:
        """await_turn says no, not before its timeout, while another holds the lock."""
        with self._kept(self.a, self._join(self.a)), self._kept(self.b, self._join(self.b)) as waiter:
            start = time.monotonic()
            _expect(not self.b.await_turn(waiter, 0.2), "await_turn says yes while another holds the lock")
            took = time.monotonic() - start
            _expect(took >= 0.19, f"await_turn gave up after {took:.3f} s of 0.2 s")
            _expect(took < 0.2 + self.patience_s, f"await_turn took {took:.3f} s of 0.2 s")

    def test_a_release_wakes_the_next(self) -> None:
        """A waiter is woken by the release, long before its own time is up."""
        holder, waiter = self._join(self.a), self._join(self.b)
        with self._kept(self.a, holder), self._kept(self.b, waiter):
            turn = self._pool.submit(self.b.await_turn, waiter, self.long_s)
            _expect(not _done(turn, 0.2), "await_turn returned while another holds the lock")
            _expect(self.a.release(holder), "release of a held lock said it was not held")
            _expect(_result(turn, self.patience_s, "a waiter after the release"), "the next was not let in")

    def test_a_release_frees_what_is_its_own_alone(self) -> None:
        """A second release says no, and takes the lock from nobody."""
        first, second, third = (
            self._join_for_long(self.a),
            self._join_for_long(self.b),
            self._join_for_long(self.a),
        )
        self.a.release(first)
        _expect(self.b.await_turn(second, self.patience_s), "the second waiter was not let in")
        _expect(not self.a.release(first), "a second release of the same ticket says that it freed the lock")
        _expect(not self.a.await_turn(third, 0.1), "a second release took the lock from its new holder")
        self.b.beat([second], self.patience_s)
        _expect(second.held, "a second release took the lock from its new holder")
        _expect(self.b.release(second), "the new holder's release said it was not held")

    def test_who_leaves_is_passed_over(self) -> None:
        """A waiter that left is in nobody's way, and its own wait ends."""
        holder, leaver, last = (
            self._join_for_long(self.a),
            self._join_for_long(self.b),
            self._join_for_long(self.a),
        )
        with self._kept(self.b, leaver):
            waiting = self._pool.submit(self.b.await_turn, leaver, self.long_s)
            _expect(not _done(waiting, 0.1), "await_turn returned while another holds the lock")
            self.b.leave(leaver)
            _expect(not _result(waiting, self.patience_s, "await_turn after leave"), "it let in who had left")
        tokens = [place.token for place in self.a.queue(self.name)]
        _expect(tokens == [holder.token, None], f"after a leave the queue is {tokens}")
        self.a.release(holder)
        _expect(self.a.await_turn(last, self.patience_s), "a waiter stands behind one that has left")

    def test_leaving_when_the_lock_has_come_frees_it(self) -> None:
        """leave gives up the lock as well, when it was granted meanwhile."""
        holder, unaware, last = (
            self._join_for_long(self.a),
            self._join_for_long(self.b),
            self._join_for_long(self.a),
        )
        self.a.release(holder)
        self.b.leave(unaware)
        _expect(self.a.await_turn(last, self.patience_s), "who left took the lock along")

    def test_beats_prove(self) -> None:
        """A beat moves ``proven`` on for holders and waiters, in one call."""
        others = [self._join(self.a, self._name(f"other-{i}")) for i in range(20)]
        tickets = [self._join(self.a), *others, self._join(self.a)]
        before = self.a.clock()
        self.a.beat(tickets, self.patience_s)
        stale = [ticket.name for ticket in tickets if not before <= ticket.proven <= self.a.clock()]
        _expect(not stale, f"after a beat `proven` lies before it: {stale}")
        _expect(not any(ticket.gone for ticket in tickets), "a beat lost a ticket that nobody took")
        self.a.beat([], self.patience_s)

    def test_beats_keep_the_lock(self) -> None:
        """A holder that beats keeps the lock for longer than its ttl."""
        holder, waiter = self._join(self.a), self._join(self.b)
        with self._kept(self.a, holder), self._kept(self.b, waiter):
            _expect(not self.b.await_turn(waiter, self.ttl * 1.5), "the lock of a beating holder was taken")
            _expect(not Session.of(self.a).lost(holder), "a beating holder counts as lost")
            _expect(self.a.release(holder), "release of a held lock said it was not held")

    def test_a_silent_holder_lapses(self) -> None:
        """Who does not beat for its ttl loses the lock, and is told so."""
        holder, waiter = self._join(self.a), self._join(self.b)
        with self._kept(self.b, waiter):
            _expect(self.b.await_turn(waiter, self.lapse_s), f"a dead holder blocks for {self.lapse_s} s")
            _expect((waiter.token or 0) > (holder.token or 0), "the next holder's token is not larger")
            _expect(Session.of(self.a).lost(holder), "a holder silent for its ttl does not count as lost")
            self.a.beat([holder], self.patience_s)
            _expect(holder.gone, "a beat after the lapse does not see that the lock is gone")
            _expect(not self.a.release(holder), "a lapsed holder's release says that it freed the lock")
            _expect(self.b.await_turn(waiter, 0), "a lapsed holder's release took the lock from the next")

    def test_silent_waiters_lapse_all_at_once(self) -> None:
        """A chain of dead waiters costs one ttl, not one each."""
        for _ in range(5):
            self._join(self.a)
        waiter = self._join(self.b)
        with self._kept(self.b, waiter):
            start = time.monotonic()
            _expect(self.b.await_turn(waiter, 5 * self.ttl), "dead waiters block the queue")
            took = time.monotonic() - start
            _expect(took < max(self.lapse_s, 3.5 * self.ttl), f"five dead tickets took {took:.2f} s")

    def test_each_ticket_has_its_own_ttl(self) -> None:
        """Who is handed the lock has it for its own ttl, not for its predecessor's or successor's."""
        holder = self._join(self.a)
        patient = self._join(self.b, ttl=20 * self.ttl)
        waiter = self._join(self.a)
        self.a.release(holder)
        _expect(self.b.await_turn(patient, self.patience_s), "the second was not let in")
        with self._kept(self.a, waiter):
            _expect(
                not self.a.await_turn(waiter, 1.5 * self.ttl), "a ttl other than the holder's own was kept"
            )
        self.b.beat([patient], self.patience_s)
        _expect(patient.held, "a holder lost the lock before its own ttl was over")

    def test_a_wake_up_carries_no_authority(self) -> None:
        """Who sleeps over its turn does not hold the lock beside the next; it queues again, at the end."""
        holder, sleeper, next_one = self._join(self.a), self._join(self.b), self._join(self.a)
        self.a.release(holder)
        with self._kept(self.a, next_one):
            _expect(self.a.await_turn(next_one, self.lapse_s), "a sleeping waiter blocks the queue")
            with self._kept(self.b, sleeper):
                _expect(not self.b.await_turn(sleeper, 0.2), "a stale wake-up made a second holder")
                _expect(self.a.await_turn(next_one, 0), "a sleeper that woke took the lock from its holder")
                self.a.release(next_one)
                _expect(self.b.await_turn(sleeper, self.patience_s), "a sleeper that woke has no place left")
        _expect((sleeper.token or 0) > (next_one.token or 0), "its token is older than its predecessor's")

    def test_eviction(self) -> None:
        """evict ends the holding under one token, and no other."""
        holder, waiter = self._join(self.a), self._join(self.b)
        token = holder.token or 0
        with self._kept(self.b, waiter):
            _expect(not self.b.evict(self.name, token + 1), "evict under a token that is not the holder's")
            _expect(not self.b.evict(self._name("free"), token), "evict of a lock that nobody holds")
            self.a.beat([holder], self.patience_s)
            _expect(holder.held, "an eviction that said no took the lock")
            _expect(self.b.evict(self.name, token), "evict of the holder said no")
            _expect(self.b.await_turn(waiter, self.patience_s), "the next was not let in after the eviction")
            self.a.beat([holder], self.patience_s)
            _expect(holder.gone, "a beat does not see the eviction")
            _expect(not self.a.release(holder), "an evicted holder's release says that it freed the lock")
            _expect(self.b.await_turn(waiter, 0), "an evicted holder's release took the lock from the next")

    def test_the_queue_can_be_read(self) -> None:
        """queue and held say who holds what and who waits, in order, with their records."""
        other = self._name("lock/with/slashes é and spaces")
        _expect(self.b.queue(self.name) == [], "a queue nobody is in is not empty")
        holder = self._join(self.a, record=RECORD)
        waiters = [
            self._join(backend, record=b"%d" % i) for i, backend in enumerate((self.b, self.a, self.b))
        ]
        second = self._join(self.b, other)
        places = [(place.name, place.token, place.record) for place in self.b.queue(self.name)]
        expected = [(self.name, holder.token, RECORD)]
        expected += [(self.name, None, b"%d" % i) for i in range(len(waiters))]
        _expect(places == expected, f"the queue reads {places}, expected {expected}")
        held = [(place.name, place.token) for place in self.a.held(self._name(""))]
        both = [(self.name, holder.token), (other, second.token)]
        _expect(held == both, f"held reads {held}, expected {both}")
        _expect([p.name for p in self.a.held(other)] == [other], "held does not keep to its prefix")
        self.b.release(second)
        _expect(self.a.held(other) == [], "a released lock is still in held")

    def test_names_are_apart(self) -> None:
        """Locks whose names share a beginning, or look like parts of keys, do not meet."""
        names = [self._name(tail) for tail in ("x", "x/1", "x/s/1", "x ", "x:q", "x}", "{x", "é", "%", "*")]
        names.append(self._name("long").ljust(512, "n"))
        for name in names:
            _expect(self._join(self.a, name).held, f"{name!r} is not free, though nobody asked for it before")
        held = [place.name for place in self.b.held(self._name(""))]
        _expect(held == sorted(names), f"held reads {held}")

    def test_many_threads_share_one_backend(self) -> None:
        """Every call may be made from any thread; one holder at a time, and everybody gets in."""
        inside, overlaps, entered = [0], [0], [0]

        def work() -> None:
            for _ in range(5):
                ticket = self._join_for_long(self.a)
                if not ticket.held:
                    _expect(self.a.await_turn(ticket, 10 * self.patience_s), "a thread was never let in")
                inside[0] += 1
                overlaps[0] += inside[0] != 1
                entered[0] += 1
                inside[0] -= 1
                _expect(self.a.release(ticket), "release of a held lock said it was not held")

        for done in [self._pool.submit(work) for _ in range(16)]:
            _result(done, 20 * self.patience_s, "16 threads that take turns")
        _expect(overlaps[0] == 0, f"{overlaps[0]} times two threads held the lock together")
        _expect(entered[0] == 16 * 5, f"{entered[0]} entries counted, expected {16 * 5}")

    # -- cells ----------------------------------------------------------------------------------------

    def test_cells_are_written_once(self) -> None:
        """compare_and_set from nothing: one writer wins, the others read what stands."""
        key = self._name("cell")
        _expect(self.a.get(key) is None, "a cell nobody wrote has a value")
        got = _results(self._pool.submit(self._either(i).write_once, key, b"%d" % i) for i in range(12))
        _expect(len(set(got)) == 1, f"twelve writers of one cell read {set(got)}")
        _expect(self.a.get(key) == self.b.get(key) == got[0], "get does not read what stands")

    def test_cells_compare_and_set(self) -> None:
        """A value is written only where what was expected stands; what stands is returned."""
        key, cas = self._name("cell"), self.a.compare_and_set
        _expect(cas(key, b"x", b"y") is None, "a cell that is missing was said to have a value")
        _expect(self.b.get(key) is None, "a compare_and_set that expected a value wrote where there was none")
        _expect(
            cas(key, b"x", b"x") is None, "a missing cell was said to have the value it was compared with"
        )
        _expect(cas(key, None, b"one") == b"one", "a free cell was not written")
        _expect(cas(key, None, b"two") == b"one", "compare_and_set(None) did not return what stands")
        _expect(cas(key, b"two", b"three") == b"one", "a mismatch did not return what stands")
        _expect(self.b.get(key) == b"one", "a compare_and_set that should have failed wrote")
        _expect(self.b.compare_and_set(key, b"one", b"two") == b"two", "a match was not written")
        _expect(cas(key, b"two", b"two") == b"two", "a value was not equal to itself")
        for value in (b"", b"\x00\xff\n ", bytes(range(256)) * 256):
            _expect(cas(key, self.a.get(key), value) == value, f"{value[:8]!r}... was not written")
            _expect(self.b.get(key) == value, f"{value[:8]!r}... is read otherwise")
        self.a.delete(key)
        self.a.delete(key)
        _expect(self.b.get(key) is None, "a deleted cell has a value")
        _expect(cas(key, b"", b"x") is None, "a deleted cell was taken for an empty one")

    def test_cells_count(self) -> None:
        """No update is lost when many compare and set at once."""
        key = self._name("cell")
        self.a.write_once(key, b"0")

        def add(backend: Backend) -> None:
            stands = backend.get(key) or b""
            while True:
                mine = b"%d %s" % (int(stands.split()[0]) + 1, uuid.uuid4().hex.encode())
                after = backend.compare_and_set(key, stands, mine)
                if after == mine:
                    return
                stands = after or b""

        _results(self._pool.submit(add, self._either(i)) for i in range(24))
        total = (self.a.get(key) or b"").split()[0]
        _expect(total == b"24", f"24 increments made {total!r}")

    def test_cells_are_waited_for(self) -> None:
        """wait returns a value as soon as there is one, and None when its time is up, not before."""
        key = self._name("cell")
        start = time.monotonic()
        _expect(self.a.wait(key, 0.2) is None, "wait returned a value that nobody wrote")
        took = time.monotonic() - start
        _expect(0.19 <= took < 0.2 + self.patience_s, f"wait of 0.2 s took {took:.3f} s")
        waits = [self._pool.submit(self._either(i).wait, key, self.long_s) for i in range(6)]
        _expect(not _done(waits[0], 0.3), "wait returned before there was a value")
        _expect(self.a.get(key) is None, "a cell that is waited for has a value")
        _expect(self.a.compare_and_set(key, b"x", b"y") is None, "a cell that is waited for has a value")
        _expect(not _done(waits[0], 0.2), "wait returned before there was a value")
        self.a.write_once(key, b"")
        for wait in waits:
            value = _result(wait, self.patience_s, "wait, after the cell was written")
            _expect(value == b"", f"wait returned {value!r}, expected an empty value")
        _expect(self.b.wait(key, 0) == b"", "wait did not see a value that stands")
        self.b.delete(key)
        _expect(self.b.wait(key, 0.05) is None, "wait returned the value of a deleted cell")

    def test_fenced_cells_go_forward_only(self) -> None:
        """write_fenced refuses a token lower than the highest that wrote."""
        key = self._name("cell")
        _expect(self.a.read_fenced(key) is None, "a fenced cell that nobody wrote has a value")
        _expect(self.a.write_fenced(key, b"five", 5) == 5, "the first fenced write was refused")
        _expect(self.b.write_fenced(key, b"four", 4) == 5, "a lower token was not refused")
        _expect(self.b.write_fenced(key, b"five:again", 5) == 5, "the same token was refused")
        _expect(self.a.read_fenced(key) == (5, b"five:again"), "a fenced cell reads otherwise")
        _results(self._pool.submit(self._either(i).write_fenced, key, b"%d" % i, i) for i in range(20))
        _expect(
            self.a.read_fenced(key) == (19, b"19"),
            f"the highest token did not win: {self.a.read_fenced(key)}",
        )

    # -- life -----------------------------------------------------------------------------------------

    def test_close_gives_everything_back(self) -> None:
        """close releases what is held, leaves the queues, and ends every thread; it may be repeated."""
        before = set(threading.enumerate())
        mine = self._connect()
        lock = DistributedLock(self.name, mine, namespace="conformance", ttl=20 * self.ttl)
        _expect(lock.acquire(0) is not None, "a free lock was not had")
        theirs = DistributedLock(self.name, self.b, namespace="conformance", ttl=20 * self.ttl)
        waiting = self._pool.submit(theirs.acquire, self.long_s)
        self._wait_for_waiters(theirs, 1)
        mine.close()
        mine.close()
        _expect(_result(waiting, self.patience_s, "a waiter after close") is not None, "close kept the lock")
        theirs.release()
        self.b.close()

        def left() -> list[str]:
            new = set(threading.enumerate()) - before
            return [thread.name for thread in new if not thread.name.startswith("conformance")]

        _until(lambda: not left(), self.patience_s, f"the end of the closed backends' threads {left()}")

    # -- processes ------------------------------------------------------------------------------------

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
        _expect(
            _result(waiting, self.lapse_s, "the next after three that were killed") is not None, "not let in"
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
        _expect(grant is not None, f"frozen processes block the queue for {self.lapse_s} s")
        for process in processes:
            process.thaw()
        holder = processes[0]
        lost = _result(holder.lost(self.name), self.patience_s, "an answer of the thawed holder")
        _expect(lost, "a holder that was frozen for its ttl does not know that the lock is lost")
        told = _result(holder.reported(self.name), self.patience_s, "on_lost of the thawed holder")
        _expect(told == tokens[0].result(), "on_lost was called with another grant")
        _expect(
            isinstance(holder.release(self.name).exception(self.patience_s), LockLost),
            "release of a lost lock did not raise LockLost",
        )
        _expect(not _done(tokens[1], self.ttl), "a thawed waiter holds the lock beside its holder")
        if grant is not None:
            grant.verify()
        lock.release()
        token = _result(tokens[1], self.patience_s, "the thawed waiter")
        _expect(grant is not None and (token or 0) > grant.token, "the thawed waiter's token is not larger")

    def test_forked_child(self) -> None:
        """A forked child does not hold its parent's lock, cannot release it, and can lock for itself."""
        if not (processes := self._spawn(1)):
            return
        self._line_up(processes)
        saw = _result(processes[0].fork(self.name, self.ttl), 4 * self.patience_s, "the forked child")
        _expect("error" not in saw, f"the child's own lock failed: {saw.get('error')}")
        _expect(
            saw["lost"] is True and saw["released"] is not True, f"the child uses its parent's lock: {saw}"
        )
        _expect(saw["taken"] is None, "the child was given the lock that its parent holds")
        _expect(saw["own"] is not None, "the child could not lock for itself")
        lost = _result(processes[0].lost(self.name), self.patience_s, "an answer of the parent")
        _expect(not lost, "the fork cost the parent its lock")
        _result(processes[0].release(self.name), self.patience_s, "the parent's release")

    # -- parts ----------------------------------------------------------------------------------------

    def _connect(self) -> Backend:
        backend = self.make_backend()
        self._backends.append(backend)
        return backend

    def _name(self, tail: str) -> str:
        return f"conformance/{self._run}/{tail}"

    def _either(self, i: int) -> Backend:
        return (self.a, self.b)[i % 2]

    def _join(
        self, backend: Backend, name: str | None = None, *, ttl: float | None = None, record: bytes = b"{}"
    ) -> Ticket:
        return backend.enqueue(name or self.name, ttl or self.ttl, record)

    def _join_for_long(self, backend: Backend) -> Ticket:
        return self._join(backend, ttl=20 * self.ttl)

    @contextmanager
    def _kept(self, backend: Backend, ticket: Ticket) -> Iterator[Ticket]:
        """Beat for *ticket*, as the session of a live process does."""
        session = Session.of(backend)
        session.keep(ticket, lambda: None)
        try:
            yield ticket
        finally:
            session.drop(ticket)

    def _lock(self) -> DistributedLock:
        return DistributedLock(self.name, self.a, ttl=self.ttl)

    def _wait_for_waiters(self, lock: DistributedLock, n: int) -> None:
        _until(lambda: len(lock.waiters()) == n, 6 * self.patience_s, f"waiters in the queue: {n}")

    def _spawn(self, n: int) -> list[LockProcess]:
        """Processes that use the same service; none for a backend that stays within one process."""
        if self.a.guarantees.scope != "hosts":
            return []
        self._processes += (spawned := [LockProcess(self.a.url) for _ in range(n)])
        return spawned

    def _line_up(self, processes: list[LockProcess]) -> list[Future[int | None]]:
        """Have *processes* ask for the lock in order: the first holds it, the others wait."""
        lock, tokens = self._lock(), []
        for i, process in enumerate(processes):
            tokens.append(process.acquire(self.name, self.ttl))
            if i == 0:
                _result(tokens[0], 6 * self.patience_s, "a process that asks for a free lock")
            else:
                self._wait_for_waiters(lock, i)
        return tokens


def checks(suite: type[BackendConformance]) -> list[str]:
    """The names of the checks of *suite*, in the order in which they are defined."""
    names: dict[str, None] = {}
    for cls in reversed(suite.__mro__):
        names.update(dict.fromkeys(name for name in vars(cls) if name.startswith("test_")))
    return list(names)


def failures(suite: type[BackendConformance], names: list[str] | None = None) -> dict[str, Exception]:
    """Run the checks of *suite* (or those in *names*) and return what each one that failed raised."""
    failed: dict[str, Exception] = {}
    for name in checks(suite) if names is None else names:
        check = suite()
        try:
            check.setup_method()
            try:
                getattr(check, name)()
            finally:
                check.teardown_method()
        except Exception as error:  # noqa: BLE001 - whatever it is, the check has failed
            failed[name] = error
    return failed


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _done(future: Future[T], within: float) -> bool:
    try:
        future.exception(within)
    except NotDone:
        return False
    return True


def _result(future: Future[T], within: float, what: str) -> T:
    _expect(_done(future, within), f"{what}: nothing within {within:.2f} s")
    return future.result()


def _results(calls: Iterator[Future[T]]) -> list[T]:
    return [call.result(60) for call in list(calls)]


def _until(condition: Callable[[], bool], within: float, what: str) -> None:
    deadline = time.monotonic() + within
    while not condition():
        _expect(time.monotonic() < deadline, f"{what}: not within {within:.2f} s")
        time.sleep(0.01)
