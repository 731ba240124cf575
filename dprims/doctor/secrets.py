"""Keeps passwords out of what is printed."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote

from ..backend import split_url

_SECRET = ("pass", "secret", "token")
LEAST = 4
"""A shorter secret is not looked for in texts: it would be found in every word."""


def shown(url: str) -> str:
    """*url* without what is secret in it: the password, and options that are named after one."""
    from ..backends._urls import without_password

    return without_password(url)


def secrets_of(url: str) -> set[str]:
    """The secrets in a URL, as they stand there and as they are meant."""
    parts = split_url(url)
    login = parts.netloc.rpartition("@")[0]
    _, colon, password = login.partition(":")
    found = {password} if colon else set()
    for option in parts.query.split("&"):
        name, _, value = option.partition("=")
        if any(word in name.lower() for word in _SECRET):
            found.add(value)
    found |= {unquote(one) for one in found}
    found |= {v for n, v in parse_qsl(parts.query) if any(word in n.lower() for word in _SECRET)}
    return found - {""}


def scrub(text: str, secrets: set[str]) -> str:
    """*text* with each secret that stands in it replaced."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= LEAST:
            text = text.replace(secret, "***")
    return text
