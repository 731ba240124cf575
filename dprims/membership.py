"""Which ranks take part in weight refits, as an immutable value.

A *fleet* is declared once: trainer ranks ``0..t-1`` and generation shards of one or more ranks each.
A :class:`RefitMembership` is that fleet at one epoch, with some shards absent and each shard under an
incarnation. Ranks are renumbered: trainers keep theirs, the surviving shards follow contiguously in
shard order. A *seat* is a rank's number in the complete fleet; it never moves, so keys and calls that
must outlive a renumbering are named by seat.

Pure: the standard library only, no clock, no torch.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from .exceptions import BelowQuorum, EpochConflict, MembershipError, RootExcluded

__all__ = ["Epoch", "MembershipDiff", "RefitMembership", "should_rebuild"]

_FORMAT = 1


class Epoch(NamedTuple):
    """One build of the weight groups: the leader's ``term``, then its ``build`` count; ordered so."""

    term: int
    build: int

    def __str__(self) -> str:
        return f"{self.term}.{self.build}"

    @classmethod
    def parse(cls, text: str) -> Epoch:
        """Read what ``str(epoch)`` wrote; ValueError for anything else."""
        term, dot, build = text.partition(".")
        if not (dot and term.isdecimal() and build.isdecimal()):
            raise ValueError(f"epoch {text!r} is not <term>.<build>")
        return cls(int(term), int(build))


_START = Epoch(0, 0)


