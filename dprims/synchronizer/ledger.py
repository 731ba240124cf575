"""What a leader writes down in the backend beside its fenced cells: decisions, and whom it evicted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..exceptions import BackendError
from .protocol import decision_key, decode_decision, encode_decision, evicted_key

if TYPE_CHECKING:
    from ..backend import Backend
    from ..membership import Epoch

log = logging.getLogger("dprims.synchronizer.ledger")

VOID = b"0"
"""A mark that says nothing any more; no incarnation is 0."""


class Ledger:
    """One leader's decisions and marks, below *prefix* of *backend*."""

    def __init__(self, backend: Backend, prefix: str) -> None:
        self._backend, self._prefix = backend, prefix
        self._decided: dict[tuple[Epoch, int], str] = {}

    # -- decisions ------------------------------------------------------------------------------------

    def decide(self, epoch: Epoch, number: int, value: str) -> str:
        """Write a decision unless one stands there; what stands there. Raises BackendError."""
        key = self._decided[epoch, number] = decision_key(self._prefix, epoch, number)
        return decode_decision(self._backend.write_once(key, encode_decision(value)))

    def forget(self) -> None:
        """Delete every decision but the newest: nobody can be in doubt about them any more."""
        newest = max(self._decided, default=None)
        for cell, key in list(self._decided.items()):
            if cell != newest:
                try:
                    self._backend.delete(key)
                except BackendError as error:
                    log.debug("an old decision stays for now: %s", error)
                    return
                del self._decided[cell]

    # -- evictions ------------------------------------------------------------------------------------

    def mark(self, entries: Mapping[int, int]) -> None:
        """Write down that these incarnations by seat are evicted, before they are. Raises BackendError."""
        for seat, incarnation in entries.items():
            key, mine = evicted_key(self._prefix, seat), str(incarnation).encode()
            stands = self._backend.get(key)
            while (after := self._backend.compare_and_set(key, stands, mine)) != mine:
                stands = after

    def unmark(self, entries: Mapping[int, int]) -> None:
        """Void these marks, if they are still about these incarnations: their ttl has passed.

        A mark that stays, because the backend is away, costs a successor one more pause.
        """
        for seat, incarnation in entries.items():
            try:
                self._backend.compare_and_set(
                    evicted_key(self._prefix, seat), str(incarnation).encode(), VOID
                )
            except BackendError as error:
                log.debug("the mark of seat %d stays: %s", seat, error)

    def marked(self, seats: Iterable[int]) -> dict[int, int]:
        """The incarnations, by seat, that a leader evicted, maybe a moment ago. Raises BackendError."""
        found = {seat: self._backend.get(evicted_key(self._prefix, seat)) for seat in seats}
        return {seat: int(mark) for seat, mark in found.items() if mark is not None and mark != VOID}
