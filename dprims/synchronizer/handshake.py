"""The handshake: before the first collective every rank says what it is about to do, through the store.

Each rank publishes a record (epoch, world, plan digest, bucket size, protocol version: whatever the caller
puts in). Rank 0 compares all of them with its own and publishes one verdict, which every rank raises or
accepts. A rank whose plan differs publishes the plan too, so that the first difference is named on both
sides. Who has not come when the time is over is named by every rank that has.

The store's own calls can block past their timeout when its server is frozen, so they run on a thread of their
own, on a client of their own, and the working thread waits for it under its guard.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..exceptions import HandshakeMismatch, RefitError, RefitTimeout
from .clients import Clients
from .guard import Guard
from .plan import Plan

__all__ = ["PROTOCOL", "handshake"]

PROTOCOL = 1
"""Version of what travels between the ranks of a group; part of every record."""

CHUNK_BYTES = 4 << 20
"""A store takes values of at most 8 MiB."""

BACKOFF_S = (0.001, 0.01)
"""First and longest pause between two looks at the store."""

LAST_WORDS_S = 0.5
"""How long a rank that ran out of time may take to find out who is missing."""


def handshake(
    clients: Clients,
    rank: int,
    size: int,
    record: Mapping[str, Any],
    *,
    guard: Guard,
    prefix: str = "",
    key: str = "handshake",
    plan: Plan | None = None,
    members: Sequence[str] | None = None,
    refusal: str | None = None,
    group: str = "the group",
) -> None:
    """Return when all ranks have come and agree. Collective.

    Args:
        clients: of the store where the ranks meet.
        rank: this rank within the group; rank 0 compares.
        size: number of ranks in the group.
        record: JSON values that all ranks must have in common; compared in rank 0's order of keys.
        guard: bounds the wait.
        prefix: what is this group's own in that store.
        key: a name that is used once in this store; the caller counts.
        plan: this rank's plan, when there is one; digest and bucket size join the record.
        members: what to call each rank in messages; by default host and process id.
        refusal: why this rank cannot take part although it agrees, such as for lack of memory.
        group: the group's name for messages.

    Raises:
        HandshakeMismatch: a rank differs; named with the first difference, on every rank.
        RefitError: a rank refuses; its reason is given, on every rank.
        RefitTimeout: time ran out; the ranks that have not come are named.
        RefitAborted: the guard's flag was set.
    """
    says: dict[str, Any] = {"protocol": PROTOCOL, **record}
    if plan is not None:
        says |= {"bucket_bytes": plan.bucket_bytes, "plan": plan.digest}
    card = {
        "who": f"{members[rank]} on {socket.gethostname()}"
        if members
        else f"{socket.gethostname()}:{os.getpid()}",
        "says": json.loads(json.dumps(says)),
        "refusal": refusal,
    }
    desk = _Desk(clients, prefix, rank, size, card, plan, members, key, group)
    try:
        verdict = guard.call(desk.run, f"the handshake of {group}")
    except RefitTimeout as error:
        desk.stop.set()
        desk.ended.wait(LAST_WORDS_S)
        missing = desk.missing
        if not missing:
            raise
        raise RefitTimeout(f"{error}; {', '.join(missing)} did not come") from None
    finally:
        desk.stop.set()
    kind, text = verdict
    if kind == "mismatch":
        raise HandshakeMismatch(text)
    if kind == "refused":
        raise RefitError(text)
    if kind == "timeout":
        raise RefitTimeout(text)


class _Desk:
    """What runs on the helper thread."""

    def __init__(
        self,
        clients: Clients,
        prefix: str,
        rank: int,
        size: int,
        card: dict[str, Any],
        plan: Plan | None,
        members: Sequence[str] | None,
        key: str,
        group: str,
    ) -> None:
        self.stop = threading.Event()
        self.ended = threading.Event()
        self.missing: list[str] = []
        self._clients, self._prefix, self._rank, self._size = clients, prefix, rank, size
        self._card, self._plan = card, plan
        self._members, self._key, self._group = members, key, group

    def run(self) -> tuple[str, str]:
        try:
            with self._clients.lend(self._prefix) as store:
                store.set(f"{self._key}/{self._rank}", json.dumps(self._card))
                verdict = self._judge(store) if self._rank == 0 else self._submit(store)
                self.missing = self._absent(store) if verdict is None else []
            return verdict or ("timeout", f"{self._group}: {', '.join(self.missing)} did not come in time")
        finally:
            self.ended.set()

    def _judge(self, store: Any) -> tuple[str, str] | None:
        cards = {0: self._card}
        for rank in range(1, self._size):
            if not self._await(store, f"{self._key}/{rank}"):
                return None
            cards[rank] = json.loads(store.get(f"{self._key}/{rank}"))
        verdict = self._compare(store, cards)
        store.set(f"{self._key}/verdict", json.dumps(verdict))
        return verdict

    def _compare(self, store: Any, cards: dict[int, dict[str, Any]]) -> tuple[str, str]:
        refusals = [
            f"rank {r} ({c['who']}) refuses: {c['refusal']}" for r, c in cards.items() if c["refusal"]
        ]
        ours = cards[0]["says"]
        differences = []
        for rank, card in cards.items():
            theirs = card["says"]
            for name in dict.fromkeys((*ours, *theirs)):
                if ours.get(name) != theirs.get(name):
                    detail = self._plans_differ(store, rank) if name == "plan" and self._plan else None
                    detail = (
                        detail or f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} on rank 0"
                    )
                    differences.append(f"rank {rank} ({card['who']}): {detail}")
                    break
        if differences:
            return "mismatch", f"{self._group}, rank 0 ({cards[0]['who']}): {'; '.join(differences)}"
        if refusals:
            return "refused", f"{self._group}: {'; '.join(refusals)}"
        return "ok", ""

    def _plans_differ(self, store: Any, rank: int) -> str | None:
        """The first difference between this plan and another rank's, which publishes it when it sees ours."""
        if self._plan is None or not self._await(store, f"{self._key}/plan/{rank}"):
            return None
        count = int(store.get(f"{self._key}/plan/{rank}"))
        data = b"".join(store.get(f"{self._key}/plan/{rank}/{i}") for i in range(count))
        return Plan.from_bytes(data).first_difference(self._plan, ours=f"rank {rank}", theirs="rank 0")

    def _submit(self, store: Any) -> tuple[str, str] | None:
        if not self._await(store, f"{self._key}/0"):
            return None
        first = json.loads(store.get(f"{self._key}/0"))["says"].get("plan")
        if self._plan is not None and first not in (None, self._plan.digest):
            data = self._plan.to_bytes()
            chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
            for index, chunk in enumerate(chunks):
                store.set(f"{self._key}/plan/{self._rank}/{index}", chunk)
            store.set(f"{self._key}/plan/{self._rank}", str(len(chunks)))
        if not self._await(store, f"{self._key}/verdict"):
            return None
        kind, text = json.loads(store.get(f"{self._key}/verdict"))
        return kind, text

    def _await(self, store: Any, key: str) -> bool:
        """Wait until the key is there; False when the working thread has given up."""
        pause, longest = BACKOFF_S
        while not store.check([key]):
            if self.stop.is_set():
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def _absent(self, store: Any) -> list[str]:
        names = self._members or [""] * self._size
        gone = [r for r in range(self._size) if not store.check([f"{self._key}/{r}"])]
        return [f"rank {r} ({names[r]})" if names[r] else f"rank {r}" for r in gone]
