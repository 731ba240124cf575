"""The variable of the environment that no weight group over NCCL can live with. It is read and never set."""

from __future__ import annotations

from collections.abc import Mapping

BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""Its name, and what it was called before: torch still reads both."""

_ON = ("1", "true", "yes", "on", "y", "t")


def is_on(value: str) -> bool:
    """Whether torch takes this value for yes."""
    return value.strip().lower() in _ON


def blocking_wait(environ: Mapping[str, str]) -> str | None:
    """The name of the variable that has torch block in waits; None where none does."""
    return next((name for name in BLOCKING_WAIT if is_on(environ.get(name, ""))), None)
