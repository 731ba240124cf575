"""Standard output and error, so that nothing about them ends a command in a traceback."""

from __future__ import annotations

import errno
import io
import os
import sys

_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE)


def prepare() -> None:
    """Have stdout write "?" for what its encoding lacks, and what was closed lead nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, _nowhere())
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def is_unwritten(error: OSError) -> bool:
    """Whether *error* is what a full disk, or a device that takes no more, answers to output."""
    return error.filename is None and error.errno in _UNWRITTEN


def flushed() -> bool:
    """Whether stdout takes all that was written; when it does not, :func:`give_up` has been called."""
    try:
        sys.stdout.flush()
    except OSError as error:
        give_up(error)
        return False
    return True


def give_up(error: OSError, who: str = "dprims") -> None:
    """Say that stdout takes no more, unless its reader has gone, and write to nowhere from now on."""
    if error.errno != errno.EPIPE:
        print(f"{who}: cannot write its output: {error.strerror or error}", file=sys.stderr)
    sys.stdout = _nowhere()


def encodes(text: str) -> bool:
    """Whether stdout can show *text*."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _nowhere() -> io.TextIOWrapper:
    return open(os.devnull, "w", encoding="utf-8", errors="replace")
