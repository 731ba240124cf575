"""Where the refit protocol keeps what outlives a leader, and how it is written there.

All keys live in the lock's backend, below a namespace. ``docs/protocol.md`` says who may write what.
"""

from __future__ import annotations

import json

from dprims.exceptions import RefitError
from dprims.membership import Epoch

from ._messages import ABORT, COMMIT, Version


def evicted_key(namespace: str, seat: int) -> str:
    """Return the cell that is written before a leader deletes a seat's roster entry."""
    return f"{namespace}/roster/{seat}/evicted"


def next_key(namespace: str) -> str:
    """Return the fenced cell with the highest version number that was reserved."""
    return f"{namespace}/refit/next"


def current_key(namespace: str) -> str:
    """Return the fenced cell with the version that the fleet had when a leader last said so."""
    return f"{namespace}/refit/current"


def decision_key(namespace: str, epoch: Epoch, number: int) -> str:
    """Return the write-once cell that decides one version of one epoch."""
    return f"{namespace}/refit/{epoch}/{number}/decision"


def encode_decision(value: str) -> bytes:
    """Return a decision as bytes: ``commit``, or ``abort: why`` cut to 1 KiB."""
    if value != COMMIT and not value.startswith(ABORT):
        raise RefitError(f"a decision is {COMMIT!r} or starts with {ABORT!r}, got {value!r}")
    return value.encode()[:1024]


def decode_decision(data: bytes) -> str:
    """Read a decision; RefitError when it is none."""
    value = data.decode(errors="ignore")
    if value != COMMIT and not value.startswith(ABORT):
        raise RefitError(f"not a decision: {data[:80]!r}")
    return value


def encode_version(version: Version) -> bytes:
    """Return a version as canonical JSON, for ``refit/next`` and ``refit/current``."""
    return json.dumps(version, separators=(",", ":")).encode()


def decode_version(data: bytes) -> Version:
    """Read a version; RefitError when it is none."""
    try:
        number, digest = json.loads(data)
        return Version(int(number), str(digest))
    except (ValueError, TypeError) as error:
        raise RefitError(f"not a version: {data[:80]!r}") from error
