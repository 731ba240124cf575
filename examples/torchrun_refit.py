"""Refits between torchrun jobs that share one backend URL and nothing else.

    python examples/torchrun_refit.py

starts the jobs itself, on a store that it serves unless DPRIMS_BACKEND names another one: two trainers, a
pipeline stage each, and two generation shards. torchrun ends all ranks of a job when one of them dies, and so
does a shard: a job is a shard here. Shard 1 is killed while weights are on the wire. The trainers get an
error that names it, shard 0 still serves the old weights, and training goes on. torchrun starts shard 1 anew,
and the next refit takes it in again. At the end each stage says the checksum of its weights, and each shard
those of both stages.

By hand, on any hosts, with any backend, one job a shard::

    export DPRIMS_BACKEND=redis://h:6379/0
    torchrun --standalone --nproc-per-node 2 examples/torchrun_refit.py trainer
    torchrun --standalone --nproc-per-node 1 --max-restarts 1 examples/torchrun_refit.py generation 0
    torchrun --standalone --nproc-per-node 1 --max-restarts 1 examples/torchrun_refit.py generation 1
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: that a peer is gone is no news here

import torch

from dprims import BackendError, DprimsError, connect
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
            if step == STEPS + 1:
                say(rank, "training goes on until torchrun has started the lost shard anew")
            if step > STEPS:
                time.sleep(0.5)  # what a step of a real model takes
            noise = torch.Generator().manual_seed(100 * step + rank)
            for weight in weights.values():
                weight += torch.randn(weight.shape, generator=noise)
            refit.mark_stale()
            try:
                report = refit.sync_weights()
            except DprimsError as error:
                say(rank, f"step {step}: {type(error).__name__}: {error}")
                report = refit.sync_weights()
            say(rank, f"step {step}: version {report.version} on shards {report.members}")
            members = report.members
        with connect(url) as backend:
            if rank == 0:
                backend.write_once(END, b"1")
            backend.wait(END, LIMIT_S)  # so that nobody speaks of the end before the last step
        print(f"stage {rank} ends at version {report.version} with {checksum(weights)}", flush=True)


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
        version = 0
        while backend.wait(END, 0.1) is None:
            if receiver.may_serve and receiver.version != version:  # asked for every request
                version = receiver.version
                print(f"shard {shard} serves version {version}", flush=True)
        held = [
            checksum({name: t for name, t in sink.tensors.items() if name.startswith(f"stage{stage}.")})
            for stage in range(STAGES)
        ]
        print(f"shard {shard} ends at version {receiver.version} with {' '.join(held)}", flush=True)


def everything(url: str | None) -> int:
    """Serve a store unless there is a backend, run the jobs, and end them all."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    with connect(url or "tcpstore://127.0.0.1:0?serve=1") as backend:
        environment = {**os.environ, "DPRIMS_BACKEND": backend.url, "OMP_NUM_THREADS": "1"}

        def start(ranks: int, *role: str) -> subprocess.Popen[bytes]:
            command = [*torchrun, "--nproc-per-node", str(ranks), __file__, *role]
            return subprocess.Popen(command, env=environment)

        jobs = [
            start(STAGES, "trainer"),
            start(1, "generation", "0"),
            start(1, "generation", "1", "--doomed"),
        ]
        try:
            return max(abs(job.wait(LIMIT_S)) for job in jobs)
        finally:
            for job in jobs:
                job.terminate()  # torchrun ends its ranks
            for job in jobs:
                job.wait(LIMIT_S)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "role", nargs="?", choices=("everything", "trainer", "generation"), default="everything"
    )
    parser.add_argument("shard", nargs="?", type=int, default=0, help="of generation: the job's first shard")
    parser.add_argument("--doomed", action="store_true", help="generation: die in the second refit")
    arguments = parser.parse_args()
    url = os.environ.get("DPRIMS_BACKEND")
    try:
        if arguments.role == "everything":
            return everything(url)
        if url is None or "RANK" not in os.environ:
            parser.error(
                f"{arguments.role} is started by torchrun, with DPRIMS_BACKEND set to what all jobs share"
            )
        if arguments.role == "trainer":
            trainer(url)
        else:
            generation(url, arguments.shard, arguments.doomed)
    except BackendError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    sys.stdout.flush()
    os._exit(0)  # a transfer that was cut may have left a thread in the wire


if __name__ == "__main__":
    sys.exit(main())
