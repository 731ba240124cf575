"""``dprims doctor``: what is wrong with a set-up, and what to do about it.

Facts are gathered with bounds (:mod:`~dprims.doctor.gather`) and judged by pure functions
(:mod:`~dprims.doctor.checks`). It needs neither torch nor typer nor rich: ``python -m dprims.doctor``
runs with nothing but Python, for set-ups that are that broken.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..backend import ENVIRONMENT, schemes
from ..exceptions import DprimsError

if TYPE_CHECKING:
    from .findings import Finding

__all__ = ["BadUrl", "examine"]


class BadUrl(DprimsError, ValueError):
    """What was given is no URL of a backend."""


def examine(url: str | None = None) -> list[Finding]:
    """Look at this machine and at the backend at *url* (None: ``$DPRIMS_BACKEND``, if it is set).

    Takes seconds, and ends also when nothing answers. Changes nothing but a lock of its own, which it takes
    and gives back. No finding has a secret in it. BadUrl for what is no URL of a known scheme.
    """
    from .checks import diagnose
    from .gather import gather
    from .report import without_secrets
    from .secrets import secrets_of, shown

    url = url or os.environ.get(ENVIRONMENT)
    if url is not None and (url.partition("://")[1] == "" or url.partition("://")[0] not in schemes()):
        known = ", ".join(schemes())
        raise BadUrl(f"backend URL is {shown(url)!r}; expected scheme://..., one of {known}")
    findings = diagnose(gather(url, os.environ))
    return without_secrets(findings, secrets_of(url) if url else set())
