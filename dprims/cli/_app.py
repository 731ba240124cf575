"""The typer application: what all commands share, and how they are found."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from .. import __version__, cli


def command(arguments: Sequence[str]) -> Any:
    """The command line as it is when *arguments* are asked for: a click command that parses and runs."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_options)
    for name in _needed(arguments):
        found = getattr(import_module(f"{cli.__name__}.{name}"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; wrong use prints one line and gives 2.

    Without arguments it is the help."""
    try:
        status = command(arguments).main(
            list(arguments) or ["--help"], prog_name="dprims", standalone_mode=False
        )
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        asked = context.command_path if context else "dprims"
        message = " ".join(error.format_message().split())
        print(f"{asked}: {message} ({asked} --help says more)", file=sys.stderr)
        return error.exit_code
    return status if isinstance(status, int) else 0


def _show_version(wanted: bool) -> None:
    if wanted:
        print("dprims", __version__)
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Distributed primitives for reinforcement-learning engines."""


def _needed(arguments: Sequence[str]) -> list[str]:
    """The command that is asked for, so that no other one is imported; all when none is."""
    names = [found.name for found in pkgutil.iter_modules(cli.__path__) if not found.name.startswith("_")]
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    return [asked] if asked in names else sorted(names)
