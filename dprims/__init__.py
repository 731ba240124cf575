"""Distributed primitives for reinforcement-learning engines.

A fenced FIFO lock, parallel layouts and meshes, refit membership, and a synchronizer that moves
weights from training ranks to generation ranks and survives ranks that die in the middle.

Importing this package imports neither torch nor any backend's client; each name below is loaded
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .backend import Backend as Backend
    from .backend import Guarantees as Guarantees
    from .backend import Owner as Owner
    from .backend import connect as connect
    from .exceptions import AlreadyHeld as AlreadyHeld
    from .exceptions import BackendError as BackendError
    from .exceptions import BackendMisconfigured as BackendMisconfigured
    from .exceptions import BackendUnavailable as BackendUnavailable
    from .exceptions import BelowQuorum as BelowQuorum
    from .exceptions import DeviceLost as DeviceLost
    from .exceptions import DprimsError as DprimsError
    from .exceptions import EpochConflict as EpochConflict
    from .exceptions import HandshakeMismatch as HandshakeMismatch
    from .exceptions import LayoutError as LayoutError
    from .exceptions import LockError as LockError
    from .exceptions import LockLost as LockLost
    from .exceptions import LockTimeout as LockTimeout
    from .exceptions import MembershipError as MembershipError
    from .exceptions import MeshError as MeshError
    from .exceptions import MissingExtra as MissingExtra
    from .exceptions import NotHeld as NotHeld
    from .exceptions import PeerLost as PeerLost
    from .exceptions import RankMismatch as RankMismatch
    from .exceptions import RefitAborted as RefitAborted
    from .exceptions import RefitError as RefitError
    from .exceptions import RefitTimeout as RefitTimeout
    from .exceptions import RootExcluded as RootExcluded
    from .exceptions import StaleLeader as StaleLeader
    from .exceptions import StaleMesh as StaleMesh
    from .exceptions import TornWeights as TornWeights
    from .exceptions import TransferCorrupt as TransferCorrupt
    from .layout import ParallelLayout as ParallelLayout
    from .lock import DistributedLock as DistributedLock
    from .lock import FencedResource as FencedResource
    from .lock import Grant as Grant
    from .membership import RefitMembership as RefitMembership
    from .membership import should_rebuild as should_rebuild
    from .mesh import Meshes as Meshes
    from .roster import Member as Member
    from .roster import Roster as Roster

_HOME = {
    "backend": ("Backend", "Guarantees", "Owner", "connect"),
    "exceptions": (
        "AlreadyHeld",
        "BackendError",
        "BackendMisconfigured",
        "BackendUnavailable",
        "BelowQuorum",
        "DeviceLost",
        "DprimsError",
        "EpochConflict",
        "HandshakeMismatch",
        "LayoutError",
        "LockError",
        "LockLost",
        "LockTimeout",
        "MembershipError",
        "MeshError",
        "MissingExtra",
        "NotHeld",
        "PeerLost",
        "RankMismatch",
        "RefitAborted",
        "RefitError",
        "RefitTimeout",
        "RootExcluded",
        "StaleLeader",
        "StaleMesh",
        "TornWeights",
        "TransferCorrupt",
    ),
    "layout": ("ParallelLayout",),
    "lock": ("DistributedLock", "FencedResource", "Grant"),
    "membership": ("RefitMembership", "should_rebuild"),
    "mesh": ("Meshes",),
    "roster": ("Member", "Roster"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dprims' has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
