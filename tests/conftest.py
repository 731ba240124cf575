"""Servers for the tests, and the rule that a test leaves no process behind."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import dprims
from dprims.testing.servers import EtcdServer, RedisServer

from .helpers import leftovers
from .helpers.services import KINDS, Service

# A shell ignores interrupts for what it runs in the background, and children inherit that: tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

no_process_left, outliving = leftovers.no_process_left, leftovers.outliving
pytest_sessionstart = leftovers.pytest_sessionstart

# torch's store server looks up the name of every client, and stands still while it waits for an answer:
# no nameserver is asked here.
os.environ.setdefault("RES_OPTIONS", "attempts:0")


@pytest.fixture(scope="session")
def redis_server(outliving: list[Any]) -> Iterator[RedisServer]:
    """A Redis server that all tests share: use names of your own, and neither stop nor freeze it."""
    with RedisServer() as server:
        outliving.append(server)
        yield server


@pytest.fixture(scope="session")
def etcd_server(outliving: list[Any]) -> Iterator[EtcdServer]:
    """An etcd server that all tests share: use names of your own, and neither stop nor freeze it."""
    with EtcdServer() as server:
        outliving.append(server)
        yield server


@pytest.fixture(scope="session")
def services(redis_server: RedisServer, etcd_server: EtcdServer) -> Iterator[dict[str, Service]]:
    """Each of the services that a lock runs on, shared by all tests."""
    with dprims.connect("tcpstore://127.0.0.1:0?serve=1") as served:
        yield {
            "memory": Service("memory", f"memory://{uuid.uuid4().hex}", 0.5),
            "tcpstore": Service("tcpstore", served.url, 0.8),
            "redis": Service("redis", redis_server.url, 0.8),
            "etcd": Service("etcd", etcd_server.url, 2.0),
        }


@pytest.fixture(params=KINDS)
def service(request: pytest.FixtureRequest, services: dict[str, Service]) -> Service:
    """One service after the other; ``indirect`` parameters choose among them."""
    return services[request.param]


@pytest.fixture
def private_redis() -> Iterator[RedisServer]:
    """A Redis server of this test alone, to kill, freeze and restart; it persists what it answered."""
    with RedisServer(persist=True) as server:
        yield server


@pytest.fixture
def private_etcd() -> Iterator[EtcdServer]:
    """An etcd server of this test alone, to kill, freeze and restart."""
    with EtcdServer() as server:
        yield server
