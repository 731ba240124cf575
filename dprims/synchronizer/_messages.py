"""The vocabulary of the refit protocol: values, messages, and what goes into and comes out of a machine.

Everything is immutable, compares and hashes by value, and pickles. A *seat* is a
rank's number in the complete fleet (:class:`~dprims.membership.RefitMembership`); it never moves. A
rank is named (seat, incarnation): the token of its roster entry. Incarnation 0 means "not in".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dprims.membership import Epoch

Kind = Literal["ask", "build", "recv", "pause", "commit", "resume", "rollback"]

COMMIT = "commit"
ABORT = "abort"
"""A decision cell holds ``commit``, or ``abort: `` and a reason."""


# ---- values -----------------------------------------------------------------------------------------


class Version(NamedTuple):
    """What a shard serves: a number that grows, and the digest of the weights (one number, one digest)."""

    number: int
    digest: str = ""


class Staged(NamedTuple):
    """A version that was received whole under an epoch and waits for that epoch's decision."""

    epoch: Epoch
    version: Version


class Holding(NamedTuple):
    """What a rank holds, as it answers ``ask``."""

    live: Version | None
    staged: Staged | None
    paused: bool


class Cause(NamedTuple):
    """Why an operation did not succeed: what happened, at which seat (None: no rank's fault), in words."""

    what: Literal["lost", "timeout", "error", "mismatch", "aborted", "quorum", "refused", "stale"]
    seat: int | None
    why: str


# ---- calls ------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """One call to one rank; equal messages are one call, and doing it twice is doing it once."""

    kind: Kind
    epoch: Epoch
    version: Version
    """``build``: the version it will carry; ``recv``: with an empty digest when that is not yet known."""
    incarnation: int
    """The process that is meant; any other one answers with an error."""


class Reply(NamedTuple):
    """The answer to a call. ``refused``: the epoch is below ``seen``, nothing was changed."""

    status: Literal["ok", "refused", "error"]
    why: str = ""
    seen: Epoch | None = None
    digest: str = ""
    holding: Holding | None = None


# ---- into the leader --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elected:
    """The leader lock was acquired with this token, and these things were done after that, in order.

    The fences of ``refit/next`` and then of ``refit/current`` were raised to the term, which gave
    ``reserved`` and ``current`` (None where no version was ever written); then ``roster`` was read.
    ``evicted`` are the seats that are not in, and whose last entry a leader deleted.
    """

    term: int
    reserved: Version | None
    current: Version | None
    roster: tuple[int, ...]
    evicted: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SyncRequested:
    """Send the trainers' weights: to every shard that is in, or to one that came back (``only``)."""

    roster: tuple[int, ...]
    only: int | None = None


@dataclass(frozen=True, slots=True)
class BuildRequested:
    """Build the groups if they differ from what is wanted. ``absent`` holds for later syncs too."""

    roster: tuple[int, ...]
    absent: frozenset[int] = frozenset()
    force: bool = False


@dataclass(frozen=True, slots=True)
class Replied:
    """The answer to a call arrived; an exception of the call is a Reply with status "error"."""

    seat: int
    message: Message
    reply: Reply


@dataclass(frozen=True, slots=True)
class Silent:
    """A call has had no answer by its deadline, or its answer was lost."""

    seat: int
    message: Message


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank can surely not serve any more: its process ended, or its roster entry ran out.

    Of an entry that a leader deleted this is sure only ttl + ttl/4 after the deletion.
    """

    seat: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class CellRead:
    """What stands in a decision cell: after a SetCell, or because a watcher saw it change."""

    epoch: Epoch
    number: int
    value: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """The outcome of a Reserve or Publish: False when a higher term stands there."""

    ok: bool


@dataclass(frozen=True, slots=True)
class Condemned:
    """A Condemn is over: its roster entries are gone and their ttl has passed."""

    shard: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """The trainers changed their weights."""


@dataclass(frozen=True, slots=True)
class Deposed:
    """The leader lock was lost, or the backend gave no answer: what stands there is unknown."""

    why: str


LeaderEvent = (
    Elected
    | SyncRequested
    | BuildRequested
    | Replied
    | Silent
    | Gone
    | CellRead
    | Fenced
    | Condemned
    | Stepped
    | Deposed
)


# ---- out of the leader ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """Send a message to the process that has this seat; answer with Replied, Silent or Gone."""

    seat: int
    message: Message


@dataclass(frozen=True, slots=True)
class SetCell:
    """Write a decision cell in the backend if nothing stands there; answer CellRead with what stands."""

    epoch: Epoch
    number: int
    value: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Write ``refit/next``, fenced by ``term``; answer Fenced."""

    version: Version
    term: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Write ``refit/current``, fenced by ``term``; answer Fenced."""

    version: Version
    term: int


@dataclass(frozen=True, slots=True)
class Condemn:
    """Write down that these (seat, incarnation) are evicted, delete their roster entries (each only
    if it still has that incarnation), wait ttl + ttl/4, answer Condemned."""

    shard: int
    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The operation is over: it succeeded when ``cause`` is None. ``rebuilt``: groups were built.

    ``forget``: every decision cell that this leader wrote or read may be deleted, but the newest.
    """

    goal: Literal["recover", "sync", "only", "build"]
    cause: Cause | None
    rebuilt: bool = False
    forget: bool = False


LeaderAction = Call | SetCell | Reserve | Publish | Condemn | Finish


# ---- into a member ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The process started, or its roster entry was lost: it has no place in the fleet."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The roster entry is held, under this incarnation."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class TermRead:
    """The fence of ``refit/next`` (0: none); read after the roster entry was held, never before."""

    term: int


@dataclass(frozen=True, slots=True)
class Performed:
    """A Perform succeeded. ``digest``: of what was received."""

    message: Message
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Broke:
    """A Perform failed or was cancelled."""

    message: Message
    why: str


MemberEvent = Message | Started | Joined | TermRead | Performed | Broke | CellRead


# ---- out of a member --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Acquire this seat's roster entry; answer Joined."""


@dataclass(frozen=True, slots=True)
class ReadTerm:
    """Read the fence of ``refit/next``, which a leader raises before all else; answer TermRead."""


@dataclass(frozen=True, slots=True)
class Perform:
    """Do what the message says and answer Performed or Broke.

    ``build`` and ``recv`` take long: other messages are handed to the machine meanwhile. ``pause``,
    ``commit`` and ``resume`` are over, with their answer, before the next event is handed in.
    """

    message: Message


@dataclass(frozen=True, slots=True)
class Cancel:
    """Make the ``build`` or ``recv`` that runs come back with Broke, soon; its result is void."""

    message: Message


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard what is staged. Cannot fail."""


@dataclass(frozen=True, slots=True)
class WriteAbort:
    """Write ``abort: why`` into a decision cell if nothing stands there; needs no answer."""

    epoch: Epoch
    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a message."""

    message: Message
    reply: Reply


MemberAction = Join | ReadTerm | Perform | Cancel | Drop | WriteAbort | Answer
