"""Rows of text in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def columns(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """*head* and *rows* as lines, each column as wide as its widest cell."""
    cells = [list(head), *([one_line(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def one_line(text: str) -> str:
    """*text* with what does not print (line ends, a terminal's escape codes) written as Python writes it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
