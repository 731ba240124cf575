"""Reinforcement learning that goes on when a generation shard is killed and another freezes.

    python examples/rl_loop.py

A small transformer learns to write words backwards, from nothing but a reward. Two trainers hold a pipeline
stage each, three shards sample. While the trainers learn from one batch the shards sample the next, so a
sample is one version old; it says which. After every step the weights travel by `sync.refit()`. In one refit
shard 1 is killed, and started anew some steps later; in another shard 2 is frozen, and thawed some steps
later. Needs matplotlib for the picture; `docs/rl-loop.md` shows one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rl.model import STAGES, Shape, prompts, reward, spelled
from rl.sampler import Sampler, Samples
from rl.trainer import Batch, Trainer
from torch import Tensor

from dprims import PeerLost
from dprims.backend import need
from dprims.synchronizer import CollectiveWeightSynchronizer, RefitReport
from dprims.synchronizer.rendezvous import leader_store
from dprims.testing.faults import Fault

SHARDS = 3
PROMPTS, ANSWERS = 24, 8
LIMIT_S = 60.0
KILLED, FROZEN = 1, 2
"""Which shard is killed, and which is frozen."""


@dataclass
class Row:
    """One step: what was learned from, and what the refit after it took."""

    step: int
    reward: float
    """Mean reward of the samples of the step."""
    exact: float
    """The share of them that is right in every letter."""
    versions: dict[int, int]
    """Version of the weights -> how many of the samples it gave."""
    lag: int
    """How many versions older than the trainers' weights the oldest sample is."""
    version: int
    """What the fleet serves after the step."""
    members: list[int]
    """The shards that serve it."""
    refit_s: float
    """What the refit took, with all its tries."""
    event: str = ""


@dataclass
class Request:
    """Prompts that a shard was asked to answer."""

    shard: int
    prompts: Tensor
    samples: Future[Samples]


