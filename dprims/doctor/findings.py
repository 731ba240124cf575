"""What ``dprims doctor`` can find: every line that it may print, and what to do about it.

The table on ``docs/doctor.md`` is written from :data:`RULES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ._rules_backend import BACKEND
from ._rules_environment import ENVIRONMENT
from ._rules_host import HOST
from .rule import Level, Rule

__all__ = ["LEVELS", "RULES", "Finding", "Level", "Rule", "find"]

LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")

RULES: dict[str, Rule] = {rule.code: rule for rule in (*HOST, *ENVIRONMENT, *BACKEND)}
"""By code. A code is stable: scripts may look for it in ``--json``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    topic: Literal["system", "torch", "environment", "network", "packages", "backend"]
    code: str
    level: Level
    what: str
    do: str
    """Empty where there is nothing to do."""


def find(code: str, **facts: Any) -> Finding:
    """The finding of rule *code*, with *facts* in its sentences; KeyError for an unknown code or fact."""
    rule = RULES[code]
    return Finding(rule.topic, code, rule.level, rule.says.format(**facts), rule.do.format(**facts))
