"""What a command may be given as the URL of a backend."""

from __future__ import annotations

import typer


def seen_by_others(url: str) -> str:
    """*url*, unless other processes would not see what this one finds or leaves there."""
    if url.startswith("memory:"):
        raise typer.BadParameter(f"{url!r} is seen by one process alone", param_hint="URL")
    return url