@dataclass(frozen=True, slots=True)
class MembershipDiff:
    """What changed between two memberships of one fleet.

    A shard that came back under another incarnation is in ``left`` and in ``joined``: the process that
    was there is gone, and another one is in. ``moved`` maps old to new ranks, only for processes that
    are in both and whose rank changed.
    """

    left: tuple[int, ...]
    joined: tuple[int, ...]
    moved: Mapping[int, int]

    @property
    def needs_rebuild(self) -> bool:
        """Whether communicators built for the old membership are useless for the new one."""
        return bool(self.left or self.joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitMembership:
    """The ranks of weight refits at one epoch; hashable, compared by value.

    Build it with :meth:`full` and change it with :meth:`without`, :meth:`readmit` and :meth:`at`, each of
    which returns a new value. ``incarnations`` holds one number a rank of every shard, absent ones
    included (the last that was known); ``departures`` holds (shard, reason) of the absent ones.
    """

    train_world_size: int
    shard_sizes: tuple[int, ...]
    stage_heads: tuple[int, ...]
    incarnations: tuple[tuple[int, ...], ...]
    departures: tuple[tuple[int, str], ...] = ()
    epoch: Epoch = _START
    _order: tuple[int, ...] = field(init=False, repr=False, compare=False)  # the surviving shards
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)  # their first ranks
    _seats: tuple[int, ...] = field(init=False, repr=False, compare=False)  # every shard's first seat

    def __post_init__(self) -> None:
        _integers("train_world_size", [self.train_world_size])
        _integers("shard_sizes", self.shard_sizes)
        _integers("stage_heads", self.stage_heads)
        if self.train_world_size < 1:
            raise RootExcluded(
                f"train_world_size is {self.train_world_size}: a refit needs its trainers, rank 0 above all"
            )
        if not self.shard_sizes or min(self.shard_sizes) < 1:
            raise MembershipError(f"shard_sizes must be one or more sizes >= 1, got {self.shard_sizes}")
        heads = self.stage_heads
        if not heads or len(set(heads)) != len(heads) or not all(head in self.train_ranks for head in heads):
            raise MembershipError(
                f"stage_heads must be distinct trainer ranks of 0..{self.train_world_size - 1}, got {heads}"
            )
        if tuple(map(len, self.incarnations)) != self.shard_sizes:
            raise MembershipError(
                f"incarnations must be one number a rank of shards sized {self.shard_sizes}, "
                f"got {self.incarnations}"
            )
        gone = [shard for shard, _ in self.departures]
        if gone != sorted(set(gone)):
            raise MembershipError(f"departures must name each shard once, in order, got {self.departures}")
        for shard in gone:
            self._known(shard)
        if len(gone) == len(self.shard_sizes):
            raise BelowQuorum(f"no shard survives: all {len(gone)} are absent ({self._reasons()})")
        out = set(gone)
        order = tuple(shard for shard in range(len(self.shard_sizes)) if shard not in out)
        starts = accumulate((self.shard_sizes[shard] for shard in order), initial=self.train_world_size)
        seats = accumulate(self.shard_sizes, initial=self.train_world_size)
        for name, value in (("_order", order), ("_starts", tuple(starts)), ("_seats", tuple(seats))):
            object.__setattr__(self, name, value)

    # ---- making one -------------------------------------------------------------------------------

    @classmethod
    def full(
        cls,
        *,
        train_world_size: int,
        shard_sizes: Iterable[int],
        stage_heads: Iterable[int] | None = None,
        incarnations: Iterable[int | Iterable[int]] | None = None,
        epoch: tuple[int, int] = (0, 0),
    ) -> RefitMembership:
        """Return the complete fleet.

        ``stage_heads`` are the trainer ranks that send, one a pipeline stage in stage order; by default
        every trainer heads a stage of its own. ``incarnations`` is one a shard (an int, or one a rank).
        """
        _integers("train_world_size", [train_world_size])
        sizes = _integers("shard_sizes", shard_sizes)
        named = [0] * len(sizes) if incarnations is None else list(incarnations)
        if len(named) != len(sizes):
            raise MembershipError(f"{len(named)} incarnations given for {len(sizes)} shards")
        return cls(
            train_world_size=train_world_size,
            shard_sizes=sizes,
            stage_heads=tuple(range(train_world_size)) if stage_heads is None else tuple(stage_heads),
            incarnations=tuple(
                (one,) * size if isinstance(one, int) else tuple(one)
                for one, size in zip(named, sizes, strict=True)
            ),
            epoch=Epoch(*epoch),
        )

    def without(self, *shards: int | None, reason: str = "dead") -> RefitMembership:
        """Return the membership with these shards absent, one build later; itself if all are already.

        ``None`` is what :meth:`shard_of` says of a trainer, so ``m.without(m.shard_of(rank))`` raises
        RootExcluded for a trainer's rank. BelowQuorum when no shard would be left.
        """
        gone = dict(self.departures)
        for shard in shards:
            if shard is None:
                raise RootExcluded(
                    f"trainer ranks 0..{self.train_world_size - 1} belong to no shard and always take part"
                )
            gone.setdefault(self._known(shard), reason)
        if len(gone) == len(self.departures):
            return self
        return replace(self, departures=tuple(sorted(gone.items())), epoch=self._next)

    def readmit(self, shard: int, *, incarnation: int | Iterable[int]) -> RefitMembership:
        """Return the membership with this shard in, under this incarnation, one build later.

        ``incarnation`` is one number for the whole shard or one a rank. It may be that of a shard that
        only left; one below what is known belongs to a process that was replaced, and is refused. A
        present shard under a new incarnation is a change; under the same one it is not.
        """
        known = self.incarnations[self._known(shard)]
        named = (incarnation,) * len(known) if isinstance(incarnation, int) else tuple(incarnation)
        if len(named) != len(known):
            raise MembershipError(f"shard {shard} has {len(known)} ranks, got incarnations {named}")
        if any(new < old for new, old in zip(named, known, strict=True)):
            raise MembershipError(f"shard {shard} was known as incarnation {known}, {named} is an older one")
        if named == known and shard not in self.absent:
            return self
        return replace(
            self,
            incarnations=(*self.incarnations[:shard], named, *self.incarnations[shard + 1 :]),
            departures=tuple(entry for entry in self.departures if entry[0] != shard),
            epoch=self._next,
        )

    def at(self, epoch: tuple[int, int]) -> RefitMembership:
        """Return the same ranks at a later epoch (a forced rebuild, a new leader); never at a lower one."""
        if epoch < self.epoch:
            raise EpochConflict(f"membership is at epoch {self.epoch}, {Epoch(*epoch)} is behind it")
        return replace(self, epoch=Epoch(*epoch))

    @property
    def _next(self) -> Epoch:
        return Epoch(self.epoch.term, self.epoch.build + 1)

    # ---- reading it -------------------------------------------------------------------------------

    @property
    def root(self) -> int:
        """The rank that leads the trainers: always 0."""
        return 0

    @property
    def train_ranks(self) -> range:
        """The trainer ranks, which are the same in every membership of the fleet."""
        return range(self.train_world_size)

    @property
    def absent(self) -> Mapping[int, str]:
        """The absent shards with the reason of each; iterates over shard indexes."""
        return MappingProxyType(dict(self.departures))

    @property
    def surviving_shards(self) -> tuple[int, ...]:
        """The shards that take part, in order."""
        return self._order

    @property
    def world_size(self) -> int:
        """Trainers plus the ranks of the surviving shards."""
        return self._starts[-1]

    def ranks_of(self, shard: int) -> tuple[int, ...]:
        """Return the ranks of a surviving shard; MembershipError for an absent or unknown one."""
        place = bisect_left(self._order, self._known(shard))
        if place == len(self._order) or self._order[place] != shard:
            raise MembershipError(
                f"shard {shard} is absent ({self.absent[shard]}); present: {list(self._order)}"
            )
        return tuple(range(self._starts[place], self._starts[place + 1]))

    def shard_of(self, rank: int) -> int | None:
        """Return the shard of a rank, or None for a trainer; MembershipError for a rank outside."""
        if not 0 <= rank < self.world_size:
            raise MembershipError(f"rank {rank} is not in 0..{self.world_size - 1} at epoch {self.epoch}")
        if rank < self.train_world_size:
            return None
        return self._order[bisect_right(self._starts, rank) - 1]

    def incarnation_of(self, rank: int) -> int:
        """Return the incarnation of a generation rank; MembershipError for a trainer."""
        shard = self.shard_of(rank)
        if shard is None:
            raise MembershipError(f"rank {rank} is a trainer: only generation ranks have an incarnation here")
        return self.incarnations[shard][rank - self.ranks_of(shard)[0]]

    # ---- stage groups -----------------------------------------------------------------------------

    def group_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of a stage's weight group in group order: its head, then every generation rank."""
        return (self._head(stage), *range(self.train_world_size, self.world_size))

    def group_rank(self, stage: int, rank: int) -> int:
        """Return a rank's place in a stage's weight group; MembershipError for a rank that is not in it."""
        head = self._head(stage)
        if rank == head:
            return 0
        if self.shard_of(rank) is None:
            raise MembershipError(f"trainer rank {rank} is not in the group of stage {stage} (head {head})")
        return rank - self.train_world_size + 1

    def _head(self, stage: int) -> int:
        if not 0 <= stage < len(self.stage_heads):
            raise MembershipError(f"stage {stage} is not in 0..{len(self.stage_heads) - 1}")
        return self.stage_heads[stage]

    # ---- seats ------------------------------------------------------------------------------------

    def seats_of(self, shard: int) -> tuple[int, ...]:
        """Return the seats of a shard, absent or not: its ranks in the complete fleet."""
        return tuple(range(self._seats[self._known(shard)], self._seats[shard + 1]))

    def seat_of(self, rank: int) -> int:
        """Return the seat of a rank of this membership."""
        shard = self.shard_of(rank)
        if shard is None:
            return rank
        return self.seats_of(shard)[rank - self.ranks_of(shard)[0]]

    def rank_at(self, seat: int) -> int | None:
        """Return the rank that a seat has now, or None while its shard is absent."""
        if not 0 <= seat < self._seats[-1]:
            raise MembershipError(f"seat {seat} is not in 0..{self._seats[-1] - 1}")
        if seat < self.train_world_size:
            return seat
        shard = bisect_right(self._seats, seat) - 1
        return None if shard in self.absent else self.ranks_of(shard)[seat - self._seats[shard]]

    # ---- comparing --------------------------------------------------------------------------------

    def diff(self, old: RefitMembership) -> MembershipDiff:
        """Return what changed since ``old``; MembershipError unless both are of one fleet."""
        if self._fleet != old._fleet:
            raise MembershipError(f"memberships of different fleets: {old._fleet} and {self._fleet}")
        before, after = old._named_shards(), self._named_shards()
        stayed = before & after
        return MembershipDiff(
            left=tuple(sorted(shard for shard, _ in before - after)),
            joined=tuple(sorted(shard for shard, _ in after - before)),
            moved=MappingProxyType(
                {
                    was: now
                    for shard, _ in sorted(stayed)
                    for was, now in zip(old.ranks_of(shard), self.ranks_of(shard), strict=True)
                    if was != now
                }
            ),
        )

    def require(self, min_shards: int) -> RefitMembership:
        """Return itself; BelowQuorum when fewer than ``min_shards`` shards take part."""
        if len(self.surviving_shards) < min_shards:
            raise BelowQuorum(
                f"{len(self.surviving_shards)} of {len(self.shard_sizes)} shards take part at epoch "
                f"{self.epoch}, {min_shards} are needed; absent: {self._reasons()}"
            )
        return self

    @property
    def _fleet(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return self.train_world_size, self.shard_sizes, self.stage_heads

    def _named_shards(self) -> set[tuple[int, tuple[int, ...]]]:
        return {(shard, self.incarnations[shard]) for shard in self.surviving_shards}

    def _known(self, shard: int) -> int:
        if type(shard) is not int or not 0 <= shard < len(self.shard_sizes):
            raise MembershipError(f"shard {shard!r} does not exist; there are 0..{len(self.shard_sizes) - 1}")
        return shard

    def _reasons(self) -> str:
        return ", ".join(f"{shard}: {reason}" for shard, reason in self.departures) or "none"

    # ---- bytes ------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return canonical JSON: equal memberships give equal bytes."""
        document = {
            "format": _FORMAT,
            "train_world_size": self.train_world_size,
            "shard_sizes": self.shard_sizes,
            "stage_heads": self.stage_heads,
            "incarnations": self.incarnations,
            "absent": self.departures,
            "epoch": self.epoch,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RefitMembership:
        """Read what :meth:`to_bytes` wrote; MembershipError for anything else, a newer format included."""
        try:
            document: Any = json.loads(data)
            if document["format"] != _FORMAT:
                raise MembershipError(f"membership format {document['format']!r}, expected {_FORMAT}")
            return cls(
                train_world_size=int(document["train_world_size"]),
                shard_sizes=tuple(map(int, document["shard_sizes"])),
                stage_heads=tuple(map(int, document["stage_heads"])),
                incarnations=tuple(tuple(map(int, one)) for one in document["incarnations"]),
                departures=tuple((int(shard), str(reason)) for shard, reason in document["absent"]),
                epoch=Epoch(*map(int, document["epoch"])),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise MembershipError(f"not a membership: {data[:80]!r} ({error})") from error


def should_rebuild(
    *, desired: RefitMembership | None, built: RefitMembership | None, force: bool = False
) -> bool:
    """Say whether the weight groups have to be built anew.

    ``desired`` is None when the generation side has no worker group: there is nothing to do. ``built``
    is None while a build is under way and after every abort; None equals nothing. Otherwise the two are
    compared by (shard, incarnation), never by epoch. ``force`` rebuilds an equal membership.
    """
    if desired is None:
        return False
    return force or built is None or desired.diff(built).needs_rebuild


def _integers(name: str, values: object) -> tuple[int, ...]:
    """Return the values as a tuple, or raise MembershipError when they are no integers."""
    numbers = tuple(values) if isinstance(values, Iterable) else (None,)
    if not all(type(one) is int for one in numbers):
        raise MembershipError(f"{name}: expected integers, got {values!r}")
    return numbers
