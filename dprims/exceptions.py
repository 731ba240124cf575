"""Every error that dprims raises, in one tree.

::

    DprimsError
    ├── MissingExtra (ImportError)         an optional dependency is not installed
    ├── LockError
    │   ├── LockTimeout (TimeoutError)     the lock was not had in time
    │   ├── LockLost                       it was held, and is no longer
    │   ├── NotHeld                        it was never held
    │   └── AlreadyHeld                    this thread or task holds it already
    ├── LayoutError (ValueError)           degrees or ranks that do not fit
    ├── MeshError
    │   ├── StaleMesh                      the process group it was built on is gone
    │   └── RankMismatch                   the job and the layout disagree about ranks
    ├── MembershipError
    │   ├── BelowQuorum                    fewer shards survive than are needed
    │   ├── EpochConflict                  another writer, or another epoch, was first
    │   └── RootExcluded (ValueError)      a trainer rank cannot leave a refit
    ├── BackendError
    │   ├── BackendUnavailable (ConnectionError)   no answer in time
    │   └── BackendMisconfigured (ValueError)      a URL, client or setting that cannot work
    └── RefitError
        ├── RefitTimeout (TimeoutError)    a deadline of a refit ran out
        ├── RefitAborted                   the refit was decided "abort"; the cause says by whom
        ├── PeerLost                       the process of a rank died, or its call was lost
        ├── HandshakeMismatch              ranks disagree about plan, world, epoch or protocol
        ├── TransferCorrupt                a bucket arrived with another digest than it was sent with
        ├── TornWeights                    an in-place receive was cut: the weights are a mixture
        ├── DeviceLost                     the accelerator did not come back after an abort
        └── StaleLeader                    a leader of a higher term has taken over

Each carries one message, so that each survives pickling with its type.
"""

from __future__ import annotations


class DprimsError(Exception):
    """Base of every error that dprims raises on purpose."""


class MissingExtra(DprimsError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class LockError(DprimsError):
    """Base of the lock errors."""


class LockTimeout(LockError, TimeoutError):
    """The lock was not acquired before the timeout; the message says who holds it."""


class LockLost(LockError):
    """The lock was held and is no longer: its ttl passed, or another took it."""


class NotHeld(LockError):
    """A release of a lock that this object never held."""


class AlreadyHeld(LockError):
    """The same thread or task holds this lock already; waiting would deadlock it with itself."""


class LayoutError(DprimsError, ValueError):
    """A parallel degree, axis, rank or group name that does not fit the layout."""


class MeshError(DprimsError):
    """Base of the errors of meshes that were built from a layout."""


class StaleMesh(MeshError):
    """The process group that the mesh was built on was destroyed or re-initialised."""


class RankMismatch(MeshError):
    """The running job and the layout disagree about the world or a group's ranks."""


class MembershipError(DprimsError):
    """Base of the errors of refit memberships."""


class BelowQuorum(MembershipError):
    """Fewer generation shards survive than the refit needs."""


class EpochConflict(MembershipError):
    """Another epoch stands where this one was to be written."""


class RootExcluded(MembershipError, ValueError):
    """A trainer rank was to be excluded; trainers always take part in a refit."""


class BackendError(DprimsError):
    """Base of the errors of coordination backends."""


class BackendUnavailable(BackendError, ConnectionError):
    """The backend's server did not answer within the bound of the operation."""


class BackendMisconfigured(BackendError, ValueError):
    """A URL, client, credential or setting that this backend cannot work with."""


class RefitError(DprimsError):
    """Base of the errors of weight refits.

    Attributes:
        shards: those of whom a rank found by itself what was wrong, or did not answer. Empty where a death
            ended the refit, of which the roster knows, or something else.
    """

    shards: tuple[int, ...] = ()


class RefitTimeout(RefitError, TimeoutError):
    """A deadline of a refit ran out; the message names who was silent."""


class RefitAborted(RefitError):
    """The refit was decided "abort"; the message carries who decided it, and why."""


class PeerLost(RefitError):
    """The process behind a rank died, or can no longer be reached."""


class HandshakeMismatch(RefitError):
    """Ranks of one group disagree about epoch, world, plan, bucket size or protocol."""


class TransferCorrupt(RefitError):
    """A bucket arrived with another digest than it was sent with."""


class TornWeights(RefitError):
    """An in-place receive was cut off: the live weights are a mixture of two versions.

    Attributes:
        first_hand: whether the rank that is torn found by itself what cut it off: a loader that raised, bytes
            that differ. Otherwise it was told, lost a peer, or waited in vain.
    """

    first_hand: bool = True


class DeviceLost(RefitError):
    """The accelerator did not come back after an abort; the process has to be replaced."""


class StaleLeader(RefitError):
    """A leader of a higher term has taken over; this one may change nothing any more."""
