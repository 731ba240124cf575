"""examples/toy_backend.py is a backend, found by its scheme; and the suite finds each way to break it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from dprims.backend import Backend, Place, Ticket
from dprims.testing.backend_conformance import BackendConformance, checks, failures

EXAMPLE = Path(__file__).parent.parent / "examples" / "toy_backend.py"

if TYPE_CHECKING:
    from examples.toy_backend import ToyBackend as Toy
else:
    spec = spec_from_file_location("toy_backend", EXAMPLE)
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    Toy = example.ToyBackend


class ToySuite(BackendConformance):
    ttl = 0.3
    patience_s = 0.6
    backend: ClassVar[type[Toy]] = Toy

    def setup_method(self) -> None:
        self.url = f"toy://{uuid.uuid4().hex}"
        super().setup_method()

    def make_backend(self) -> Backend:
        return self.backend(self.url)


class TestToy(ToySuite):
    patience_s = 5.0


# -- ten and more ways to break it, and the check that has to see each --------------------------------


class LastComeFirst(Toy):
    """test_first_come_first_served"""

    def await_turn(self, ticket: Ticket, timeout: float) -> bool:
        with self.changed:
            queue = self.line(ticket.name)
            if ticket not in queue and not ticket.gone:
                ticket.proven = self.clock()
                queue.insert(1, ticket)
        return super().await_turn(ticket, timeout)


class TokensRepeat(Toy):
    """test_tokens_grow"""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.tokens = itertools.repeat(1)


class TokensOfEachClient(Toy):
    """test_tokens_grow"""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.tokens = itertools.count(1)


class EverybodyIsIn(Toy):
    """test_a_wait_ends_when_its_time_is_up"""

    def await_turn(self, ticket: Ticket, timeout: float) -> bool:
        super().await_turn(ticket, timeout)
        ticket.token = ticket.token or next(self.tokens)
        return True


class ReleaseFreesAnybody(Toy):
    """test_a_release_frees_what_is_its_own_alone"""

    def release(self, ticket: Ticket) -> bool:
        ticket.gone = True
        with self.changed:
            return bool(self.line(ticket.name)) and bool(self.line(ticket.name).pop(0))


class ReleaseAlwaysSaysYes(Toy):
    """test_a_release_frees_what_is_its_own_alone"""

    def release(self, ticket: Ticket) -> bool:
        super().release(ticket)
        return True


class WakeUpIsBelieved(Toy):
    """test_a_wake_up_carries_no_authority"""

    def release(self, ticket: Ticket) -> bool:
        there = super().release(ticket)
        for heir in self.line(ticket.name)[:1]:
            heir.token = heir.token or next(self.tokens)
        return there

    def await_turn(self, ticket: Ticket, timeout: float) -> bool:
        return ticket.held or super().await_turn(ticket, timeout)


class NobodyIsWoken(Toy):
    """test_a_release_wakes_the_next"""

    def await_turn(self, ticket: Ticket, timeout: float) -> bool:
        if super().await_turn(ticket, 0) or not timeout:
            return ticket.held
        threading.Event().wait(min(timeout, 2))
        return super().await_turn(ticket, 0)


class LeaveLeavesTheEntry(Toy):
    """test_who_leaves_is_passed_over"""

    def leave(self, ticket: Ticket) -> None:
        ticket.gone = True


class LeaveKeepsTheLock(Toy):
    """test_leaving_when_the_lock_has_come_frees_it"""

    def leave(self, ticket: Ticket) -> None:
        if self.line(ticket.name)[:1] != [ticket]:
            super().leave(ticket)


class TheSilentLiveForEver(Toy):
    """test_a_silent_holder_lapses"""

    def line(self, name: str) -> list[Ticket]:
        return self.queues.setdefault(name, [])


class TheDeadAreTimedOneByOne(Toy):
    """test_silent_waiters_lapse_all_at_once"""

    def line(self, name: str) -> list[Ticket]:
        queue = self.queues.setdefault(name, [])
        if queue and self.clock() >= queue[0].proven + queue[0].ttl:
            queue.pop(0)
            if queue:
                queue[0].proven = self.clock()
        return queue


class TheLockHasOneTtl(Toy):
    """test_each_ticket_has_its_own_ttl"""

    def line(self, name: str) -> list[Ticket]:
        queue = self.queues.setdefault(name, [])
        ttl = min((ticket.ttl for ticket in queue), default=0.0)
        queue[:] = [ticket for ticket in queue if self.clock() < ticket.proven + ttl]
        return queue


class BeatsProveNothing(Toy):
    """test_beats_prove"""

    def beat(self, tickets: Sequence[Ticket], timeout: float) -> float | None:
        return None


class BeatsSeeNoLoss(Toy):
    """test_eviction"""

    def evict(self, name: str, token: int) -> bool:
        queue = self.line(name)
        return bool(queue) and queue[0].token == token and bool(queue.pop(0))

    def beat(self, tickets: Sequence[Ticket], timeout: float) -> float | None:
        for ticket in tickets:
            ticket.proven = self.clock()
        return None


class EvictionTakesAnyToken(Toy):
    """test_eviction"""

    def evict(self, name: str, token: int) -> bool:
        queue = self.line(name)
        return bool(queue) and self.release(queue[0])


class HeldIgnoresItsPrefix(Toy):
    """test_the_queue_can_be_read"""

    def held(self, prefix: str) -> list[Place]:
        return super().held("")


class NamesMeet(Toy):
    """test_names_are_apart"""

    def line(self, name: str) -> list[Ticket]:
        return super().line(name.replace("}", "").replace("{", ""))


class CellsAreOverwritten(Toy):
    """test_cells_compare_and_set"""

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        self.cells[key] = value
        return value


class CellsLoseUpdates(Toy):
    """test_cells_count"""

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        if self.cells.get(key) == expected:
            threading.Event().wait(0.01)
            self.cells[key] = value
            return value
        return self.cells.get(key)


class MissingIsEmpty(Toy):
    """test_cells_compare_and_set"""

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        return super().compare_and_set(key, None if key not in self.cells else expected, value)


class WaitReturnsEarly(Toy):
    """test_cells_are_waited_for"""

    def wait(self, key: str, timeout: float) -> bytes | None:
        return self.cells.get(key)


class WaitIsNotWoken(Toy):
    """test_cells_are_waited_for"""

    def wait(self, key: str, timeout: float) -> bytes | None:
        threading.Event().wait(min(timeout, 2))
        return self.cells.get(key)


class CloseKeepsEverything(Toy):
    """test_close_gives_everything_back"""

    def close(self) -> None:
        self.disconnect()


BROKEN = [cls for cls in Toy.__subclasses__() if cls.__module__ == __name__]


@pytest.mark.parametrize("backend", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_backend_is_found_out(backend: type[Toy]) -> None:
    suite = type("Suite", (ToySuite,), {"backend": backend})
    check = (backend.__doc__ or "").strip()
    assert check in checks(suite)
    failed = failures(suite, [check])
    assert isinstance(failed.get(check), AssertionError), f"{check} did not see it: {failed}"


def test_a_backend_that_goes_on_after_close_is_found_out_where_it_promises_not_to() -> None:
    check = "test_a_closed_backend_is_of_no_use"
    suite = type("Suite", (ToySuite,), {"refuses_after_close": True})
    assert isinstance(failures(suite, [check]).get(check), AssertionError)
    assert not failures(ToySuite, [check])


def test_there_are_at_least_ten() -> None:
    assert len(BROKEN) >= 10


def test_a_package_of_somebody_else_adds_its_scheme(tmp_path: Path) -> None:
    """What `pip install` of a package with such an entry point leaves, and a lock over its URL."""
    installed = tmp_path / "dprims_toy-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: dprims-toy\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[dprims.backends]\ntoy = toy_backend:ToyBackend\n")
    code = (
        "import dprims\nwith dprims.DistributedLock('x', 'toy://a') as grant:\n"
        " print(repr(dprims.connect('toy://a')), grant.token)"
    )
    path = os.pathsep.join([str(tmp_path), str(EXAMPLE.parent), str(EXAMPLE.parent.parent)])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout == "<ToyBackend toy://a> 1\n"
