"""Every backend passes the conformance suite; a toy does too, and ten broken ones are found out."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import dprims
from dprims.testing.backend_conformance import BackendConformance


class TestMemory(BackendConformance):
    ttl = 0.4

    def setup_method(self) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"
        super().setup_method()

    def make_backend(self) -> dprims.Backend:
        return dprims.connect(self.url)


class TestTCPStore(BackendConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls) -> Iterator[None]:
        with dprims.connect("tcpstore://127.0.0.1:0?serve=1") as served:
            cls.url = served.url
            yield

    def make_backend(self) -> dprims.Backend:
        return dprims.connect(self.url)


class TestRedis(BackendConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls, redis_server) -> None:
        cls.url = redis_server.url

    def make_backend(self) -> dprims.Backend:
        return dprims.connect(self.url)


class TestEtcd(BackendConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls, etcd_server) -> None:
        cls.url = etcd_server.url

    def make_backend(self) -> dprims.Backend:
        return dprims.connect(self.url)
