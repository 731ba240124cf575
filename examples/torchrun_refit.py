"""Refits between torchrun jobs that share one backend URL and nothing else.

    python examples/torchrun_refit.py

starts the jobs itself, on a store that it serves: two trainers, a pipeline stage each, and two generation
shards. torchrun ends all ranks of a job when one of them dies, and so does a shard: a job is a shard here.
Shard 1 is killed while weights are on the wire. The trainers get an error that names it, shard 0 still serves
the old weights, and training goes on. torchrun starts shard 1 anew, and the next refit takes it in again.

By hand, on any hosts, with any backend::

    export DPRIMS_BACKEND=redis://h:6379/0
    torchrun --standalone --nproc-per-node 2 examples/torchrun_refit.py trainer
    torchrun --standalone --nproc-per-node 2 examples/torchrun_refit.py generation
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time

import torch

from dprims import DprimsError, connect
from dprims.engines.spmd import SpmdReceiver, SpmdRefit
from dprims.synchronizer import DictSink, DictSource
from dprims.testing.faults import Fault, FaultInjector

STAGES, SHARDS, STEPS = 2, 2, 4
FLEET = "torchrun-example"
END = f"{FLEET}/end"
LIMIT_S = 120.0


def stage_weights(stage: int) -> dict[str, torch.Tensor]:
    """The parameters of one pipeline stage."""
    return {f"stage{stage}.layer{i}.weight": torch.zeros(256, 256) for i in range(8)}


def checksum(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all bytes, by name."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def trainer(url: str) -> None:
    """One stage: train, refit, and say what happened."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    weights = stage_weights(rank)
    with SpmdRefit(
        DictSource(weights),
        backend=url,
        fleet=FLEET,
        rank=rank,
        world_size=world_size,
        stage=rank,
        bucket_bytes=256 << 10,
        refit_timeout_s=30.0,
        roster_ttl_s=2.0,
    ) as refit:
        if rank == 0:
            with connect(url) as backend:
                backend.delete(END)  # of an earlier run
        refit.init_communicator()
        step, members = 0, ()
        while step < STEPS or len(members) < SHARDS:
            step += 1
            if step > STEPS:
                time.sleep(0.5)  # what a step of a real model takes, while torchrun starts the shard anew
            noise = torch.Generator().manual_seed(100 * step + rank)
            for weight in weights.values():
                weight += torch.randn(weight.shape, generator=noise)
            refit.mark_stale()
            try:
                report = refit.sync_weights()
            except DprimsError as error:
                say(rank, f"step {step}: {type(error).__name__}: {error}")
                report = refit.sync_weights()
            if step <= STEPS or report.members != members:
                say(rank, f"step {step}: version {report.version} on shards {report.members}")
            members = report.members
        print(f"stage {rank} ends at version {report.version} with {checksum(weights)}", flush=True)
        if rank == 0:
            with connect(url) as backend:
                backend.write_once(END, b"1")


def say(rank: int, text: str) -> None:
    """Say on one rank what is the same on all."""
    if rank == 0:
        print(text, flush=True)


def generation(url: str, first_shard: int, doomed: bool) -> None:
    """One rank of a shard: serve requests until the trainers are done."""
    shard = first_shard + int(os.environ["RANK"])
    weights = {name: tensor for stage in range(STAGES) for name, tensor in stage_weights(stage).items()}
    sink = DictSink(weights)
    with (
        connect(url) as backend,
        SpmdReceiver(
            sink, backend=url, fleet=FLEET, shard=shard, shard_sizes=(1,) * SHARDS, roster_ttl_s=2.0
        ) as receiver,
    ):
        if doomed and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            # The first refit passes, a bucket 1 of each stage; in the second one this process dies.
            receiver.receiver.faults = FaultInjector([Fault(action="kill", bucket=1, skip=STAGES)])
        version, versions = 0, 0
        while backend.wait(END, 0.1) is None:
            if receiver.may_serve and receiver.version != version:  # asked for every request
                version, versions = receiver.version, versions + 1
                if versions <= STEPS:
                    print(f"shard {shard} serves version {version}", flush=True)
        held = [
            checksum({name: t for name, t in sink.tensors.items() if name.startswith(f"stage{stage}.")})
            for stage in range(STAGES)
        ]
        print(f"shard {shard} ends at version {receiver.version} with {' '.join(held)}", flush=True)


def everything(url: str | None) -> int:
    """Serve a store unless there is a backend, run the jobs, and end them all."""
    with connect(url or "tcpstore://127.0.0.1:0?serve=1") as backend:
        commands = [
            ["trainer"],
            *(["generation", str(shard), "doomed"[: 6 * shard]] for shard in range(SHARDS)),
        ]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
        jobs = [
            subprocess.Popen(
                [
                    *torchrun,
                    "--nproc-per-node",
                    str(STAGES if command == ["trainer"] else 1),
                    __file__,
                    *command,
                ],
                env={**os.environ, "DPRIMS_BACKEND": backend.url, "OMP_NUM_THREADS": "1"},
            )
            for command in commands
        ]
        try:
            return max(abs(job.wait(LIMIT_S)) for job in jobs)
        finally:
            for job in jobs:
                job.terminate()  # torchrun ends its ranks
            for job in jobs:
                job.wait(LIMIT_S)


if __name__ == "__main__":
    role, *rest = sys.argv[1:] or ["everything"]
    url = os.environ.get("DPRIMS_BACKEND")
    if role == "everything":
        sys.exit(everything(url))
    elif url is None:
        sys.exit("DPRIMS_BACKEND has to name the backend that all jobs share")
    elif role == "trainer":
        trainer(url)
    else:
        generation(url, int((rest or ["0"])[0]), "doomed" in rest)
    sys.stdout.flush()
    os._exit(0)  # a transfer that was cut may have left a thread in the wire
