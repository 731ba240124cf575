"""``dprims roster``: who is in a roster right now."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ..backend import connect
from ..roster import Roster
from ._columns import columns
from ._urls import URL_HELP, url_and


def roster(
    url: Annotated[str | None, typer.Argument(metavar="URL", help=URL_HELP, show_default=False)] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The roster's name.  [required]", show_default=False)
    ] = None,
    namespace: Annotated[str, typer.Option(help="Whose rosters.")] = "dprims",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the live members of the roster NAME.

    Of each: incarnation, process and payload.
    """
    where, name = url_and(url, name, "NAME")
    with connect(where) as backend:
        members = Roster(name, backend, namespace=namespace).members().values()
    if as_json:
        typer.echo(json.dumps([asdict(member) for member in members]))
    elif not members:
        typer.echo(f"dprims roster: nobody is in roster {name} of namespace {namespace}", err=True)
    else:
        rows = (
            (one.name, one.incarnation, one.owner, "" if one.payload is None else json.dumps(one.payload))
            for one in members
        )
        typer.echo(columns(("MEMBER", "INCARNATION", "PROCESS", "PAYLOAD"), rows))
