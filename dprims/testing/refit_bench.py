"""How fast weights travel, against the ways that engines move them today, in one run.

Every contestant moves the same tensors over the same group between the same processes, in turn, round after
round, so that what disturbs one disturbs all. The code behind ``dprims bench refit`` and the benchmarks.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..synchronizer.group import CommGroup, join_store, leader_store
from ..synchronizer.guard import Guard
from ..synchronizer.lanes import lane_for
from ..synchronizer.packing import dtype_of
from ..synchronizer.plan import Plan, TensorMeta
from ..synchronizer.sinks import DictSink
from ..synchronizer.sources import DictSource
from ..synchronizer.transfer import receive, send
from .ranks import run_ranks
from .transfer_rank import share_gpu

__all__ = [
    "CONTESTANTS",
    "MODELS",
    "Measured",
    "bench_refit",
    "cut",
    "model_metas",
]

DEADLINE_S = 120.0
FLAT_BYTES = 4 << 30
"""Most memory that the flat contestants and the device copy take."""

CONTESTANTS = {
    "device copy": "b.copy_(a) from one GPU to the other: the limit (CUDA, two GPUs)",
    "flat": "broadcasts of one large buffer, in buckets of the plan's size: no tensors",
    "flat guarded": "the same, each wait under a guard",
    "per tensor": "one broadcast a tensor, one after another",
    "async buckets": "async broadcasts of each tensor, waited for bucket by bucket",
    "cat": "torch.cat into a bucket, broadcast, copy out, one after another",
    "dprims": "without digests",
    "dprims verified": "with digests",
}
"""Name -> what it does."""

MODELS = {
    "qwen3-8b": "dense, 399 tensors, 16.4 GB",
    "qwen3-30b-a3b": "128 experts a layer, 18,867 tensors, 61 GB",
    "moe-3mb": "4,608 expert tensors of 3 MB, 14.5 GB",
    "llama-70b": "dense, 723 tensors, 141 GB",
    "kb256": "1,024 tensors of 256 KiB, 268 MB",
    "kb64": "8,192 tensors of 64 KiB, 537 MB",
    "kb64-mixed": "8,192 tensors of 64 KiB, in two shapes by turns, 537 MB",
}
"""Name -> what it looks like."""


def model_metas(model: str) -> list[TensorMeta]:
    """Names, shapes and dtypes of a model of `MODELS`. Raises ValueError for another."""
    if model == "qwen3-8b":
        return _transformer(36, 4096, 12288, 32, 8, 128, 151936, norms=True)
    if model == "qwen3-30b-a3b":
        return _transformer(48, 2048, 768, 32, 4, 128, 151936, norms=True, experts=128)
    if model == "llama-70b":
        return _transformer(80, 8192, 28672, 64, 8, 128, 128256)
    if model == "moe-3mb":
        return [TensorMeta(f"expert.{i}.weight", (768, 2048), "bfloat16") for i in range(4608)]
    if model in ("kb256", "kb64"):
        count, size = (1024, 256) if model == "kb256" else (8192, 64)
        return [TensorMeta(f"layer.{i}.weight", (size, 512), "bfloat16") for i in range(count)]
    if model == "kb64-mixed":
        shapes = ((64, 512), (512, 64))
        return [TensorMeta(f"layer.{i}.weight", shapes[i % 2], "bfloat16") for i in range(8192)]
    raise ValueError(f"the model is {model!r}; known are {', '.join(MODELS)}")


def cut(metas: Sequence[TensorMeta], nbytes: int | None) -> list[TensorMeta]:
    """The first tensors of a model, up to `nbytes` bytes of them; at least one."""
    kept: list[TensorMeta] = []
    total = 0
    for meta in metas:
        total += meta.nbytes
        if nbytes is not None and total > nbytes and kept:
            break
        kept.append(meta)
    return kept


@dataclass(slots=True)
class Measured:
    """One contestant: seconds of each round, from the moment at which all ranks are ready.

    Attributes:
        name: as in `CONTESTANTS`.
        nbytes: payload of a round.
        total_s: until every rank has the new weights live.
        wire_s: first bucket's dispatch to last bucket's arrival; the same as the total where nothing tells.
        phases: seconds of each phase in the median round, sender and receivers apart.
        spans: the median round's spans, each with its rank.
    """

    name: str
    nbytes: int
    total_s: list[float]
    wire_s: list[float]
    phases: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[int, str, int, float, float]] = field(default_factory=list, repr=False)

    @property
    def gb_per_s(self) -> float:
        """Payload over the median wire time, in 1e9 bytes a second."""
        return self.nbytes / statistics.median(self.wire_s) / 1e9

    @property
    def total_gb_per_s(self) -> float:
        """Payload over the median total time, in 1e9 bytes a second."""
        return self.nbytes / statistics.median(self.total_s) / 1e9


@dataclass(frozen=True, slots=True)
class _Job:
    metas: tuple[TensorMeta, ...]
    contestants: tuple[str, ...]
    device: str
    bucket_bytes: int
    rounds: int


def bench_refit(
    metas: Sequence[TensorMeta],
    *,
    contestants: Sequence[str] = tuple(CONTESTANTS),
    device: str = "cpu",
    receivers: int = 1,
    bucket_bytes: int,
    rounds: int = 5,
    timeout: float = 600.0,
) -> list[Measured]:
    """Move `metas` from one process to `receivers` others, by each contestant in turn, `rounds` times.

    Args:
        metas: the tensors; each process holds one set of them, and staging.
        contestants: which of `CONTESTANTS`; those that the device does not have are left out.
        device: "cpu" (gloo) or "cuda" (NCCL; with fewer GPUs than ranks several ranks share one and talk
            through sockets, which says nothing about speed).
        receivers: how many processes receive.
        bucket_bytes: for the plan, and for the contestants that have buckets.
        rounds: how often; the first is not counted.
        timeout: for everything, in seconds.
    """
    unknown = [name for name in contestants if name not in CONTESTANTS]
    if unknown:
        raise ValueError(f"the contestant is {unknown[0]!r}; known are {', '.join(CONTESTANTS)}")
    job = _Job(tuple(metas), tuple(contestants), device, bucket_bytes, rounds)
    answers = run_ranks(1 + receivers, _rank, job, timeout=timeout)
    measured = []
    nbytes = sum(meta.nbytes for meta in metas)
    for name in answers[0]:
        runs = [answer[name] for answer in answers if name in answer]
        totals = [max(times) for times in zip(*(run["total"] for run in runs), strict=True)]
        wires = [max(times) for times in zip(*(run["wire"] for run in runs), strict=True)]
        for number, told in enumerate(zip(*(run["spans"] for run in runs), strict=True)):
            # the processes share a clock: from the sender's first dispatch to the last arrival anywhere
            starts = [start for phase, _, start, _ in told[0] if phase == "wire"]
            stops = [stop for found in told for phase, _, _, stop in found if phase == "wire"]
            if starts:
                wires[number] = max(stops) - min(starts)
        middle = sorted(range(len(wires)), key=wires.__getitem__)[len(wires) // 2]
        spans = [(rank, *span) for rank, run in enumerate(runs) for span in run["spans"][middle]]
        phases: dict[str, float] = {}
        for rank, phase, _, start, stop in spans:
            key = f"{phase} ({'receiver' if rank else 'sender'})"
            phases[key] = phases.get(key, 0.0) + stop - start
        measured.append(Measured(name, nbytes, totals, wires, phases, spans))
    return measured


def _rank(rank: int, size: int, job: _Job) -> dict[str, dict[str, list[Any]]]:
    """One process of the benchmark."""
    where: list[Any] = [None, None]
    store: Any = None
    if rank == 0:
        store, *where[:] = leader_store("localhost")
    dist.broadcast_object_list(where)
    if rank:
        store = join_store(*where)
    device = share_gpu(rank, size) if job.device == "cuda" else torch.device("cpu")
    backend: Any = "nccl" if job.device == "cuda" else "gloo"
    group = CommGroup.build(
        store, "bench", rank, size, backend=backend, device=device, timeout_s=60.0, op_timeout_s=600.0
    )
    bench = _Bench(group, job)
    answers: dict[str, dict[str, list[Any]]] = {}
    for name in job.contestants:
        if bench.takes_part(name):
            answers[name] = {"total": [], "wire": [], "spans": []}
    for number in range(1 + job.rounds):
        for name, answer in answers.items():
            dist.barrier()
            start = time.monotonic()
            wire, spans = bench.contestants[name]()
            bench.synchronize()
            total = time.monotonic() - start
            if number:
                answer["total"].append(total)
                answer["wire"].append(total if wire is None else wire)
                answer["spans"].append(spans)
    dist.barrier()
    bench.check()
    return answers


class _Bench:
    """The tensors of one rank, and each contestant's way to move them."""

    def __init__(self, group: Any, job: _Job) -> None:
        self.group, self.job = group, job
        self.sends = group.rank == 0
        self.tensors = {
            meta.name: torch.full(meta.shape, 1.0 if self.sends else 0.0, device=group.device).to(
                dtype_of(meta.dtype)
            )
            for meta in job.metas
        }
        self.plan = Plan.build(job.metas, bucket_bytes=job.bucket_bytes)
        self.source = DictSource(self.tensors)
        self.sink = DictSink(self.tensors)
        self.version = 0
        self.flat = torch.zeros(min(self.plan.nbytes, FLAT_BYTES), dtype=torch.uint8, device=group.device)
        self.contestants: dict[str, Callable[[], tuple[float | None, list[Any]]]] = {
            "device copy": self._device_copy,
            "flat": self._flat,
            "flat guarded": self._flat_guarded,
            "per tensor": self._per_tensor,
            "async buckets": self._async_buckets,
            "cat": self._cat,
            "dprims": lambda: self._dprims(verify=False),
            "dprims verified": lambda: self._dprims(verify=True),
        }

    def takes_part(self, name: str) -> bool:
        """Whether this rank, and every other, can do it."""
        if name != "device copy":
            return True
        return self.group.device.type == "cuda" and bool(torch.cuda.device_count() >= self.group.size)

    def synchronize(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)

    def check(self) -> None:
        """Raise unless the contestants that move tensors brought what was sent."""
        if not set(self.job.contestants) - {"device copy", "flat", "flat guarded"}:
            return
        wrong = [name for name, tensor in self.tensors.items() if not bool((tensor == 1).all())]
        if wrong:
            raise RuntimeError(
                f"rank {self.group.rank}: {len(wrong)} tensors did not arrive, {wrong[0]!r} first"
            )

    def _buckets(self) -> list[list[Any]]:
        """The tensors in order, cut into buckets of the size that was asked for."""
        buckets: list[list[Any]] = [[]]
        filled = 0
        for tensor in self.tensors.values():
            if filled + tensor.nbytes > self.job.bucket_bytes and buckets[-1]:
                buckets.append([])
                filled = 0
            buckets[-1].append(tensor)
            filled += tensor.nbytes
        return buckets

    def _device_copy(self) -> tuple[None, list[Any]]:
        if self.sends:
            size, left = self.flat.numel(), self.plan.nbytes
            if not hasattr(self, "copies"):
                self.copies = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{i}") for i in (0, 1)]
            while left > 0:
                part = min(left, size)
                self.copies[1][:part].copy_(self.copies[0][:part], non_blocking=True)
                left -= part
        return None, []

    def _flat(self) -> tuple[None, list[Any]]:
        self._broadcast_flat(lambda work: work.wait())
        return None, []

    def _flat_guarded(self) -> tuple[None, list[Any]]:
        guard = Guard(deadline=time.monotonic() + DEADLINE_S, stall_timeout_s=DEADLINE_S)
        lane = lane_for(self.group.device)

        def wait(work: Any) -> None:
            for query in lane.arrival([work]):
                guard.wait(query)
            guard.progress(0)

        self._broadcast_flat(wait)
        return None, []

    def _broadcast_flat(self, wait: Callable[[Any], object]) -> None:
        left, at = self.plan.nbytes, 0
        works: deque[Any] = deque()
        while left > 0:
            at = 0 if at >= self.flat.numel() else at
            part = self.flat[at : at + min(left, self.job.bucket_bytes)]
            works.append(self.group.broadcast(part))
            left -= part.numel()
            at += part.numel()
            if len(works) > 2:
                wait(works.popleft())
        while works:
            wait(works.popleft())

    def _per_tensor(self) -> tuple[None, list[Any]]:
        for tensor in self.tensors.values():
            self.group.broadcast(tensor).wait()
        return None, []

    def _async_buckets(self) -> tuple[None, list[Any]]:
        for bucket in self._buckets():
            for work in [self.group.broadcast(tensor) for tensor in bucket]:
                work.wait()
        return None, []

    def _cat(self) -> tuple[None, list[Any]]:
        for bucket in self._buckets():
            views = [tensor.view(-1).view(torch.uint8) for tensor in bucket]
            sizes = [view.numel() for view in views]
            packed = torch.cat(views) if self.sends else self.flat.new_empty(sum(sizes))
            self.group.broadcast(packed).wait()
            if not self.sends:
                for view, part in zip(views, torch.split(packed, sizes), strict=True):
                    view.copy_(part)
        return None, []

    def _dprims(self, *, verify: bool) -> tuple[float, list[Any]]:
        guard = Guard(deadline=time.monotonic() + DEADLINE_S)
        if self.sends:
            stats = send(self.source, self.group, self.plan, guard, verify=verify)
        else:
            self.version += 1
            self.sink.begin(self.version, self.plan.metas)
            stats = receive(self.sink, self.group, self.plan, guard, verify=verify)
            self.sink.commit(self.version)
        return stats.wire_s, [tuple(span) for span in stats.spans]


def _transformer(
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head: int,
    vocabulary: int,
    *,
    norms: bool = False,
    experts: int = 0,
) -> list[TensorMeta]:
    """The parameters of a decoder with untied embeddings, in bfloat16, in the order of its state dict."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes[at + "self_attn.q_proj.weight"] = (heads * head, hidden)
        shapes[at + "self_attn.k_proj.weight"] = (kv_heads * head, hidden)
        shapes[at + "self_attn.v_proj.weight"] = (kv_heads * head, hidden)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, heads * head)
        if norms:
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (head,)
        if experts:
            shapes[at + "mlp.gate.weight"] = (experts, hidden)
        for expert in (f"experts.{i}." for i in range(experts)) if experts else ("",):
            shapes[f"{at}mlp.{expert}gate_proj.weight"] = (inner, hidden)
            shapes[f"{at}mlp.{expert}up_proj.weight"] = (inner, hidden)
            shapes[f"{at}mlp.{expert}down_proj.weight"] = (hidden, inner)
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    return [TensorMeta(name, shape, "bfloat16") for name, shape in shapes.items()]
