"""What a leader writes down in the backend, and deletes again."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import dprims
from dprims.backend import Backend
from dprims.membership import Epoch
from dprims.synchronizer.ledger import Ledger
from dprims.synchronizer.protocol import COMMIT, decision_key

from .helpers.services import Service


@pytest.fixture
def backend(service: Service) -> Iterator[Backend]:
    with dprims.connect(service.url) as backend:
        yield backend


@pytest.fixture
def prefix() -> str:
    return f"ledger-{uuid.uuid4().hex}"


def test_a_decision_stands(backend: Backend, prefix: str) -> None:
    epoch = Epoch(3, 1)
    first, second = Ledger(backend, prefix), Ledger(backend, prefix)
    assert first.decide(epoch, 7, COMMIT) == COMMIT
    assert second.decide(epoch, 7, "abort: sealed") == COMMIT


def test_all_but_the_newest_decision_are_forgotten(backend: Backend, prefix: str) -> None:
    ledger = Ledger(backend, prefix)
    ledger.forget()
    cells = [(Epoch(2, 4), 9), (Epoch(3, 1), 8), (Epoch(3, 1), 9), (Epoch(3, 2), 9)]
    for epoch, number in cells:
        ledger.decide(epoch, number, COMMIT)
    ledger.forget()
    stand = [backend.get(decision_key(prefix, *cell)) for cell in cells]
    assert stand == [None, None, None, COMMIT.encode()]
    ledger.decide(Epoch(3, 2), 10, COMMIT)
    ledger.forget()
    assert backend.get(decision_key(prefix, Epoch(3, 2), 9)) is None
    assert backend.get(decision_key(prefix, Epoch(3, 2), 10)) == COMMIT.encode()


def test_a_mark_is_there_until_it_is_voided(backend: Backend, prefix: str) -> None:
    ledger, successor = Ledger(backend, prefix), Ledger(backend, prefix)
    assert successor.marked(range(4)) == {}
    ledger.mark({1: 5, 3: 6})
    assert successor.marked(range(4)) == {1: 5, 3: 6}
    ledger.unmark({1: 5})
    assert successor.marked(range(4)) == {3: 6}
    ledger.mark({1: 9})
    assert successor.marked([1]) == {1: 9}


def test_an_old_leader_does_not_void_the_mark_of_a_newer_one(backend: Backend, prefix: str) -> None:
    old, new = Ledger(backend, prefix), Ledger(backend, prefix)
    old.mark({1: 5})
    new.mark({1: 8})
    old.unmark({1: 5})  # thawed, and done waiting
    assert new.marked([1]) == {1: 8}
