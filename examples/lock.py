"""Build process groups one at a time across the ranks of a job: a lock without a backend argument.

    python examples/lock.py             # starts itself under torchrun, on the job's own store
    python examples/lock.py redis       # the same on a Redis server that it starts, or: etcd
    torchrun --nproc-per-node 4 examples/lock.py
    DPRIMS_BACKEND=redis://host:6379 torchrun --nproc-per-node 4 examples/lock.py

Each pair of ranks builds a group of its own (NCCL with a GPU a rank, else gloo). The first rank of a
pair takes the lock and calls the second one in, so that no two pairs build at the same time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

import dprims
from dprims.testing.servers import EtcdServer, RedisServer

TIMEOUT = timedelta(seconds=60)


def launch(server: str, ranks: int) -> int:
    """Run this file under torchrun, on a server of the kind *server*, or on torchrun's own store."""
    starts = {"redis": RedisServer, "etcd": EtcdServer, "": nullcontext}
    with starts[server]() as running:
        backend = {"DPRIMS_BACKEND": running.url} if running else {}
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        return subprocess.run([*torchrun, __file__], env={**os.environ, **backend}, check=False).returncode


def build_group(store: dist.Store, name: str, rank: int, size: int) -> None:
    """A process group of *size* ranks under *name*, used once so that it is connected."""
    prefixed = dist.PrefixStore(name, store)
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
    else:
        device = torch.device("cpu")
        group = dist.ProcessGroupGloo(prefixed, rank, size, TIMEOUT)
    here = torch.ones(1, device=device)
    group.allreduce([here]).wait()
    if here.item() != size:
        raise RuntimeError(f"group {name} of {size} ranks counts {here.item()}")


def main() -> int:
    """What each rank does: build its pair's group, then compare notes with all others."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=TIMEOUT)
    pair, place = divmod(rank, 2)
    size = min(2, world - 2 * pair)
    note = None
    if place == 0:
        with dprims.DistributedLock("group creation", timeout=60.0, label=f"pair {pair}") as grant:
            began = time.time()
            store.set(f"build/{pair}", "now")
            build_group(store, f"pair/{pair}", place, size)
            note = (began, time.time(), pair, grant.token)
    else:
        store.wait([f"build/{pair}"], TIMEOUT)
        build_group(store, f"pair/{pair}", place, size)
    notes: list[tuple[float, float, int, int] | None] = [None] * world
    dist.all_gather_object(notes, note)
    dist.destroy_process_group()
    held = sorted(one for one in notes if one is not None)
    alone = all(before[1] <= after[0] for before, after in pairwise(held))
    if rank == 0:
        for began, ended, pair, token in held:
            since, until = began - held[0][0], ended - held[0][0]
            print(f"pair {pair} built from {since:.3f} to {until:.3f} s, token {token}")
        print("one at a time" if alone else "two pairs built at the same time")
    return 0 if alone else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit(main())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("server", nargs="?", default="", choices=["", "redis", "etcd"])
    parser.add_argument("--ranks", type=int, default=6)
    given = parser.parse_args()
    sys.exit(launch(given.server, given.ranks))
