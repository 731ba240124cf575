"""Connections to the leader's store that are kept, and what becomes of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from dprims.synchronizer.clients import Clients
from dprims.synchronizer.rendezvous import join_store, leader_store


@pytest.fixture
def served() -> Any:
    return leader_store("127.0.0.1")


@pytest.fixture
def clients(served: Any) -> Clients:
    _, host, port = served
    return Clients(join_store(host, port))


def connections(port: int) -> list[int]:
    """This process's descriptors that are connected to a port."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        fd = int(entry.name)
        try:
            with socket.socket(fileno=os.dup(fd)) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] == port:
                    found.append(fd)
        except OSError:
            continue
    return found


def test_a_client_is_lent_again_and_to_one_at_a_time(clients: Clients) -> None:
    with clients.lend() as first, clients.lend() as second:
        assert first is not second
    with clients.lend() as again:
        assert again is first or again is second


def test_one_that_was_in_use_when_its_borrower_failed_is_not_lent_again(clients: Clients) -> None:
    with pytest.raises(KeyError), clients.lend() as first:
        raise KeyError
    with clients.lend() as second:
        assert second is not first


def test_one_whose_connection_was_cut_while_idle_is_not_lent_again(served: Any, clients: Clients) -> None:
    _, _, port = served
    before = set(connections(port))
    with clients.lend("a") as first:
        first.set("key", "value")
    for fd in set(connections(port)) - before:
        with socket.socket(fileno=os.dup(fd)) as end:
            end.shutdown(socket.SHUT_RDWR)
    for _ in range(2):
        with clients.lend("a") as client:
            assert client.get("key") == b"value"
