"""A whole backend: what CONTRIBUTING.md explains under "A backend in an afternoon".

Run it, and it says which checks of the conformance suite it passes:

    python examples/toy_backend.py
"""

from __future__ import annotations

import argparse
import itertools
import threading
from collections.abc import Sequence
from typing import Any

from dprims.backend import Backend, Guarantees, Place, Ticket
from dprims.testing.backend_conformance import BackendConformance, checks, failures

SPACES: dict[str, dict[str, Any]] = {}


class ToyBackend(Backend):
    """``toy://name``: lists and a dict behind one condition, for the threads of one process.

    Whoever waits looks every 10 ms, which a real backend does not: its server wakes the next in line.
    """

    guarantees = Guarantees("process", False, False, 0.05, "ttl", "this process", "a toy")

    def __init__(self, url: str) -> None:
        self.url = url
        space = SPACES.setdefault(url, {})  # what a server would keep
        self.changed = space.setdefault("changed", threading.Condition())
        self.queues: dict[str, list[Ticket]] = space.setdefault("queues", {})
        self.cells: dict[str, bytes] = space.setdefault("cells", {})
        self.tokens = space.setdefault("tokens", itertools.count(1))

    def line(self, name: str) -> list[Ticket]:
        queue = self.queues.setdefault(name, [])
        queue[:] = [ticket for ticket in queue if self.clock() < ticket.proven + ticket.ttl]
        return queue

    def enqueue(self, name: str, ttl: float, record: bytes) -> Ticket:
        self.await_turn(ticket := Ticket(name, ttl, record), 0)
        return ticket

    def await_turn(self, ticket: Ticket, timeout: float) -> bool:
        end = self.clock() + timeout
        with self.changed:
            while True:
                queue, ticket.proven = self.line(ticket.name), self.clock()
                if ticket not in queue and not ticket.gone:
                    queue.append(ticket)
                if queue[:1] == [ticket] and ticket.token is None:
                    ticket.token = next(self.tokens)
                if ticket.held or ticket.gone or self.clock() >= end:
                    return ticket.held
                self.changed.wait(min(0.01, end - self.clock()))

    def leave(self, ticket: Ticket) -> None:
        self.release(ticket)

    def release(self, ticket: Ticket) -> bool:
        with self.changed:
            queue, ticket.gone = self.line(ticket.name), True
            if there := ticket in queue:
                queue.remove(ticket)
            return there

    def beat(self, tickets: Sequence[Ticket], timeout: float) -> float | None:
        with self.changed:
            for ticket in tickets:
                if ticket in self.line(ticket.name):
                    ticket.proven = self.clock()
                else:
                    ticket.gone = ticket.token is not None
        return None

    def queue(self, name: str) -> list[Place]:
        with self.changed:
            return [Place(name, ticket.token, ticket.record) for ticket in self.line(name)]

    def held(self, prefix: str) -> list[Place]:
        names = sorted(name for name in self.queues if name.startswith(prefix))
        return [place for name in names for place in self.queue(name)[:1]]

    def evict(self, name: str, token: int) -> bool:
        with self.changed:
            holder = next((ticket for ticket in self.line(name) if ticket.token == token), None)
            return holder is not None and self.release(holder)

    def get(self, key: str) -> bytes | None:
        return self.cells.get(key)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        with self.changed:
            if self.cells.get(key) == expected:
                self.cells[key] = value
                self.changed.notify_all()
            return self.cells.get(key)

    def wait(self, key: str, timeout: float) -> bytes | None:
        with self.changed:
            self.changed.wait_for(lambda: key in self.cells, timeout)
        return self.cells.get(key)

    def delete(self, key: str) -> None:
        self.cells.pop(key, None)

    def disconnect(self) -> None:
        pass

    def reconnect_after_fork(self) -> None:
        pass


class TestToyBackend(BackendConformance):
    """The suite, as pytest collects it; ``failures`` runs it without pytest."""

    ttl = 0.3

    def make_backend(self) -> Backend:
        """Connect to the same service each time."""
        return ToyBackend("toy://example")


def main() -> None:
    """Run the suite."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    failed = failures(TestToyBackend)
    for name, error in failed.items():
        print(f"{name}: {error}")
    print(f"{len(checks(TestToyBackend)) - len(failed)} of {len(checks(TestToyBackend))} checks passed")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
