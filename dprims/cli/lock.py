"""``dprims lock``: run a command under a lock, see who holds what, and break a lock."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..backend import Backend, Owner, check_name, connect
from ..lock import DistributedLock
from ..record import owner_of
from ._columns import columns, one_line
from ._output import give_up
from ._under_lock import run_under, signals
from ._urls import URL_HELP, Missing, backend_url, is_url, seen_by_others, url_and

lock = typer.Typer(help="Run a command under a lock; list, show and break locks.", no_args_is_help=False)

Url = Annotated[str | None, typer.Argument(metavar="URL", help=URL_HELP, show_default=False)]
Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="The lock's name.  [required]", show_default=False)
]
Namespace = Annotated[str, typer.Option(help="Whose locks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@lock.command(context_settings={"allow_interspersed_args": False})
def run(
    url: Url = None,
    name: Name = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND", help="What to run, and its own arguments.  [required]", show_default=False
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for the lock; without it, for ever.")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Fail at once when the lock is held.")] = False,
    ttl: Annotated[float, typer.Option(help="Seconds after which a dead holder's lock passes on.")] = 10.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds between SIGTERM and SIGKILL when the lock is lost.")
    ] = 10.0,
    label: Annotated[str, typer.Option(help="Shown to others who ask for the holder.")] = "",
    namespace: Namespace = "dprims",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON after what the command printed.")
    ] = False,
) -> None:
    """Run COMMAND while holding the lock NAME, like flock.

    Exits as COMMAND does, with 128+n for signal n. Options come before URL and NAME: all that follows
    NAME, with or without --, belongs to COMMAND. A first argument without :// is the NAME.

    COMMAND finds the fencing token in DPRIMS_TOKEN. Signals are passed on to it. When the lock is lost,
    it is ended (SIGTERM, then SIGKILL) and the status is 75; when the lock is not had in time, 1.
    """
    if no_wait and timeout is not None:
        raise typer.BadParameter("cannot be used with --timeout", param_hint="--no-wait")
    where, name, command = _words([word for word in (url, name) if word is not None] + (command or []))
    with signals() as inbox, connect(seen_by_others(where)) as backend:
        guarded = DistributedLock(
            name,
            backend,
            namespace=namespace,
            ttl=ttl,
            timeout=0 if no_wait else timeout,
            label=label or command[0],
        )
        outcome = run_under(guarded, command, grace, inbox)
    if as_json:
        try:
            typer.echo(json.dumps(asdict(outcome)))
        except OSError as error:  # the command has run: its status is worth more
            give_up(error, "dprims lock run")
    raise typer.Exit(outcome.status)


@lock.command()
def ls(
    url: Url = None,
    prefix: Annotated[
        str | None, typer.Argument(metavar="PREFIX", help="Only names that start so.", show_default=False)
    ] = None,
    namespace: Namespace = "dprims",
    as_json: AsJson = False,
) -> None:
    """List the locks that are held, with their holders."""
    if prefix is None and url is not None and not is_url(url):
        url, prefix = None, url
    prefix = prefix or ""
    start = f"{check_name('namespace', namespace)}/"
    with connect(backend_url(url)) as backend:
        held = {place.name.removeprefix(start): owner_of(place) for place in backend.held(start + prefix)}
    if as_json:
        typer.echo(json.dumps([{"name": name, **_data(owner)} for name, owner in held.items()]))
    elif not held:
        typer.echo(
            f"dprims lock ls: no lock {_that_starts(prefix)}is held in namespace {namespace}", err=True
        )
    else:
        rows = ((name, owner.token, owner, _ago(owner)) for name, owner in held.items())
        typer.echo(columns(("NAME", "TOKEN", "HOLDER", "ASKED"), rows))


@lock.command()
def show(
    url: Url = None, name: Name = None, namespace: Namespace = "dprims", as_json: AsJson = False
) -> None:
    """Show who holds the lock NAME, and who waits for it, in order."""
    where, name = url_and(url, name, "NAME")
    with connect(where) as backend:
        owner, waiters = _look(backend, namespace, name)
    if as_json:
        data = {"name": name, "owner": owner and _data(owner), "waiters": [_data(one) for one in waiters]}
        typer.echo(json.dumps(data))
        return
    if owner is None:
        typer.echo(f"{name} is free")
    else:
        holder = one_line(str(owner))
        typer.echo(f"{name} is held by {holder} since {_ago(owner)}, token {owner.token}")
    for place, waiter in enumerate(waiters, 1):
        typer.echo(f"{place:3d}. {one_line(str(waiter))}, waiting since {_ago(waiter)}")


@lock.command("break")
def break_(
    url: Url = None,
    name: Name = None,
    token: Annotated[
        int | None, typer.Option(help="Break only the holding with this token.", show_default=False)
    ] = None,
    namespace: Namespace = "dprims",
    as_json: AsJson = False,
) -> None:
    """Take the lock NAME from its holder, as if that had died.

    The next waiter has it then. The holder learns so at its next heartbeat and may work on until then:
    only the token protects the resource. Exit status 1 when the lock is not held, or not under that token.
    """
    where, name = url_and(url, name, "NAME")
    with connect(where) as backend:
        owner, _ = _look(backend, namespace, name)
        held = None if owner is None else owner.token
        done = held is not None and token in (None, held) and backend.evict(f"{namespace}/{name}", held)
    if as_json:
        typer.echo(json.dumps({"name": name, "broken": done, "owner": owner and _data(owner)}))
    elif done:
        typer.echo(f"{name} was taken from {one_line(str(owner))}")
    else:
        otherwise = f"held with token {held}, not {token}" if held and token else "not held"
        typer.echo(f"dprims lock break: {name} is {otherwise}", err=True)
    raise typer.Exit(0 if done else 1)


def _words(words: list[str]) -> tuple[str, str, list[str]]:
    """The URL, the name and the command of ``run``, from all its arguments."""
    url = words.pop(0) if words and is_url(words[0]) else None
    name, *command = words or [""]
    if command[:1] == ["--"]:
        del command[0]
    elif command and command[0].startswith("-"):
        raise typer.BadParameter(
            f"got {command[0]!r}; options come before URL and NAME", param_hint="COMMAND"
        )
    for what, missing in (("NAME", not words), ("COMMAND", not command)):
        if missing:
            raise Missing(what)
    if name.startswith("-"):
        raise typer.BadParameter(f"got {name!r}; options come before URL and NAME", param_hint="NAME")
    return backend_url(url), name, command


def _look(backend: Backend, namespace: str, name: str) -> tuple[Owner | None, list[Owner]]:
    """The holder of a lock, if there is one, and its waiters, as they were at one moment."""
    full_name = f"{check_name('namespace', namespace)}/{check_name('lock name', name)}"
    places = [owner_of(place) for place in backend.queue(full_name)]
    held = bool(places) and places[0].token is not None
    return (places[0] if held else None), places[held:]


def _that_starts(prefix: str) -> str:
    return f"that starts with {prefix!r} " if prefix else ""


def _data(owner: Owner) -> dict[str, Any]:
    return asdict(owner)


def _ago(owner: Owner) -> str:
    """How long ago its own host's clock says it asked."""
    seconds = max(time.time() - owner.since, 0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
