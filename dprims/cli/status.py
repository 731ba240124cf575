"""``dprims status``: what goes on in a fleet, from its backend alone."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ..backend import connect
from ..exceptions import BackendError
from ..status import Observer
from ._urls import URL_HELP, backend_url, seen_by_others

if TYPE_CHECKING:
    from rich.console import RenderableType


def status(
    url: Annotated[str | None, typer.Argument(metavar="URL", help=URL_HELP, show_default=False)] = None,
    namespace: Annotated[str, typer.Option(help="Whose locks, rosters and refits.")] = "dprims",
    fleet: Annotated[
        list[str] | None, typer.Option(help="A fleet to show even when nothing stands of it.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once; so it is without a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Look once and print one JSON object.")] = False,
    web: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="Serve a page instead; 0 takes a free port."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where --web listens. There is no password: keep it on loopback.")
    ] = "127.0.0.1",
) -> None:
    """Show the locks, rosters and refits of a fleet, again and again until Ctrl-C. Changes nothing.

    Locks: holder, token, how long, who waits. Rosters: members and when each was last heard from. Refits:
    epoch, version, shards and why some are absent, the last outage and the last sync.
    """
    if web is not None and (as_json or once):
        raise typer.BadParameter("cannot be used with --json or --once", param_hint="--web")
    with connect(seen_by_others(backend_url(url))) as backend:
        observer = Observer(backend, namespace, tuple(fleet or ()))
        if as_json:
            typer.echo(json.dumps(observer.look().to_json()))
        elif web is not None:
            from ._status_web import serve

            serve(observer, host, web, interval)
        elif once or not sys.stdout.isatty():
            _print_once(observer)
        else:
            _watch(observer, interval)


def _print_once(observer: Observer) -> None:
    from rich.console import Console

    from ._status_text import render

    console = Console(highlight=False)
    if not console.is_terminal:  # nobody's screen limits the width
        console = Console(highlight=False, width=200)
    console.print(render(observer.look()))


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
