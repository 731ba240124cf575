"""Weight refits: trainers send, generation shards commit together, and who dies is left out and taken back.

:class:`CollectiveWeightSynchronizer` leads a fleet; :class:`WeightSender` and :class:`WeightReceiver` are the
ranks' side of it. What an engine has to offer is typed in ``interfaces.py``; the protocol is in
``docs/protocol.md``. Names are loaded when they are first used, so that the pure parts import no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..backend import need

if TYPE_CHECKING:
    from .collective import CollectiveWeightSynchronizer as CollectiveWeightSynchronizer
    from .interfaces import BatchedSource as BatchedSource
    from .interfaces import Cluster as Cluster
    from .interfaces import Generation as Generation
    from .interfaces import LendingSink as LendingSink
    from .interfaces import Policy as Policy
    from .interfaces import WeightSink as WeightSink
    from .interfaces import WeightSource as WeightSource
    from .interfaces import WeightSynchronizer as WeightSynchronizer
    from .report import RefitReport as RefitReport
    from .sinks import DictSink as DictSink
    from .sinks import LoadWeightsSink as LoadWeightsSink
    from .sinks import ModuleSink as ModuleSink
    from .sources import DictSource as DictSource
    from .sources import ModuleSource as ModuleSource
    from .sources import SafetensorsSource as SafetensorsSource
    from .workers import WeightReceiver as WeightReceiver
    from .workers import WeightSender as WeightSender

_HOME = {
    "collective": ("CollectiveWeightSynchronizer",),
    "interfaces": (
        "BatchedSource",
        "Cluster",
        "Generation",
        "LendingSink",
        "Policy",
        "WeightSink",
        "WeightSource",
        "WeightSynchronizer",
    ),
    "report": ("RefitReport",),
    "sinks": ("DictSink", "LoadWeightsSink", "ModuleSink"),
    "sources": ("DictSource", "ModuleSource", "SafetensorsSource"),
    "workers": ("WeightReceiver", "WeightSender"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            need("torch", "torch")
        raise
    globals()[name] = value
    return value
