"""The table on docs/backends.md is what the backends say; ``python`` this file writes it anew."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from dprims.backend import _BUILT_IN, Guarantees

PAGE = Path(__file__).parents[1] / "docs" / "backends.md"
START = "<!-- guarantees: written by python tests/test_docs_backends.py -->\n"
END = "<!-- end of guarantees -->"


def guarantees() -> dict[str, Guarantees]:
    """By the scheme under which each backend is known."""
    found: dict[str, Guarantees] = {}
    for scheme, path in _BUILT_IN.items():
        module, _, name = path.partition(":")
        stated = getattr(import_module(module), name).guarantees
        if stated not in found.values():
            found[scheme] = stated
    return found


def table() -> str:
    backends = guarantees()
    rows = {
        "": [f"`{scheme}`" for scheme in backends],
        "seen by": [_scope(one.scope) for one in backends.values()],
        "locks survive a restart of the server": [_yes(one.survives_restart) for one in backends.values()],
        "tokens grow even if its data is lost": [
            _yes(one.tokens_survive_restart) for one in backends.values()
        ],
        "shortest ttl": [f"{one.min_ttl:g} s" for one in backends.values()],
        "a killed holder's lock passes on after": [one.detects_killed_holder for one in backends.values()],
        "a ttl is measured by": [one.clock for one in backends.values()],
        "not promised": [one.limits for one in backends.values()],
    }
    lines = [f"| {title} | " + " | ".join(cells) + " |" for title, cells in rows.items()]
    lines.insert(1, "|---" * (len(backends) + 1) + "|")
    return "\n" + "\n".join(lines) + "\n\n"


def page_with(text: str) -> str:
    before, _, rest = PAGE.read_text().partition(START)
    return before + START + text + END + rest.partition(END)[2]


def _scope(scope: str) -> str:
    return {"process": "threads of one process", "hosts": "every host that reaches the server"}[scope]


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def test_the_page_says_what_the_backends_promise() -> None:
    text = PAGE.read_text()
    assert text.count(START) == text.count(END) == 1
    assert text == page_with(table()), f"out of date: run python tests/{Path(__file__).name}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
