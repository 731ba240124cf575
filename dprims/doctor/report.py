"""The findings as people and programs read them, and what they come to."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TextIO

from .findings import LEVELS, Finding
from .secrets import scrub

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
WIDTH = 110


def without_secrets(findings: Sequence[Finding], secrets: set[str]) -> list[Finding]:
    """The same, with no secret in any text."""
    return [replace(one, what=scrub(one.what, secrets), do=scrub(one.do, secrets)) for one in findings]


def worst(findings: Sequence[Finding]) -> str:
    """The gravest level that was found."""
    return max((one.level for one in findings), key=LEVELS.index, default="ok")


def status_of(findings: Sequence[Finding], *, strict: bool = False) -> int:
    """The exit status: 1 for an error, and where *strict* for a warning, too."""
    return int(worst(findings) in (("warning", "error") if strict else ("error",)))


def as_json(findings: Sequence[Finding]) -> str:
    """One JSON object: how grave it is, and the findings."""
    return json.dumps({"worst": worst(findings), "findings": [asdict(one) for one in findings]})


def show(findings: Sequence[Finding], out: TextIO) -> None:
    """Print a table where *out* is a terminal and rich is installed, else lines."""
    if out.isatty():
        try:
            _show_table(findings, out)
            return
        except ImportError:
            pass
    out.write(as_text(findings))


def as_text(findings: Sequence[Finding]) -> str:
    """A line a finding, wrapped, with what to do below it; the sum at the end."""
    lines: list[str] = []
    for topic in dict.fromkeys(one.topic for one in findings):
        lines.append(topic)
        for one in findings:
            if one.topic == topic:
                lines += _wrapped(f"  {one.level:8}", f"{one.what} [{one.code}]")
                lines += _wrapped(f"  {'':8}", f"-> {one.do}") if one.do else []
    return "\n".join([*lines, "", summary(findings)]) + "\n"


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each level."""
    count = {level: sum(one.level == level for one in findings) for level in LEVELS}
    grave = [f"{n} {level}{'' if n == 1 else 's'}" for level, n in reversed(count.items()) if level != "ok"]
    return ", ".join([*grave, f"{count['ok']} fine"])


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def _show_table(findings: Sequence[Finding], out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold", ratio=1)
    before = ""
    for one in findings:
        said = Text(one.what)
        said.append(f"  {one.code}", style="dim")
        if one.do:
            said.append(f"\n-> {one.do}", style=STYLES[one.level] if one.level != "note" else "")
        topic = one.topic if one.topic != before else ""
        table.add_row(Text(topic, style="bold"), Text(one.level, style=STYLES[one.level]), said)
        before = one.topic
    console = Console(file=out)
    console.print(table)
    console.print(Text(summary(findings), style=STYLES[worst(findings)]))
