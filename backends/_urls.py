"""What of a backend's URL may be shown: in errors, in reprs, and so in logs."""

from __future__ import annotations

import re

_SECRET = re.compile(r"([?&][^=&]*(?:pass|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)


def without_password(url: str) -> str:
    """*url* without its password, and without the values of options that are named after one.

    The password ends at the last ``@``, whatever stands in it: one that was not escaped is not shown either.
    """
    scheme, separator, rest = _SECRET.sub(r"\1***", url).partition("://")
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{scheme}{separator}{user}{':***' if colon else ''}{at}{place}"


def why_not(url: str, error: object) -> str:
    """Why *url* cannot be read: *error*, unless that may quote a password that was not escaped."""
    login, _, _ = url.partition("://")[2].rpartition("@")
    if any(mark in login for mark in "/?#"):
        return "something in it is out of place; a /, ? or # in a password is written as %2F, %3F or %23"
    return str(error)
