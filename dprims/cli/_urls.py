"""What a command may be given as the URL of a backend, and where that is from when it is left out."""

from __future__ import annotations

import os

import typer

from ..backend import ENVIRONMENT

URL_HELP = f"redis://, etcd://, tcpstore:// ...; may be left out when ${ENVIRONMENT} is set."


class Missing(typer.BadParameter):
    """An argument was left out: *what*, and why that was no use."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(f"Missing argument '{what}'{why}.")

    def format_message(self) -> str:
        """Return the message as it is."""
        return self.message


def backend_url(given: str | None) -> str:
    """*given*, or ``$DPRIMS_BACKEND`` when that is None."""
    url = os.environ.get(ENVIRONMENT, "") if given is None else given
    if not url:
        raise Missing("URL", f", and {ENVIRONMENT} is not set")
    return url


def url_and(first: str | None, second: str | None, what: str) -> tuple[str, str]:
    """The URL and the *what* (``NAME``) of a command ``[URL] NAME``, given its two arguments."""
    if second is None and (first is None or is_url(first)):
        raise Missing(what)
    return (backend_url(None), first or "") if second is None else (backend_url(first), second)


def is_url(word: str) -> bool:
    """Whether *word* is meant as a URL, where it could be a name."""
    return "://" in word


def seen_by_others(url: str) -> str:
    """*url*, unless other processes would not see what this one finds or leaves there."""
    if url.startswith("memory:"):
        shown = "memory://..." if set(url) & set("@?#") else url  # there may be secrets in it
        raise typer.BadParameter(f"{shown!r} is seen by one process alone", param_hint="URL")
    return url
