"""What a lost receiver costs over NCCL: one sender and one receiver, a GPU each.

    python tests/benchmarks/refit_gpu.py [--json FILE]

Prints a table: how long until the sender is free again, until a group stands again, and until a fresh process
(after `raise`: the same one) holds the new weights, bit by bit. Then many groups one after another, and
what is left of them. Two GPUs talk over NVLink; on one GPU both ranks share it and talk through sockets.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dprims.exceptions import PeerLost
from dprims.synchronizer.plan import Plan
from dprims.synchronizer.sources import DictSource
from dprims.testing.transfer_rank import Outcome, TransferFleet, TransferRank

LIMIT_S = 90.0
FAR_S = 600.0
"""Deadline and torch's own timeout: neither may be what releases anybody."""

SHORT_S = 2.0
REBUILDS = 50
VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def model(seed: int, device: torch.device | str) -> dict[str, Tensor]:
    """768 MiB, half of it in tensors that travel uncopied, half in tensors that are packed."""
    generator = torch.Generator(device).manual_seed(seed + 10)

    def bits(count: int) -> Tensor:
        return torch.randint(-(1 << 62), 1 << 62, (count // 8,), generator=generator, device=device)

    tensors: dict[str, Tensor] = {}
    for layer in range(24):
        tensors[f"layer.{layer}.large"] = bits(16 << 20)
        tensors |= {f"layer.{layer}.expert.{i}": bits(1 << 20) for i in range(16)}
    return tensors


class Rank(TransferRank):
    """A rank that tells what it holds open, and whose group can be made impatient."""

    def resources(self) -> dict[str, int]:
        """Threads, descriptors, resident bytes, and bytes in use on the GPU by everybody."""
        free, total = torch.cuda.mem_get_info(self.device)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "Python threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "resident MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
            "GPU MiB": (total - free) >> 20,
        }

    def shorten(self, seconds: float) -> None:
        """Shorten torch's timeout of the group that is in use."""
        group = self._group
        if group is not None and group._pg is not None:
            group._pg._get_backend(self.device)._set_default_timeout(timedelta(seconds=seconds))


class Case:
    """One receiver that is lost, in a fleet that is reused."""

    number = 0

    def __init__(self, fleet: TransferFleet, plan: Plan) -> None:
        self.fleet, self.plan = fleet, plan.to_bytes()

    def build(self) -> float:
        """Build a group; seconds."""
        Case.number += 1
        start = time.monotonic()
        prefix = f"group {Case.number}"
        for future in self.fleet.call("build", prefix, timeout_s=LIMIT_S, op_timeout_s=FAR_S):
            outcome = future.result(LIMIT_S)
            if outcome.error is not None:
                raise outcome.error
        return time.monotonic() - start

    def start(self, seed: int, *faults: dict[str, Any]) -> list[Future[Outcome]]:
        """Start a transfer."""
        found: list[Future[Outcome]] = self.fleet.call(
            "transfer", self.plan, seed=seed, faults=faults, timeout_s=FAR_S, stacks_s=20.0
        )
        return found

    def transfer(self, seed: int) -> float:
        """Do one transfer, and compare all weights; its seconds."""
        outcomes = [future.result(LIMIT_S) for future in self.start(seed)]
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        if len({outcome.checksum for outcome in outcomes}) != 1:
            raise RuntimeError("the weights differ")
        return max(outcome.stats.seconds for outcome in outcomes if outcome.stats is not None)

    def run(self, seed: int, action: str, phase: str, bucket: int | None, short: bool) -> dict[str, Any]:
        """Lose the receiver, tell the sender, take a receiver back."""
        pid = self.fleet.ranks[1].pid
        sender, receiver = self.start(seed, {"action": action, "phase": phase, "rank": 1, "bucket": bucket})
        if action == "stop":
            wait_until_frozen(pid)
        else:
            wait_until_done(receiver)
        told = time.monotonic()
        if short:
            self.fleet.ranks[0].call_now("shorten", SHORT_S).result(LIMIT_S)
        self.fleet.ranks[0].call_now("cancel", "the receiver is lost")
        outcome = sender.result(LIMIT_S)
        row: dict[str, Any] = {
            "sender": "had sent all" if outcome.error is None else type(outcome.error).__name__,
            "released_s": max(0.0, outcome.ended - told),
        }
        start = time.monotonic()
        if action != "raise":
            self.fleet.replace(1)
            self.fleet.ranks[1].ready.result(LIMIT_S)
        row["process_s"] = time.monotonic() - start
        row["rebuilt_s"] = self.build()
        row["refit_s"] = self.transfer(seed)
        row["exact"] = True
        return row


def wait_until_frozen(pid: int) -> None:
    """Wait until a process is stopped."""
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} was never stopped")
        time.sleep(0.002)


