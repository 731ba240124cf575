"""The leader of a fleet without a controller: the usual synchronizer, whose calls go by mail."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from ..backend import Backend, connect
from ..exceptions import BelowQuorum, HandshakeMismatch, PeerLost, RefitError, RefitTimeout, StaleLeader
from ..synchronizer.calls import RankInfo, RefitAnswer, RefitCall, RefitSite
from ..synchronizer.collective import CollectiveWeightSynchronizer
from ._spmd_rank import LOOK_S, Address, Waiting, address_key, enrolment, write_address
from .fleet import WorkerGroup
from .letters import read_answer, read_info, write_call
from .mailbox import Post, done, failed, then

log = logging.getLogger("dprims.engines.spmd")

TRIES = 3
"""How often the fleet is gathered: who is enrolled may be the dead of a job that ended a moment ago."""


class MailPolicy:
    """The trainers, called by mail: satisfies :class:`~dprims.synchronizer.Policy`."""

    def __init__(self, lead: Lead, world_size: int, host: str | None) -> None:
        self._lead = lead
        self.world_size = world_size
        self.host = host

    def prepare_refit_info(self, site: RefitSite, known: Mapping[int, str]) -> list[Future[RankInfo]]:
        """Ask every trainer what it sends; one that is not in the roster is lost."""
        self._lead.announce()
        return self._lead.prepare(range(self.world_size), known)

    def _send(self, call: RefitCall) -> list[Future[RefitAnswer]]:
        return self._lead.send(call)

    ask = init_collective = broadcast_weights_for_collective = rollback = _send


class MailGeneration:
    """The generation ranks, called by mail: satisfies :class:`~dprims.synchronizer.Generation`."""

    def __init__(self, lead: Lead, first: int) -> None:
        self._lead = lead
        self._first = first
        self.worker_group = WorkerGroup(())

    def get_inference_world_size(self) -> int:
        """The number of generation ranks, dead ones included."""
        return sum(self.worker_group.sizes)

    def prepare_refit_info(self, site: RefitSite) -> list[Future[RankInfo]]:
        """Ask every rank that is in who it is; one that is not has incarnation 0."""
        return self._lead.prepare(range(self._first, self._first + self.get_inference_world_size()), {})

    def _send(self, call: RefitCall) -> list[Future[RefitAnswer]]:
        return self._lead.send(call)

    ask = init_collective = update_weights_from_collective = pause = commit = resume = rollback = _send


class Lead(CollectiveWeightSynchronizer):
    """The leader that the first trainer hosts."""

    def __init__(
        self, *, backend: Backend, world_size: int, gather_s: float, host: str | None, **options: Any
    ) -> None:
        self._fleet_side = MailGeneration(self, world_size)
        super().__init__(
            MailPolicy(self, world_size, host), self._fleet_side, backend=backend, host=host, **options
        )
        self._gather_s = gather_s
        self._post: Post | None = None
        self._mail_cells: Backend | None = None
        self._announced = 0

    def init_communicator(self, timeout: float | None = None) -> None:
        """As there. A rank of whom only a dead one's entry was there is waited for again, like any other."""
        for left in reversed(range(TRIES)):
            try:
                super().init_communicator(timeout)
                return
            except BelowQuorum as error:
                if not left:
                    raise
                log.warning("the fleet is gathered once more: %s", error)

    def mail(self, seat: int, incarnation: int, what: str, body: Any) -> Future[Any]:
        """Send a letter to the process that has this seat."""
        if self._post is not None and incarnation:
            return self._post.call(seat, incarnation, what, body)
        return failed(PeerLost(f"seat {seat} is not in the roster"))

    def send(self, call: RefitCall) -> list[Future[RefitAnswer]]:
        """One call to each of its seats."""
        body = write_call(call)
        return [
            then(self.mail(seat, incarnation, "call", body), read_answer)
            for seat, incarnation in call.incarnations.items()
        ]

    def prepare(self, seats: range, known: Mapping[int, str]) -> list[Future[RankInfo]]:
        """Ask who each rank is. Each has joined by itself; of one that is not in there is nothing to ask."""
        roster = self.seats.read()
        return [
            then(self.mail(seat, roster[seat], "prepare", known.get(seat, "")), read_info)
            if roster[seat] or seat < self.policy.world_size
            else done(RankInfo(seat, 0))
            for seat in seats
        ]

    def announce(self) -> None:
        """Say where we are, if this is a new term, and wait until those who are alive have their seats."""
        if self._grant is not None and self._grant.token != self._announced:
            self._announce(self._grant.token)

    def _announce(self, term: int) -> None:
        if self.rendezvous is None:
            raise RefitError("the leader serves no store")
        host, port = self.rendezvous
        address = Address(
            term,
            f"tcpstore://[{host}]:{port}" if ":" in host else f"tcpstore://{host}:{port}",
            self.policy.world_size,
            self._discover(),
            self.site.roster_ttl_s,
        )
        self._fleet_side.worker_group = WorkerGroup(address.shard_sizes)
        self.seats.size = self.policy.world_size + sum(address.shard_sizes)
        self._mail_cells = connect(address.store)
        self._post = Post(self._mail_cells, self.site.prefix, term)
        if self.backend.write_fenced(address_key(self.site), write_address(address), term) != term:
            raise StaleLeader(f"a leader of a higher term than {term} has said where it is")
        self._announced = term
        self._await_seats(address)

    def _discover(self) -> tuple[int, ...]:
        """The shard sizes that the enrolled ranks name, once all are in, or enough of them after a while."""
        roster, deadline = enrolment(self.site, self.backend), time.monotonic() + self._gather_s
        agreed, waiting = time.monotonic(), Waiting(f"the leader of fleet {self.site.prefix!r}")
        while True:
            members = roster.members()
            shapes = sorted({tuple(member.payload["sizes"]) for member in members.values()})
            now = time.monotonic()
            late = now >= deadline
            agreed = now if len(shapes) < 2 else agreed
            # for two ttls one of them may be of ranks that have ended
            if len(shapes) > 1 and (late or now - agreed > 2 * self.site.roster_ttl_s):
                raise HandshakeMismatch(f"generation ranks disagree about shard_sizes: {shapes}")
            for sizes in shapes if len(shapes) == 1 else ():
                whole = [
                    shard
                    for shard, size in enumerate(sizes)
                    if all(f"{shard}.{worker}" in members for worker in range(size))
                ]
                if len(whole) == len(sizes) or (late and len(whole) >= max(1, self.min_shards)):
                    return sizes
            enrolled = ", ".join(sorted(members)) or "nobody"
            if late:
                raise RefitTimeout(
                    f"fleet {self.site.prefix!r}: fewer than {max(1, self.min_shards)} whole shards within "
                    f"{self._gather_s:g} s; enrolled are {enrolled}"
                )
            waiting.still(
                f"not all generation ranks are there; enrolled (shard.rank): {enrolled}; sizes: {shapes}"
            )
            time.sleep(LOOK_S)

    def _await_seats(self, address: Address) -> None:
        deadline = time.monotonic() + self._gather_s
        roster, waiting = enrolment(self.site, self.backend), Waiting(f"the leader of {self.site.prefix!r}")
        while True:
            enrolled = roster.members()
            names = [
                f"{shard}.{worker}"
                for shard, size in enumerate(address.shard_sizes)
                for worker in range(size)
            ]
            alive = [True] * address.trainers + [name in enrolled for name in names]
            missing = [seat for seat, joined in enumerate(self.seats.read()) if alive[seat] and not joined]
            if not missing:
                return
            if time.monotonic() >= deadline:
                log.warning("seats %s did not join within %g s", missing, self._gather_s)
                return
            waiting.still(f"seats {missing} have not joined")
            time.sleep(LOOK_S / 4)

    def _inference_world_size(self) -> int:
        return self._fleet_side.get_inference_world_size()

    def _gone(self, seat: int, incarnation: int, why: str) -> None:
        if self._post is not None:
            self._post.lost(seat, incarnation, why)
        super()._gone(seat, incarnation, why)

    def _retire(self) -> None:
        post, self._post = self._post, None
        cells, self._mail_cells = self._mail_cells, None
        if post is not None:
            post.close()
        if cells is not None:
            cells.close()
        self._announced = 0
        super()._retire()
