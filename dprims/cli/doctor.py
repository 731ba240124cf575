"""``dprims doctor``: what is wrong with this machine or a backend, and what to do about it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..doctor import examine
from ..doctor.report import as_json, show, status_of


def doctor(
    url: Annotated[
        str | None,
        typer.Argument(help="The backend; without it $DPRIMS_BACKEND, or none.", show_default=False),
    ] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 for warnings, too.")] = False,
) -> None:
    """Say what is wrong with this machine or a backend.

    Looks at Python, torch, NCCL, GPUs, the environment, names, addresses and a backend.

    Exit status 0 when nothing is, 1 for an error. Takes seconds, also when nothing answers. Sets nothing;
    of a backend it takes a lock of its own and gives it back. docs/doctor.md explains each line.
    """
    findings = examine(url)
    if as_json_:
        typer.echo(as_json(findings))
    else:
        show(findings, sys.stdout)
    raise typer.Exit(status_of(findings, strict=strict))
