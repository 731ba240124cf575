"""Checks of cells: written once, compared and set, waited for, fenced."""

from __future__ import annotations

import time
import uuid

from ..backend import Backend
from ._conformance import Suite, done, expect, result, results


class CellChecks(Suite):
    """What everything but a lock needs of a backend."""

    def test_cells_are_written_once(self) -> None:
        """compare_and_set from nothing: one writer wins, the others read what stands."""
        key = self._name("cell")
        expect(self.a.get(key) is None, "a cell nobody wrote has a value")
        got = results(self._pool.submit(self._either(i).write_once, key, b"%d" % i) for i in range(12))
        expect(len(set(got)) == 1, f"twelve writers of one cell read {set(got)}")
        expect(self.a.get(key) == self.b.get(key) == got[0], "get does not read what stands")

    def test_cells_compare_and_set(self) -> None:
        """A value is written only where what was expected stands; what stands is returned."""
        key, cas = self._name("cell"), self.a.compare_and_set
        expect(cas(key, b"x", b"y") is None, "a cell that is missing was said to have a value")
        expect(self.b.get(key) is None, "a compare_and_set that expected a value wrote where there was none")
        expect(cas(key, b"x", b"x") is None, "a missing cell was said to have the value it was compared with")
        expect(cas(key, None, b"one") == b"one", "a free cell was not written")
        expect(cas(key, None, b"two") == b"one", "compare_and_set(None) did not return what stands")
        expect(cas(key, b"two", b"three") == b"one", "a mismatch did not return what stands")
        expect(self.b.get(key) == b"one", "a compare_and_set that should have failed wrote")
        expect(self.b.compare_and_set(key, b"one", b"two") == b"two", "a match was not written")
        expect(cas(key, b"two", b"two") == b"two", "a value was not equal to itself")
        for value in (b"", b"\x00\xff\n ", bytes(range(256)) * 256):
            expect(cas(key, self.a.get(key), value) == value, f"{value[:8]!r}... was not written")
            expect(self.b.get(key) == value, f"{value[:8]!r}... is read otherwise")
        self.a.delete(key)
        self.a.delete(key)
        expect(self.b.get(key) is None, "a deleted cell has a value")
        expect(cas(key, b"", b"x") is None, "a deleted cell was taken for an empty one")

    def test_cells_count(self) -> None:
        """No update is lost when many compare and set at once."""
        key = self._name("cell")
        self.a.write_once(key, b"0")

        def add(backend: Backend) -> None:
            stands = backend.get(key) or b""
            while True:
                mine = b"%d %s" % (int(stands.split()[0]) + 1, uuid.uuid4().hex.encode())
                after = backend.compare_and_set(key, stands, mine)
                if after == mine:
                    return
                stands = after or b""

        results(self._pool.submit(add, self._either(i)) for i in range(24))
        total = (self.a.get(key) or b"").split()[0]
        expect(total == b"24", f"24 increments made {total!r}")

    def test_cells_are_waited_for(self) -> None:
        """wait returns a value as soon as there is one, and None when its time is up, not before."""
        key = self._name("cell")
        start = time.monotonic()
        expect(self.a.wait(key, 0.2) is None, "wait returned a value that nobody wrote")
        took = time.monotonic() - start
        expect(0.19 <= took < 0.2 + self.patience_s, f"wait of 0.2 s took {took:.3f} s")
        waits = [self._pool.submit(self._either(i).wait, key, self.long_s) for i in range(6)]
        expect(not done(waits[0], 0.3), "wait returned before there was a value")
        expect(self.a.get(key) is None, "a cell that is waited for has a value")
        expect(self.a.compare_and_set(key, b"x", b"y") is None, "a cell that is waited for has a value")
        expect(not done(waits[0], 0.2), "wait returned before there was a value")
        self.a.write_once(key, b"")
        for wait in waits:
            value = result(wait, self.patience_s, "wait, after the cell was written")
            expect(value == b"", f"wait returned {value!r}, expected an empty value")
        expect(self.b.wait(key, 0) == b"", "wait did not see a value that stands")
        self.b.delete(key)
        expect(self.b.wait(key, 0.05) is None, "wait returned the value of a deleted cell")

    def test_fenced_cells_go_forward_only(self) -> None:
        """write_fenced refuses a token lower than the highest that wrote."""
        key = self._name("cell")
        expect(self.a.read_fenced(key) is None, "a fenced cell that nobody wrote has a value")
        expect(self.a.write_fenced(key, b"five", 5) == 5, "the first fenced write was refused")
        expect(self.b.write_fenced(key, b"four", 4) == 5, "a lower token was not refused")
        expect(self.b.write_fenced(key, b"five:again", 5) == 5, "the same token was refused")
        expect(self.a.read_fenced(key) == (5, b"five:again"), "a fenced cell reads otherwise")
        results(self._pool.submit(self._either(i).write_fenced, key, b"%d" % i, i) for i in range(20))
        expect(
            self.a.read_fenced(key) == (19, b"19"),
            f"the highest token did not win: {self.a.read_fenced(key)}",
        )
