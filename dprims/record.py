"""The record that a holder or waiter leaves in a queue, so that others see who it is."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from typing import Any

from .backend import Owner, Place
from .exceptions import BackendMisconfigured

MAX_RECORD = 16 * 1024


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
    except (TypeError, ValueError) as error:
        raise BackendMisconfigured(f"payload {payload!r} is not a JSON value: {error}") from None
    if len(record) > MAX_RECORD:
        raise BackendMisconfigured(
            f"label and payload take {len(record)} bytes; expected at most {MAX_RECORD}"
        )
    return record


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
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else 0.0  # type: ignore[return-value]


def payload_of(place: Place) -> object:
    """What the member at *place* wanted others to know; None when nothing."""
    return _fields(place).get("payload")


def _fields(place: Place) -> dict[str, Any]:
    try:
        fields = json.loads(place.record)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _rank() -> int | None:
    """This process's rank: torch's when it is initialised, else the launcher's ``RANK``."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None
