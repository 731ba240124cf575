"""Connections to the leader's store, kept: where names resolve slowly, opening one takes seconds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Clients"]


class Clients:
    """Lends clients of one store, each to one thread at a time, and opens another only when none is idle.

    A client of a torch store is one connection under one lock, so a call that blocks on it blocks everybody
    who shares it. One that was in use when its borrower failed may be stuck, and is not lent again.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self._idle: list[Any] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, prefix: str = "") -> Iterator[Any]:
        """A client for the body, whose keys begin with *prefix*."""
        with self._lock:
            client = self._idle.pop() if self._idle else None
        if client is None:
            client = self.store.clone()
        yield _below(prefix, client)
        with self._lock:
            self._idle.append(client)


def _below(prefix: str, client: Any) -> Any:
    if not prefix:
        return client
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix, client)
