"""Checks of queues: order, tokens, wake-ups, lapses, and what others see of them."""

from __future__ import annotations

import time

from ..session import Session
from ._conformance import Suite, done, expect, result

RECORD = b'{"who": "\xc3\xa9", "raw": "\x00\xff\n"}'


class QueueChecks(Suite):
    """What a lock needs of a backend."""

    def test_a_free_lock_is_had_at_once(self) -> None:
        """The first to ask holds it, under an int token."""
        ticket = self._join(self.a)
        expect(ticket.held, "a ticket for a free lock is not held")
        expect(type(ticket.token) is int, f"its token is {ticket.token!r}, not an int")
        expect(not self._join(self.b).held, "a second ticket is held beside the first")

    def test_tokens_grow(self) -> None:
        """Each grant of a name has a larger token than the one before, whoever asks."""
        tokens = []
        for backend in (self.a, self.b, self.b, self.a):
            ticket = self._join(backend)
            tokens.append(ticket.token or 0)
            expect(backend.release(ticket), "release of a held lock said it was not held")
        self.a.close()
        tokens.append(self._join(self.b).token or 0)
        expect(tokens == sorted(set(tokens)), f"tokens do not grow: {tokens}")

    def test_first_come_first_served(self) -> None:
        """Waiters have the lock in the order in which they asked."""
        order = (self.a, self.b, self.a, self.b, self.a)
        queue = [self._join_for_long(backend) for backend in order]
        tokens = []
        for i, ticket in enumerate(queue):
            backend = (self.a, self.b)[i % 2]
            expect(ticket.held or backend.await_turn(ticket, self.patience_s), f"waiter {i} is passed over")
            for later, other in list(enumerate(queue))[i + 1 :]:
                expect(not (self.a, self.b)[later % 2].await_turn(other, 0), f"{later} is in with {i}")
            tokens.append(ticket.token or 0)
            backend.release(ticket)
        expect(tokens == sorted(set(tokens)), f"tokens do not follow the queue: {tokens}")

    def test_a_wait_ends_when_its_time_is_up(self) -> None:
        """await_turn says no, not before its timeout, while another holds the lock."""
        with self._kept(self.a, self._join(self.a)), self._kept(self.b, self._join(self.b)) as waiter:
            start = time.monotonic()
            expect(not self.b.await_turn(waiter, 0.2), "await_turn says yes while another holds the lock")
            took = time.monotonic() - start
            expect(took >= 0.19, f"await_turn gave up after {took:.3f} s of 0.2 s")
            expect(took < 0.2 + self.patience_s, f"await_turn took {took:.3f} s of 0.2 s")

    def test_a_release_wakes_the_next(self) -> None:
        """A waiter is woken by the release, long before its own time is up."""
        holder, waiter = self._join(self.a), self._join(self.b)
        with self._kept(self.a, holder), self._kept(self.b, waiter):
            turn = self._pool.submit(self.b.await_turn, waiter, self.long_s)
            expect(not done(turn, 0.2), "await_turn returned while another holds the lock")
            expect(self.a.release(holder), "release of a held lock said it was not held")
            expect(result(turn, self.patience_s, "a waiter after the release"), "the next was not let in")

    def test_a_release_frees_what_is_its_own_alone(self) -> None:
        """A second release says no, and takes the lock from nobody."""
        first, second, third = (
            self._join_for_long(self.a),
            self._join_for_long(self.b),
            self._join_for_long(self.a),
        )
        self.a.release(first)
        expect(self.b.await_turn(second, self.patience_s), "the second waiter was not let in")
        expect(not self.a.release(first), "a second release of the same ticket says that it freed the lock")
        expect(not self.a.await_turn(third, 0.1), "a second release took the lock from its new holder")
        self.b.beat([second], self.patience_s)
        expect(second.held, "a second release took the lock from its new holder")
        expect(self.b.release(second), "the new holder's release said it was not held")

    def test_who_leaves_is_passed_over(self) -> None:
        """A waiter that left is in nobody's way, and its own wait ends."""
        holder, leaver, last = (
            self._join_for_long(self.a),
            self._join_for_long(self.b),
            self._join_for_long(self.a),
        )
        with self._kept(self.b, leaver):
            waiting = self._pool.submit(self.b.await_turn, leaver, self.long_s)
            expect(not done(waiting, 0.1), "await_turn returned while another holds the lock")
            self.b.leave(leaver)
            expect(not result(waiting, self.patience_s, "await_turn after leave"), "it let in who had left")
        tokens = [place.token for place in self.a.queue(self.name)]
        expect(tokens == [holder.token, None], f"after a leave the queue is {tokens}")
        self.a.release(holder)
        expect(self.a.await_turn(last, self.patience_s), "a waiter stands behind one that has left")

    def test_leaving_when_the_lock_has_come_frees_it(self) -> None:
        """leave gives up the lock as well, when it was granted meanwhile."""
        holder, unaware, last = (
            self._join_for_long(self.a),
            self._join_for_long(self.b),
            self._join_for_long(self.a),
        )
        self.a.release(holder)
        self.b.leave(unaware)
        expect(self.a.await_turn(last, self.patience_s), "who left took the lock along")

    def test_beats_prove(self) -> None:
        """A beat moves ``proven`` on for holders and waiters, in one call."""
        others = [self._join(self.a, self._name(f"other-{i}")) for i in range(20)]
        tickets = [self._join(self.a), *others, self._join(self.a)]
        before = self.a.clock()
        self.a.beat(tickets, self.patience_s)
        stale = [ticket.name for ticket in tickets if not before <= ticket.proven <= self.a.clock()]
        expect(not stale, f"after a beat `proven` lies before it: {stale}")
        expect(not any(ticket.gone for ticket in tickets), "a beat lost a ticket that nobody took")
        self.a.beat([], self.patience_s)

    def test_beats_keep_the_lock(self) -> None:
        """A holder that beats keeps the lock for longer than its ttl."""
        holder, waiter = self._join(self.a), self._join(self.b)
        with self._kept(self.a, holder), self._kept(self.b, waiter):
            expect(not self.b.await_turn(waiter, self.ttl * 1.5), "the lock of a beating holder was taken")
            expect(not Session.of(self.a).lost(holder), "a beating holder counts as lost")
            expect(self.a.release(holder), "release of a held lock said it was not held")

    def test_a_silent_holder_lapses(self) -> None:
        """Who does not beat for its ttl loses the lock, and is told so."""
        holder, waiter = self._join(self.a), self._join(self.b)
        with self._kept(self.b, waiter):
            expect(self.b.await_turn(waiter, self.lapse_s), f"a dead holder blocks for {self.lapse_s} s")
            expect((waiter.token or 0) > (holder.token or 0), "the next holder's token is not larger")
            expect(Session.of(self.a).lost(holder), "a holder silent for its ttl does not count as lost")
            self.a.beat([holder], self.patience_s)
            expect(holder.gone, "a beat after the lapse does not see that the lock is gone")
            expect(not self.a.release(holder), "a lapsed holder's release says that it freed the lock")
            expect(self.b.await_turn(waiter, 0), "a lapsed holder's release took the lock from the next")

    def test_silent_waiters_lapse_all_at_once(self) -> None:
        """A chain of dead waiters costs one ttl, not one each."""
        for _ in range(5):
            self._join(self.a)
        waiter = self._join(self.b)
        with self._kept(self.b, waiter):
            start = time.monotonic()
            expect(self.b.await_turn(waiter, 5 * self.ttl), "dead waiters block the queue")
            took = time.monotonic() - start
            expect(took < max(self.lapse_s, 3.5 * self.ttl), f"five dead tickets took {took:.2f} s")

    def test_each_ticket_has_its_own_ttl(self) -> None:
        """Who is handed the lock has it for its own ttl, not for its predecessor's or successor's."""
        holder = self._join(self.a)
        patient = self._join(self.b, ttl=20 * self.ttl)
        waiter = self._join(self.a)
        self.a.release(holder)
        expect(self.b.await_turn(patient, self.patience_s), "the second was not let in")
        with self._kept(self.a, waiter):
            expect(
                not self.a.await_turn(waiter, 1.5 * self.ttl), "a ttl other than the holder's own was kept"
            )
        self.b.beat([patient], self.patience_s)
        expect(patient.held, "a holder lost the lock before its own ttl was over")

    def test_a_wake_up_carries_no_authority(self) -> None:
        """Who sleeps over its turn does not hold the lock beside the next; it queues again, at the end."""
        holder, sleeper, next_one = self._join(self.a), self._join(self.b), self._join(self.a)
        self.a.release(holder)
        with self._kept(self.a, next_one):
            expect(self.a.await_turn(next_one, self.lapse_s), "a sleeping waiter blocks the queue")
            with self._kept(self.b, sleeper):
                expect(not self.b.await_turn(sleeper, 0.2), "a stale wake-up made a second holder")
                expect(self.a.await_turn(next_one, 0), "a sleeper that woke took the lock from its holder")
                self.a.release(next_one)
                expect(self.b.await_turn(sleeper, self.patience_s), "a sleeper that woke has no place left")
        expect((sleeper.token or 0) > (next_one.token or 0), "its token is older than its predecessor's")

    def test_eviction(self) -> None:
        """evict ends the holding under one token, and no other."""
        holder, waiter = self._join(self.a), self._join(self.b)
        token = holder.token or 0
        with self._kept(self.b, waiter):
            expect(not self.b.evict(self.name, token + 1), "evict under a token that is not the holder's")
            expect(not self.b.evict(self._name("free"), token), "evict of a lock that nobody holds")
            self.a.beat([holder], self.patience_s)
            expect(holder.held, "an eviction that said no took the lock")
            expect(self.b.evict(self.name, token), "evict of the holder said no")
            expect(self.b.await_turn(waiter, self.patience_s), "the next was not let in after the eviction")
            self.a.beat([holder], self.patience_s)
            expect(holder.gone, "a beat does not see the eviction")
            expect(not self.a.release(holder), "an evicted holder's release says that it freed the lock")
            expect(self.b.await_turn(waiter, 0), "an evicted holder's release took the lock from the next")

    def test_the_queue_can_be_read(self) -> None:
        """queue and held say who holds what and who waits, in order, with their records."""
        other = self._name("lock/with/slashes é and spaces")
        expect(self.b.queue(self.name) == [], "a queue nobody is in is not empty")
        holder = self._join(self.a, record=RECORD)
        waiters = [
            self._join(backend, record=b"%d" % i) for i, backend in enumerate((self.b, self.a, self.b))
        ]
        second = self._join(self.b, other)
        places = [(place.name, place.token, place.record) for place in self.b.queue(self.name)]
        expected = [(self.name, holder.token, RECORD)]
        expected += [(self.name, None, b"%d" % i) for i in range(len(waiters))]
        expect(places == expected, f"the queue reads {places}, expected {expected}")
        held = [(place.name, place.token) for place in self.a.held(self._name(""))]
        both = [(self.name, holder.token), (other, second.token)]
        expect(held == both, f"held reads {held}, expected {both}")
        expect([p.name for p in self.a.held(other)] == [other], "held does not keep to its prefix")
        self.b.release(second)
        expect(self.a.held(other) == [], "a released lock is still in held")

    def test_the_silence_of_a_holder(self) -> None:
        """silences answers for each lock: seconds within the holder's ttl, or None where it is not known."""
        holder = self._join_for_long(self.a)
        names = [self.name, self._name("free")]
        for looks in range(3):
            self.a.beat([holder], self.patience_s)
            self.b.held(self.name)
            age, free = self.b.silences(names)
            expect(free is None, f"a lock that nobody holds was heard from {free} s ago")
            in_range = age is None or 0 <= age < 20 * self.ttl
            expect(in_range, f"look {looks}: a holder that has just beaten was heard from {age} s ago")
        expect(self.b.silences([]) == [], "silences of no names")

    def test_names_are_apart(self) -> None:
        """Locks whose names share a beginning, or look like parts of keys, do not meet."""
        names = [self._name(tail) for tail in ("x", "x/1", "x/s/1", "x ", "x:q", "x}", "{x", "é", "%", "*")]
        names.append(self._name("long").ljust(512, "n"))
        for name in names:
            expect(self._join(self.a, name).held, f"{name!r} is not free, though nobody asked for it before")
        held = [place.name for place in self.b.held(self._name(""))]
        expect(held == sorted(names), f"held reads {held}")

    def test_many_threads_share_one_backend(self) -> None:
        """Every call may be made from any thread; one holder at a time, and everybody gets in."""
        inside, overlaps, entered = [0], [0], [0]

        def work() -> None:
            for _ in range(5):
                ticket = self._join_for_long(self.a)
                if not ticket.held:
                    expect(self.a.await_turn(ticket, 10 * self.patience_s), "a thread was never let in")
                inside[0] += 1
                overlaps[0] += inside[0] != 1
                entered[0] += 1
                inside[0] -= 1
                expect(self.a.release(ticket), "release of a held lock said it was not held")

        for entering in [self._pool.submit(work) for _ in range(16)]:
            result(entering, 20 * self.patience_s, "16 threads that take turns")
        expect(overlaps[0] == 0, f"{overlaps[0]} times two threads held the lock together")
        expect(entered[0] == 16 * 5, f"{entered[0]} entries counted, expected {16 * 5}")
