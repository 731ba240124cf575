"""What travels between a leader and the ranks of a refit: calls, answers, and what a rank says of itself.

Values only, so that any engine can carry them: they pickle, and hold no tensor, socket or clock. Times
are lengths in seconds from when the call arrives, as hosts share no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dprims.membership import Epoch, RefitMembership

from .clocks import Times
from .protocol import Kind, Message, Reply, Version

if TYPE_CHECKING:
    from .plan import TensorMeta
    from .transfer import TransferStats

METHODS: Mapping[str, Mapping[Kind, str]] = {
    "policy": {
        "ask": "ask",
        "build": "init_collective",
        "recv": "broadcast_weights_for_collective",
        "rollback": "rollback",
    },
    "generation": {
        "ask": "ask",
        "build": "init_collective",
        "recv": "update_weights_from_collective",
        "pause": "pause",
        "commit": "commit",
        "resume": "resume",
        "rollback": "rollback",
    },
}
"""The method of a Policy or Generation that carries each kind of message."""


@dataclass(frozen=True, slots=True)
class RefitSite:
    """Where a fleet meets: the backend, the names in it, and how long an entry lasts in silence."""

    backend: str
    """URL of the backend; every rank connects to it by itself."""
    namespace: str = "dprims"
    fleet: str = "refit"
    roster_ttl_s: float = 5.0

    @property
    def prefix(self) -> str:
        """What every key of this fleet begins with."""
        return f"{self.namespace}/{self.fleet}"

    @property
    def leader_lock(self) -> str:
        """The full name of the lock whose token is the term."""
        return f"{self.prefix}/leader"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a rank says when it is asked to prepare: who it is, and what it sends."""

    seat: int
    incarnation: int
    stage: int | None = None
    """The stage that this trainer heads; None for every other rank."""
    metas: tuple[TensorMeta, ...] | None = None
    """What the stage's source holds; None when it is what ``digest`` named in the question."""
    digest: str = ""
    device: str = "cpu"
    """The kind of device that the weights are on."""
    version: int = 0
    """The highest version that this process ever committed; 0 for none, and for trainers."""
    times: Times | None = None
    """When it was asked and when it answered, on its own clock."""


@dataclass(frozen=True, slots=True)
class RefitCall:
    """One message to several ranks at once, with what each needs in order to do it."""

    kind: Kind
    epoch: Epoch
    version: Version
    incarnations: Mapping[int, int]
    """The addressed seats, each with the process that is meant there."""
    membership: RefitMembership | None = None
    """``build``: who is in the groups, at ``epoch``."""
    rendezvous: tuple[str, int] | None = None
    """``build``: address and port of the leader's store."""
    plans: tuple[bytes, ...] | None = None
    """One plan a stage; ``recv``: only when it differs from the one of the build."""
    kv_scales: Mapping[str, float] = field(default_factory=dict)
    timeout_s: float | None = None
    stall_timeout_s: float | None = None
    verify: bool = True

    def message(self, seat: int) -> Message:
        """The message of the protocol that this call is to *seat*."""
        return Message(self.kind, self.epoch, self.version, self.incarnations[seat])


@dataclass(frozen=True, slots=True)
class RefitAnswer:
    """A rank's answer: the protocol's reply, and what belongs to it outside the protocol."""

    reply: Reply
    error: BaseException | None = None
    """What went wrong, with its own type."""
    stats: Mapping[int, TransferStats] = field(default_factory=dict)
    """``recv``: what the transfer of each stage took, as far as it came when it failed."""
    times: Times | None = None
    """When the call arrived and when it was answered, on the rank's clock."""
