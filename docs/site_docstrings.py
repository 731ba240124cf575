"""Docstrings as they are read in a terminal, made into Markdown: roles become links, ``::`` a code block."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Function, Object

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):`(~?)([^`]+)`")


class Docstrings(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called once for every object whose source was read."""
        if obj.docstring is None:
            return
        scope = obj.parent if isinstance(obj, Function) and obj.parent is not None else obj
        obj.docstring.value = markdown(obj.docstring.value, scope)


def markdown(text: str, scope: Object) -> str:
    """*text* with its roles as links where the site has their target, seen from *scope*."""

    def link(role: re.Match[str]) -> str:
        short, name = role.groups()
        shown = name.rpartition(".")[2] if short else name
        try:
            target = scope.resolve(name.partition(".")[0]) + name[len(name.partition(".")[0]) :]
        except Exception:  # noqa: BLE001 - griffe raises several; a name that it cannot follow stands for itself
            target = name
        return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'

    text = _ROLE.sub(link, text)
    text = re.sub(r"^::$", "", text, flags=re.M)
    return re.sub(r"::$", ":", text, flags=re.M)
