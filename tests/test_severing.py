"""The end of a gloo group that was given up: its connections go, and with them what it burns and keeps."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.synchronizer.graveyard import END_AFTER_S, buried, bury
from dprims.synchronizer.severing import listener_of, sever
from dprims.testing.faults import Fault
from dprims.testing.weights import ToySink, ToySource

from .helpers.services import until

LIMIT_S = 20.0


def listening(family: socket.AddressFamily, host: str) -> socket.socket:
    one = socket.socket(family)
    one.bind((host, 0))
    one.listen()
    return one


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_connections_of_a_listener_are_cut_from_both_sides_and_no_others(stack: ExitStack) -> None:
    mine, address = listener_of(lambda: stack.enter_context(listening(socket.AF_INET, "127.0.0.1")))
    other = stack.enter_context(listening(socket.AF_INET, "127.0.0.1"))
    assert address == ("127.0.0.1", mine.getsockname()[1])
    ours = stack.enter_context(socket.create_connection(mine.getsockname(), LIMIT_S))
    theirs = stack.enter_context(mine.accept()[0])
    apart = stack.enter_context(socket.create_connection(other.getsockname(), LIMIT_S))
    far = stack.enter_context(other.accept()[0])
    for accepted in (theirs, far):
        accepted.settimeout(LIMIT_S)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert sever({address}) >= 2
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (ours.recv(1), theirs.recv(1)) == (b"", b"")
    apart.sendall(b"x")
    assert far.recv(1) == b"x"
    assert sever(set()) == 0


def test_sockets_of_others_stay_as_they_are(stack: ExitStack) -> None:
    """To make a socket object of a descriptor sets the default timeout for all who have the socket."""
    one, other = (stack.enter_context(end) for end in socket.socketpair())
    listener = stack.enter_context(listening(socket.AF_INET, "127.0.0.1"))
    socket.setdefaulttimeout(30.0)
    try:
        listener_of(lambda: None)
        sever({("127.0.0.1", 1)})
    finally:
        socket.setdefaulttimeout(None)
    assert [os.get_blocking(end.fileno()) for end in (one, other, listener)] == [True] * 3


def test_an_ipv4_address_in_an_ipv6_socket_is_the_same_address(stack: ExitStack) -> None:
    dual = socket.socket(socket.AF_INET6)
    stack.enter_context(dual)
    dual.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    dual.bind(("::ffff:127.0.0.1", 0))
    dual.listen()
    port = dual.getsockname()[1]
    ours = stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S))
    stack.enter_context(dual.accept()[0])
    assert sever({("127.0.0.1", port)}) == 2
    assert ours.recv(1) == b""


def test_a_listener_that_cannot_be_told_from_another_is_not_guessed(stack: ExitStack) -> None:
    def two() -> list[socket.socket]:
        return [stack.enter_context(listening(socket.AF_INET, "127.0.0.1")) for _ in range(2)]

    assert listener_of(two)[1] is None
    assert listener_of(lambda: None) == (None, None)


class Work:
    """One of torch's works, as the graveyard asks it."""

    def __init__(self) -> None:
        self.ended = False

    def is_completed(self) -> bool:
        return self.ended


def test_a_grave_is_dropped_when_its_works_have_ended_long_before_its_time() -> None:
    before, works = buried(), [Work(), Work()]
    bury([object()], 1000.0, works)
    assert buried() == before + 1
    works[0].ended = works[1].ended = True
    until(lambda: buried() == before, "the grave to be dropped", LIMIT_S)


def test_works_that_do_not_end_by_themselves_are_ended_once() -> None:
    before, work, calls = buried(), Work(), []

    def end() -> None:
        calls.append(time.monotonic())
        work.ended = True

    began = time.monotonic()
    bury([object()], 1000.0, [work], end)
    until(lambda: buried() == before, "the grave to be dropped", LIMIT_S)
    assert len(calls) == 1
    assert calls[0] - began >= END_AFTER_S


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_sender_whose_receiver_was_killed_burns_no_core_afterwards() -> None:
    """gloo's thread would write, until torch's timeout, to a connection whose operation was given up."""
    policy = LocalPolicy(ToySource, 16, 1024)
    generation = LocalGeneration(ToySink, 1, 16, 1024, shard_sizes=(1, 1, 1))
    sync = CollectiveWeightSynchronizer(
        policy, generation, refit_timeout_s=200.0, roster_ttl_s=2.0, bucket_bytes=4 << 20
    )
    try:
        sync.init_communicator(timeout=60.0)
        sync.refit()
        generation.process(1).call_now("arm", Fault(action="kill", bucket=8)).result(60.0)
        assert sync.refit().members == (0, 2)

        def idle() -> bool:
            before, used = time.monotonic(), cpu_s(policy.process(0).pid)
            time.sleep(0.3)  # the time over which it is looked at
            return cpu_s(policy.process(0).pid) - used < 0.5 * (time.monotonic() - before)

        until(idle, "the trainer to be idle", LIMIT_S)
    finally:
        generation.close()
        policy.close()
        sync.shutdown()