def wait_until_done(future: Future[Outcome]) -> None:
    """Wait until a call has ended, by a death or with what it raised."""
    try:
        error: BaseException | None = future.result(LIMIT_S).error
    except PeerLost as lost:
        error = lost
    if error is None:
        raise RuntimeError("nothing hit the receiver")


def rebuild_many(case: Case, count: int) -> list[dict[str, Any]]:
    """Build `count` groups; every fifth ends in the middle of a transfer, the others are released."""
    rows = []
    for number in range(count + 1):
        case.build()
        if number % 5 == 0:
            fault = {"action": "raise", "rank": 1, "bucket": 8}
            sender, receiver = case.start(2, fault)
            wait_until_done(receiver)
            case.fleet.ranks[0].call_now("cancel", "the receiver raised")
            sender.result(LIMIT_S)
        if number in (count // 10, count // 2, count):
            for rank, process in enumerate(case.fleet.ranks):
                rows.append({"groups": number, "rank": rank, **process.call("resources").result(LIMIT_S)})
    return rows


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rebuilds", type=int, default=REBUILDS)
    parser.add_argument(
        "--only-rebuilds", action="store_true", help="lose nobody but by an error in a rebuild"
    )
    options = parser.parse_args()
    plan = Plan.build(DictSource(model(0, "cpu")).metadata(), bucket_bytes=16 << 20)
    middle = len(plan.buckets) // 2
    places: dict[str, tuple[str, int | None]] = {"before commit": ("decision", None)}
    for lane in ("direct", "packed"):
        near = min((b.index for b in plan.buckets if b.lane == lane), key=lambda i: abs(i - middle))
        places[f"bucket {near}, {lane}"] = ("bucket", near)
    cases = [(action, place, False) for action in ("kill", "stop", "raise") for place in places]
    cases += [(action, place, True) for action in ("kill", "stop") for place in list(places)[1:2]]
    if options.only_rebuilds:
        cases.clear()
    rows: list[dict[str, Any]] = []
    held: list[dict[str, Any]] = []
    print(f"{len(plan.buckets)} buckets, {plan.nbytes >> 20} MiB, {torch.cuda.device_count()} GPUs\n")
    print(
        f"| {VARIABLE} | receiver | at | timeout shortened | sender | released s | process s | rebuilt s "
        "| refit s | exact |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for value in ("default", "0"):
        os.environ.pop(VARIABLE, None)
        with TransferFleet(2, "cuda", model, RANKS[value]) as fleet:
            case = Case(fleet, plan)
            case.build()
            case.transfer(1)
            pid = fleet.ranks[0].pid
            for seed, (action, place, short) in enumerate(cases, 2):
                row = case.run(seed, action, *places[place], short)
                rows.append({"value": value, "action": action, "place": place, "short": short, **row})
                print(
                    f"| {value} | {action} | {place} | {'yes' if short else ''} | {row['sender']} | "
                    f"{row['released_s']:.3f} | {row['process_s']:.2f} | {row['rebuilt_s']:.3f} | "
                    f"{row['refit_s']:.4f} | {'yes' if row['exact'] else 'NO'} |",
                    flush=True,
                )
            held += [{"value": value, **row} for row in rebuild_many(case, options.rebuilds)]
            if not fleet.ranks[0].alive or fleet.ranks[0].pid != pid:
                raise RuntimeError("the sender did not survive")
    print(f"\n| {' | '.join(held[0])} |\n|{'---|' * len(held[0])}")
    for row in held:
        print(f"| {' | '.join(str(cell) for cell in row.values())} |")
    if options.json:
        options.json.write_text(json.dumps({"cases": rows, "held": held}))


class Lenient(Rank):
    """With torch's error handling off, for the process's own groups too."""

    def __init__(self, *args: Any) -> None:
        os.environ[VARIABLE] = "0"
        super().__init__(*args)


RANKS: dict[str, type[Rank]] = {"default": Rank, "0": Lenient}

if __name__ == "__main__":
    main()
