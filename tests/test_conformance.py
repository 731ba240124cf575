"""Every backend of ours passes the conformance suite."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import ClassVar

import pytest

import dprims
from dprims.testing.backend_conformance import BackendConformance
from dprims.testing.servers import EtcdServer, RedisServer


class _ByUrl(BackendConformance):
    url: ClassVar[str]

    def make_backend(self) -> dprims.Backend:
        return dprims.connect(self.url)


class TestMemory(_ByUrl):
    ttl = 0.4
    url = f"memory://{uuid.uuid4().hex}"


class TestTCPStore(_ByUrl):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls) -> Iterator[None]:
        with dprims.connect("tcpstore://127.0.0.1:0?serve=1") as served:
            cls.url = served.url
            yield


class TestRedis(_ByUrl):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls, redis_server: RedisServer) -> None:
        cls.url = redis_server.url


class TestEtcd(_ByUrl):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls, etcd_server: EtcdServer) -> None:
        cls.url = etcd_server.url
