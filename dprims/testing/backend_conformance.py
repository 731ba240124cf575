"""What a backend must do, as checks that run against any: ours, and yours.

With pytest::

    from dprims.testing.backend_conformance import BackendConformance


    class TestMyBackend(BackendConformance):
        def make_backend(self):
            return MyBackend("mine://localhost")

Without: ``failures(TestMyBackend)`` runs every check and returns what each failed one said.

The checks of one process always run; those with processes that are killed and frozen run when
``guarantees.scope`` is ``"hosts"``, and need the backend's ``url`` to lead other processes to the same
service. Every check uses names of its own, so a shared server will do. They take about half a minute
at the default ttl.
"""

from __future__ import annotations

from ._conformance_cells import CellChecks
from ._conformance_life import LifeChecks
from ._conformance_queues import QueueChecks

__all__ = ["BackendConformance", "checks", "failures"]


class BackendConformance(QueueChecks, CellChecks, LifeChecks):
    """Subclass it, and say in :meth:`make_backend` how to connect.

    ``ttl`` (seconds; raised to the backend's ``min_ttl``) is what the checks use; ``patience_s`` is how much
    longer than it should anything may take before a check fails.
    """


def checks(suite: type[BackendConformance]) -> list[str]:
    """The names of the checks of *suite*, in the order in which they are defined."""
    names: dict[str, None] = {}
    for cls in reversed(suite.__mro__):
        names.update(dict.fromkeys(name for name in vars(cls) if name.startswith("test_")))
    return list(names)


def failures(suite: type[BackendConformance], names: list[str] | None = None) -> dict[str, Exception]:
    """Run the checks of *suite* (or those in *names*) and return what each one that failed raised."""
    failed: dict[str, Exception] = {}
    for name in checks(suite) if names is None else names:
        check = suite()
        try:
            check.setup_method()
            try:
                getattr(check, name)()
            finally:
                check.teardown_method()
        except Exception as error:  # noqa: BLE001 - whatever it is, the check has failed
            failed[name] = error
    return failed
