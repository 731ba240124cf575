"""The locks that ``locks.py`` measures: each is made for a server's URL, and gives acquire and release."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dprims

Pair = tuple[Callable[[], Any], Callable[[], Any]]
TTL = 30


def ours(url: str) -> Pair:
    lock = dprims.DistributedLock("bench", url, ttl=TTL)
    return lock.acquire, lock.release


def redis_py(sleep: float) -> Callable[[str], Pair]:
    def make(url: str) -> Pair:
        import redis

        lock = redis.Redis.from_url(url).lock("bench-redis-py", timeout=TTL, sleep=sleep)
        return lock.acquire, lock.release

    return make


def python_redis_lock(url: str) -> Pair:
    import redis
    import redis_lock  # pyright: ignore[reportMissingImports]

    lock = redis_lock.Lock(redis.Redis.from_url(url), "bench", expire=TTL)
    return lock.acquire, lock.release


def pottery(url: str) -> Pair:
    import redis
    from pottery import Redlock  # pyright: ignore[reportMissingImports]

    lock = Redlock(key="bench", masters={redis.Redis.from_url(url)}, auto_release_time=TTL)
    return lock.acquire, lock.release


def tooz(url: str) -> Pair:
    from tooz import coordination  # pyright: ignore[reportMissingImports]

    if url.startswith("etcd"):
        url = url.replace("etcd://", "etcd3+http://")
    coordinator = coordination.get_coordinator(url, f"{os.getpid()}".encode())
    coordinator.start()
    lock = coordinator.get_lock(b"bench")
    return lock.acquire, lock.release


def etcd3_fc(url: str) -> Pair:
    import etcd3

    host, port = url.removeprefix("etcd://").split(":")
    lock = etcd3.client(host, int(port)).lock("bench", ttl=TTL)
    return lambda: lock.acquire(timeout=None), lock.release


def etcd3gw(url: str) -> Pair:
    """It has no wait of its own: it is asked again every 10 ms."""
    import etcd3gw  # pyright: ignore[reportMissingImports]

    host, port = url.removeprefix("etcd://").split(":")
    lock = etcd3gw.client(host, int(port), api_path="/v3/").lock("bench", ttl=TTL)

    def acquire() -> None:
        while not lock.acquire():
            time.sleep(0.01)

    return acquire, lock.release


def counter_lock(url: str) -> Pair:
    """A counter that must be 1 after adding to it; who sees more takes back and backs off, 50 to 500 ms."""
    import torch.distributed as dist

    host, port = url.removeprefix("tcpstore://").split(":")
    store = dist.TCPStore(host, int(port))

    def acquire() -> None:
        pause = 0.05
        while store.add("bench-counter", 1) != 1:
            store.add("bench-counter", -1)
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    return acquire, lambda: store.add("bench-counter", -1)


@dataclass(frozen=True)
class Contestant:
    name: str
    server: str
    needs: str
    make: Callable[[str], Pair]

    @property
    def here(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None


def _etcd3_is_fc() -> str:
    """The stock etcd3 has a lock that cannot wait; the fork is in the same package."""
    try:
        importlib.metadata.distribution("etcd3-fc")
    except importlib.metadata.PackageNotFoundError:
        return "etcd3-fc"
    return "etcd3"


CONTESTANTS = (
    Contestant("dprims", "redis", "redis", ours),
    Contestant("redis-py", "redis", "redis", redis_py(0.1)),
    Contestant("redis-py, sleep=0.01", "redis", "redis", redis_py(0.01)),
    Contestant("python-redis-lock", "redis", "redis_lock", python_redis_lock),
    Contestant("pottery", "redis", "pottery", pottery),
    Contestant("tooz", "redis", "tooz", tooz),
    Contestant("dprims", "etcd", "etcd3", ours),
    Contestant("etcd3-fc", "etcd", _etcd3_is_fc(), etcd3_fc),
    Contestant("etcd3gw", "etcd", "etcd3gw", etcd3gw),
    Contestant("tooz", "etcd", "tooz", tooz),
    Contestant("dprims", "tcpstore", "torch", ours),
    Contestant("counter that backs off", "tcpstore", "torch", counter_lock),
)
