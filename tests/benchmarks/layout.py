"""What a layout costs, and how many process groups its meshes make. Run: python tests/benchmarks/layout.py

Prints each number beside its limit, and exits 1 when one is over. ``--json`` prints the numbers alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dprims import ParallelLayout

USE = "import dprims; dprims.ParallelLayout(world_size=16, pp=2, dp_shard=-1, tp=2)"
LARGE = {"world_size": 4096, "pp": 8, "dp_replicate": 2, "dp_shard": -1, "cp": 4, "tp": 8, "ep": 16}
HUGE = {"world_size": 131072, "pp": 16, "dp_replicate": 4, "dp_shard": -1, "cp": 4, "tp": 8, "ep": 64}
JOBS = (
    {"world_size": 8, "pp": 2, "dp_shard": 2, "tp": 2},
    {"world_size": 16, "pp": 2, "dp_shard": 2, "cp": 2, "tp": 2},
    {"world_size": 64, "pp": 4, "dp_shard": 4, "tp": 4},
    {"world_size": 512, "pp": 4, "dp_replicate": 2, "dp_shard": 8, "tp": 8},
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows = measure()
    if as_json:
        print(json.dumps([{"what": what, "value": value, "limit": limit} for what, value, limit in rows]))
    else:
        for what, value, limit in rows:
            bound = "" if limit is None else f"  (limit {limit:g}{'' if value <= limit else ', EXCEEDED'})"
            print(f"{what:68} {value:10.3f}{bound}")
    return int(any(limit is not None and value > limit for _, value, limit in rows))


def measure() -> list[tuple[str, float, float | None]]:
    large = ParallelLayout(**LARGE)
    rows: list[tuple[str, float, float | None]] = [
        ("import dprims and a layout, ms over a bare interpreter", import_ms(), 30),
        (
            f"all groups of {len(large.names)} names of 4,096 ranks, ms",
            best(lambda: everything(large)) * 1e3,
            50,
        ),
    ]
    rows += [
        (f"group_of one rank of 4,096: {name} ({large.size(name)} ranks), us", one_group_us(large, name), 100)
        for name in large.names
    ]
    seconds, megabytes = huge_cost()
    rows += [
        ("all groups of all names of 131,072 ranks, s", seconds, 3),
        ("the same, MB of memory of the whole process", megabytes, 200),
    ]
    for job in JOBS:
        rows += group_counts(ParallelLayout(**job))
    return rows


def best(call: Callable[[], object], repeat: int = 7) -> float:
    """Return the seconds of the fastest of several calls: what the code costs, not what else runs."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def everything(layout: ParallelLayout) -> dict[str, Any]:
    return {name: layout.groups(name) for name in layout.names}


def import_ms(repeat: int = 15) -> float:
    """Return by how much an interpreter that makes a layout is slower than a bare one, each at its best."""

    def run(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    bare, used = (best(partial(run, code), repeat) for code in ("pass", USE))
    return (used - bare) * 1e3


def one_group_us(layout: ParallelLayout, name: str, calls: int = 50) -> float:
    def ask() -> None:
        for rank in range(0, layout.world_size, layout.world_size // calls):
            layout.group_of(rank, name)

    return best(ask) / len(range(0, layout.world_size, layout.world_size // calls)) * 1e6


def huge_cost() -> tuple[float, float]:
    """Return seconds and megabytes of the huge layout, in an interpreter of its own."""
    code = (
        "import json, time\n"
        "from pathlib import Path\n"
        "from dprims import ParallelLayout\n"
        f"layout = ParallelLayout(**{HUGE})\n"
        "start = time.perf_counter()\n"
        "groups = {name: layout.groups(name) for name in layout.names}\n"
        "seconds = time.perf_counter() - start\n"
        "status = dict(line.split(':', 1) for line in Path('/proc/self/status').read_text().splitlines())\n"
        "print(json.dumps([seconds, int(status['VmHWM'].split()[0]) / 1024]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    seconds, megabytes = json.loads(done.stdout)
    return seconds, megabytes


def group_counts(layout: ParallelLayout) -> list[tuple[str, float, float | None]]:
    """Return how often new_group is called for the same names: by build, and by torch's own recipe."""
    distinct = {ranks for name in layout.names for ranks in layout.groups(name)}
    label = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1)
    ours, ours_s = calls_of(layout, lambda: layout.build("cpu"))
    theirs, theirs_s = calls_of(layout, lambda: torch_recipe(layout))
    return [
        (f"{label}: new_group calls of build", ours, len(distinct)),
        ("    of init_device_mesh and _flatten", theirs, None),
        ("    distinct sets of ranks", len(distinct), None),
        ("    build, ms on the fake backend", ours_s * 1e3, None),
        ("    init_device_mesh and _flatten, ms on the fake backend", theirs_s * 1e3, None),
    ]


def torch_recipe(layout: ParallelLayout) -> None:
    root = device_mesh.init_device_mesh("cpu", tuple(layout.sizes.values()), mesh_dim_names=layout.order)
    for name in layout.names:
        if name not in layout.order:
            root[layout.axes_of(name)]._flatten(name)


def calls_of(layout: ParallelLayout, build: Callable[[], object]) -> tuple[int, float]:
    """Return the calls of new_group on the last rank of a job that does not exist, and the seconds."""
    real, calls = dist.new_group, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    dist.init_process_group(
        "fake", store=FakeStore(), rank=layout.world_size - 1, world_size=layout.world_size
    )
    dist.new_group = device_mesh.new_group = counted  # type: ignore[attr-defined]
    try:
        start = time.perf_counter()
        build()
        return len(calls), time.perf_counter() - start
    finally:
        dist.new_group = device_mesh.new_group = real  # type: ignore[attr-defined]
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
