"""The record that a holder or waiter leaves in a queue, so that others see who it is."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from typing import Any, TypeGuard

from .backend import Owner, Place
from .exceptions import BackendMisconfigured

MAX_RECORD = 16 * 1024
MAX_DEPTH = 100
"""How deep lists and objects may stand in one another: deeper, some reader's JSON fails."""


def make_record(label: str = "", payload: object = None, thread: str | None = None) -> bytes:
    """Who *thread* (None: this one) is, with what it wants others to know: *payload* is any JSON value."""
    fields = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "thread": threading.current_thread().name if thread is None else thread,
        "rank": _rank(),
        "since": time.time(),
        "label": label,
    }
    if payload is not None:
        fields["payload"] = payload
    try:
        record = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise BackendMisconfigured(_TOO_DEEP) from None
        raise BackendMisconfigured(f"payload {payload!r} is not a JSON value: {error}") from None
    if _is_deep(fields, MAX_DEPTH):
        raise BackendMisconfigured(_TOO_DEEP)
    if len(record) > MAX_RECORD:
        raise BackendMisconfigured(
            f"label and payload take {len(record)} bytes; expected at most {MAX_RECORD}"
        )
    return record


_TOO_DEEP = f"payload is nested too deep; expected at most {MAX_DEPTH - 1} lists and objects in one another"


def _is_deep(value: object, limit: int) -> bool:
    """Whether more than *limit* lists and objects stand in one another in *value*."""
    if not isinstance(value, dict | list | tuple):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not limit or any(_is_deep(one, limit - 1) for one in inner)


def owner_of(place: Place) -> Owner:
    """The owner in a queue's *place*. A record that another program wrote reads as an unknown owner."""
    fields = _fields(place)
    rank = fields.get("rank")
    return Owner(
        host=_text(fields.get("host"), "unknown"),
        pid=int(_number(fields.get("pid"))),
        thread=_text(fields.get("thread")),
        rank=rank if type(rank) is int else None,
        since=_number(fields.get("since")),
        token=place.token,
        label=_text(fields.get("label")),
    )


def _text(value: object, default: str = "") -> str:
    return value if isinstance(value, str) else default


def _number(value: object) -> float:
    return value if is_number(value) else 0.0


def is_number(value: object) -> TypeGuard[float]:
    """Whether *value* is a number, and one that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def payload_of(place: Place) -> object:
    """What the member at *place* wanted others to know; None when nothing."""
    return _fields(place).get("payload")


def _fields(place: Place) -> dict[str, Any]:
    try:
        fields = json.loads(place.record, parse_constant=_no_json, parse_float=_finite)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) and not _is_deep(fields, MAX_DEPTH) else {}


def _no_json(word: str) -> object:
    raise ValueError(word)


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(digits)
    return number


def _rank() -> int | None:
    """This process's rank: torch's when it is initialised, else the launcher's ``RANK``."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None
