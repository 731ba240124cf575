"""Every backend of ours passes the conformance suite."""

from __future__ import annotations

import uuid
from typing import ClassVar

import pytest

import dprims
from dprims.testing.backend_conformance import BackendConformance

from .helpers.services import Service


class _ByUrl(BackendConformance):
    refuses_after_close = True
    url: ClassVar[str]

    def make_backend(self) -> dprims.Backend:
        return dprims.connect(self.url)


class TestMemory(_ByUrl):
    ttl = 0.4
    url = f"memory://{uuid.uuid4().hex}"


class TestTCPStore(_ByUrl):
    ttl = 0.7

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls, services: dict[str, Service]) -> None:
        cls.url = services["tcpstore"].url


class TestRedis(_ByUrl):
    ttl = 0.7

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls, services: dict[str, Service]) -> None:
        cls.url = services["redis"].url


class TestEtcd(_ByUrl):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls, services: dict[str, Service]) -> None:
        cls.url = services["etcd"].url
