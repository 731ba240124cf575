"""The command line ``dprims``; it needs the extra ``cli``.

Every other module of this package whose name has no leading underscore is one command, and is imported
only when it is asked for: ``dprims/cli/mesh.py`` defines ``mesh``, a function that typer turns into the
command, or a ``typer.Typer`` with commands of its own.

Exit status: 0 done, 1 failed, 2 used wrongly, 130 interrupted; a command chooses another one with
``typer.Exit``. Wrong use, and each :class:`~dprims.DprimsError`, is one line on stderr. Those that are a
ValueError or an ImportError too count as wrong use.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..backend import need
from ..exceptions import DprimsError
from ._output import flushed, give_up, is_unwritten, prepare

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that *arguments* (None: this process's own) name; return the exit status."""
    prepare()
    try:
        need("typer", "cli")
        from ._app import run

        status = run(sys.argv[1:] if arguments is None else arguments)
    except DprimsError as error:
        print("dprims:", *str(error).split(), file=sys.stderr)
        status = 2 if isinstance(error, (ValueError, ImportError)) else 1
    except OSError as error:
        if not is_unwritten(error):
            raise
        give_up(error)
        status = 1
    return status if flushed() else status or 1
