"""Connections to the leader's store, kept: where names resolve slowly, opening one takes seconds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Clients"]

PROBE = "dprims/probe"
"""A key that nobody writes."""


class Clients:
    """Lends clients of one store, each to one thread at a time, and opens another only when none is idle.

    A client of a torch store is one connection under one lock, so a call that blocks on it blocks everybody
    who shares it. One that was in use when its borrower failed may be stuck, and one whose connection was cut
    while it lay idle is of no use: they are not lent again.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self._idle: list[Any] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, prefix: str = "") -> Iterator[Any]:
        """A client for the body, whose keys begin with *prefix*."""
        client = self._take() or self.store.clone()
        yield _below(prefix, client)
        with self._lock:
            self._idle.append(client)

    def _take(self) -> Any:
        """An idle client that still reaches the store; None when there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                client = self._idle.pop()
            with contextlib.suppress(RuntimeError):  # torch's errors of a connection that is gone
                client.check([PROBE])
                return client


def _below(prefix: str, client: Any) -> Any:
    if not prefix:
        return client
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix, client)
