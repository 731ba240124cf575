"""The form of a rule: a code, how bad it is, what was seen in a sentence, and in another what to do."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "note", "warning", "error"]
"""``error``: locks or refits will not work. ``warning``: they work worse, or fail in some case.
``note``: worth knowing."""
Topic = Literal["system", "torch", "environment", "network", "packages", "backend"]


class Rule(NamedTuple):
    """One thing that the doctor can find; *says* and *do* have the facts in braces."""

    topic: Topic
    code: str
    level: Level
    says: str
    do: str = ""