@dataclass
class Loop:
    """The controller: it holds no weights, only who does what next."""

    policy: Any
    generation: Any
    sync: CollectiveWeightSynchronizer
    shape: Shape
    steps: int
    seed: int
    rows: list[Row] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    shown: str = ""

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.asked = 0
        self.kill_at, self.restart_at = round(self.steps * 0.32), round(self.steps * 0.42)
        self.freeze_at, self.thaw_at = round(self.steps * 0.55), round(self.steps * 0.67)

    def run(self) -> None:
        """Serve the first weights, then step after step."""
        self.sync.init_communicator()
        report = self.sync.refit()
        requests = self.ask(report.members)
        for step in range(1, self.steps + 1):
            event = self.before(step, report)
            samples = self.gather(requests, report)
            requests = self.ask(report.members)  # answered while the trainers learn
            batch, row = self.judge(step, samples, report.version)
            for stage in [self.policy.call(stage, "train", batch) for stage in range(STAGES)]:
                stage.result(LIMIT_S)
            self.sync.mark_stale()
            began = time.monotonic()
            report = self.sync.refit(lambda: self.generation.dead_shards)
            row.refit_s = time.monotonic() - began
            row.version, row.members = report.version, list(report.members)
            row.event = event or self.returned(row.members)
            self.rows.append(row)
            self.tell(row)
        for request in requests:
            request.samples.cancel()

    def before(self, step: int, report: RefitReport) -> str:
        """What happens to the fleet in this step."""
        if step == self.kill_at:
            self.arm(KILLED, "kill")
            return f"shard {KILLED} is killed in the refit"
        if step == self.freeze_at:
            self.pids[FROZEN] = self.generation.call(FROZEN, "pid").result(LIMIT_S)
            self.arm(FROZEN, "stop")
            return f"shard {FROZEN} is frozen in the refit"
        if step == self.restart_at:
            self.generation.restart(KILLED)
            return f"shard {KILLED} was started anew"
        if step == self.thaw_at:
            os.kill(self.pids.pop(FROZEN), signal.SIGCONT)
            return f"shard {FROZEN} was thawed"
        return ""

    def arm(self, shard: int, action: str) -> None:
        """Have a fault strike in the next refit, when the shard has its first bucket."""
        self.generation.process(shard).call_now("arm", Fault(action=action, bucket=0)).result(LIMIT_S)

    def ask(self, shards: tuple[int, ...]) -> list[Request]:
        """Share out new prompts among the shards that serve."""
        words = prompts(self.shape, PROMPTS, self.random)
        return [
            self.send(shard, part)
            for shard, part in zip(shards, words.tensor_split(len(shards)), strict=True)
        ]

    def send(self, shard: int, words: Tensor) -> Request:
        """Ask one shard."""
        self.asked += 1
        seed = self.seed * 1_000_000 + self.asked
        return Request(shard, words, self.generation.call(shard, "sample", words, ANSWERS, seed))

    def gather(self, requests: list[Request], report: RefitReport) -> list[Samples]:
        """The answers; what a shard was asked that died or froze meanwhile, another one is asked."""
        return [self.answered(request, report.members) for request in requests]

    def answered(self, request: Request, members: tuple[int, ...]) -> Samples:
        """The answer to one request, from whoever gives it."""
        for other in members:
            if request.shard in members or request.samples.done():
                try:
                    return request.samples.result(LIMIT_S)
                except (PeerLost, FutureTimeout):
                    pass
            request = self.send(other, request.prompts)
        return request.samples.result(LIMIT_S)

    def judge(self, step: int, samples: list[Samples], version: int) -> tuple[Batch, Row]:
        """Reward each answer, and hold it against the others to the same prompt."""
        tokens = torch.cat([one.tokens for one in samples])
        rewards = reward(self.shape, tokens)
        groups = rewards.view(-1, ANSWERS)
        spread = groups.std(dim=1, keepdim=True) + 1e-4
        advantage = ((groups - groups.mean(dim=1, keepdim=True)) / spread).flatten()
        versions: Counter[int] = Counter()
        for one in samples:
            versions[one.version] += len(one.tokens)
        self.shown = spelled(self.shape, tokens[0])
        exact = float((rewards == 1).float().mean())
        row = Row(
            step, float(rewards.mean()), exact, dict(versions), version - min(versions), version, [], 0.0
        )
        return Batch(tokens, torch.cat([one.logp for one in samples]), advantage), row

    def returned(self, members: list[int]) -> str:
        """Which shards serve again that did not before."""
        before = self.rows[-1].members if self.rows else members
        back = [shard for shard in members if shard not in before]
        return f"shard {back[0]} serves again" if back else ""

    def tell(self, row: Row) -> None:
        """A line now and then, and whenever something happens."""
        if row.event or row.step % max(self.steps // 15, 1) == 0 or row.step == 1:
            print(
                f"step {row.step:4d}  reward {row.reward:.2f}  {self.shown}  version {row.version:4d}  "
                f"lag {row.lag}  refit {row.refit_s * 1e3:5.0f} ms  shards {row.members}  {row.event}",
                flush=True,
            )

    def agree(self) -> bool:
        """Whether every shard serves the trainers' weights, to the last bit, and may."""
        wanted: dict[str, str] = {}
        for stage in range(STAGES):
            wanted |= self.policy.call(stage, "checksums").result(LIMIT_S)
        return all(
            self.generation.may_serve(shard)
            and self.generation.call(shard, "checksums").result(LIMIT_S) == wanted
            for shard in range(SHARDS)
        )


def places(device: str) -> tuple[list[str], list[dict[str, str]]]:
    """A device for each rank, and what its process's environment needs."""
    ranks = STAGES + SHARDS
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # that a peer is gone is no news here
    if device == "cpu":
        return ["cpu"] * ranks, [quiet] * ranks
    gpus = torch.cuda.device_count()
    if not gpus:
        sys.exit("--device is cuda; torch sees no GPU")
    # NCCL takes two ranks on one GPU only when they say that they are on different hosts
    apart = {"NCCL_SOCKET_IFNAME": "lo"} if gpus < ranks else {}
    return (
        [f"cuda:{rank % gpus}" for rank in range(ranks)],
        [quiet | apart | ({"NCCL_HOSTID": f"rank-{rank}"} if apart else {}) for rank in range(ranks)],
    )


def train(steps: int, seed: int, engine: str, device: str) -> tuple[Loop, bool]:
    """A whole run; every process is gone when it returns or raises."""
    shape = Shape()
    devices, environment = places(device)
    common: dict[str, Any] = {"device": devices, "environment": environment.__getitem__}
    with ExitStack() as stack:
        if engine == "ray":
            ray = need("ray", "ray")
            from dprims.engines.ray import RayGeneration as Generation
            from dprims.engines.ray import RayPolicy as Policy

            ray.init("local", log_to_driver=False, logging_level="error", include_dashboard=False)
            stack.callback(ray.shutdown)
            common["options"] = {"num_cpus": 0}
            if device == "cuda":  # Ray shows an actor only the GPU that it gave it
                devices = ["cuda"] * len(devices)
                common["device"] = "cuda"
                common["options"] |= {"num_gpus": torch.cuda.device_count() / len(devices)}
        else:
            from dprims.engines.local import LocalGeneration as Generation
            from dprims.engines.local import LocalPolicy as Policy
        policy: Any = Policy(Trainer, shape, seed, devices, stages=STAGES, **common)
        stack.callback(policy.close)
        generation: Any = Generation(
            Sampler, shape, devices[STAGES:], shard_sizes=(1,) * SHARDS, train_world_size=STAGES, **common
        )
        sync = CollectiveWeightSynchronizer(
            policy, generation, refit_timeout_s=20.0, stall_timeout_s=4.0, roster_ttl_s=2.0
        )
        stack.callback(sync.shutdown)
        stack.callback(generation.close)  # before the store that the ranks are connected to
        stack.callback(policy.close)
        store, host, port = leader_store(getattr(policy, "host", None))  # where the stages find each other
        for joined in [policy.call(stage, "connect", host, port) for stage in range(STAGES)]:
            joined.result(LIMIT_S)
        loop = Loop(policy, generation, sync, shape, steps, seed)
        loop.run()
        agree = loop.agree()
        del store  # served until here
        return loop, agree


def main() -> int:
    """Read the arguments, train, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=120, help="at least 20; 120 by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("rl-loop.png"), help="where to draw the run")
    parser.add_argument("--report", type=Path, help="where to write all numbers as JSON")
    arguments = parser.parse_args()
    if arguments.steps < 20:
        parser.error(f"--steps is {arguments.steps}; expected at least 20")
    need("matplotlib", "bench")  # before the run, not after it
    logging.basicConfig(format="           %(message)s", level=logging.ERROR)
    logging.getLogger("dprims.synchronizer.recovery").setLevel(logging.WARNING)  # why a refit was tried again
    began = time.monotonic()
    loop, agree = train(arguments.steps, arguments.seed, arguments.engine, arguments.device)
    seconds = time.monotonic() - began

    from rl.picture import draw

    draw(loop.rows, SHARDS, arguments.picture)
    third = len(loop.rows) // 3
    first, last = (
        sum(row.reward for row in rows) / third for rows in (loop.rows[:third], loop.rows[-third:])
    )
    print(
        f"{seconds:.0f} s; reward {first:.2f} in the first third, {last:.2f} in the last; all shards "
        f"{'serve' if agree else 'DO NOT serve'} the trainers' weights; see {arguments.picture}"
    )
    if arguments.report:
        result = {"seconds": seconds, "agree": agree, "rows": [asdict(row) for row in loop.rows]}
        arguments.report.write_text(json.dumps(result))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
