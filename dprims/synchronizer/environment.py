"""What torch reads from the environment that decides over a weight group's life.

One variable is refused. Three are set while torch makes a group, and are then again what they were: torch has
no other way to say for one group what is not to hold for those of the training.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""Its name, and what it was called before: torch still reads both."""

FORBEARING = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
"""With these torch's watchdog leaves a group that fails to its owner.

By default it ends the process a minute after an operation has failed, whether or not the group was aborted
in the meantime, and has the monitor of the process's first group, which may be the training's, end it after
eight. Both are for programs in which nobody else looks.
"""

_ON = ("1", "true", "yes", "on", "y", "t")
_lock = threading.Lock()


def is_on(value: str) -> bool:
    """Whether torch takes this value for yes."""
    return value.strip().lower() in _ON


def blocking_wait(environ: Mapping[str, str]) -> str | None:
    """The name of the variable that has torch block in waits; None where none does."""
    return next((name for name in BLOCKING_WAIT if is_on(environ.get(name, ""))), None)


@contextmanager
def forbearing(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Groups that are made in the body are not watched by torch to the process's death."""
    with _lock:
        before = {name: environ.get(name) for name in FORBEARING}
        environ.update(FORBEARING)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del environ[name]
                else:
                    environ[name] = value
