"""``dprims status``: what goes on in a fleet, from its backend alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..backend import connect
from ..exceptions import BackendError
from ..status import Observer, Snapshot
from ._urls import URL_HELP, backend_url, seen_by_others

if TYPE_CHECKING:
    from rich.console import RenderableType


def status(
    url: Annotated[str | None, typer.Argument(metavar="URL", help=URL_HELP, show_default=False)] = None,
    namespace: Annotated[str, typer.Option(help="Whose locks, rosters and refits.")] = "dprims",
    fleet: Annotated[
        list[str] | None,
        typer.Option(
            help="Also show this fleet: of those in which nobody lives, only 'refit' is found by itself. "
            "May be given again."
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once, then end; without a terminal it always does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Look once and print one JSON object.")] = False,
    web: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="Serve a page instead; 0 takes a free port."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where --web listens. There is no password: keep it on loopback.")
    ] = "127.0.0.1",
) -> None:
    """Show the locks, rosters and refits on a backend.

    Again and again until Ctrl-C. Changes nothing.

    Locks: holder, token, how long, who waits. Rosters: members and when each was last heard from. Refits:
    epoch, version, shards and why some are absent, the last outage and the last sync.

    Exit status 1 when one look finds nothing of a --fleet.
    """
    if web is not None and (as_json or once):
        raise typer.BadParameter("cannot be used with --json or --once", param_hint="--web")
    with connect(seen_by_others(backend_url(url))) as backend:
        observer = Observer(backend, namespace, tuple(fleet or ()))
        if as_json:
            snapshot = observer.look()
            typer.echo(json.dumps(snapshot.to_json()))
            _check_fleets(snapshot, fleet or ())
        elif web is not None:
            from ._status_web import serve

            serve(observer, host, web, interval)
        elif once or not sys.stdout.isatty():
            snapshot = observer.look()
            _print_once(snapshot)
            _check_fleets(snapshot, fleet or ())
        else:
            _watch(observer, interval)


def _check_fleets(snapshot: Snapshot, asked: Sequence[str]) -> None:
    """Say which of the fleets that were *asked* for are not there, and end with 1 if one is not."""
    unknown = [view.name for view in snapshot.fleets if view.name in asked and not snapshot.knows(view)]
    for name in unknown:
        typer.echo(f"dprims status: no fleet {name!r} in namespace {snapshot.namespace}", err=True)
    if unknown:
        raise typer.Exit(1)


def _print_once(snapshot: Snapshot) -> None:
    from rich.console import Console

    from ._status_text import render

    console = Console(highlight=False)
    if not console.is_terminal:  # nobody's screen limits the width
        console = Console(highlight=False, width=200)
    console.print(render(snapshot))


def _watch(observer: Observer, interval: float) -> None:
    """Redraw the screen until it is interrupted; a backend that does not answer is shown, and asked again."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from ._status_text import render

    seen: RenderableType = render(observer.look())  # before the screen changes, so that a failure is read
    with Live(seen, console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                seen = render(observer.look())
                live.update(seen, refresh=True)
            except BackendError as error:
                said = Text(" ".join(f"{type(error).__name__}: {error}".split()), "bold red")
                live.update(Group(said, "", seen), refresh=True)
