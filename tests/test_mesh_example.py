from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dprims import ParallelLayout

EXAMPLE = Path(__file__).parent.parent / "examples" / "mesh.py"


def run(*command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command, str(EXAMPLE)],
        cwd=EXAMPLE.parent.parent,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(EXAMPLE.parent.parent)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_on_paper_it_prints_the_groups_of_1024_ranks() -> None:
    layout = ParallelLayout(world_size=1024, pp=4, dp_shard=16, cp=2, tp=8)
    lines = [line for line in run() if line.startswith("batch ") and "read by" in line]
    assert [line.rpartition(": ")[2] for line in lines] == [str(ranks) for ranks in layout.groups("pp_cp_tp")]


@pytest.mark.slow
def test_in_a_job_every_rank_has_the_batch_of_its_head() -> None:
    lines = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8")
    layout = ParallelLayout(world_size=8, pp=2, dp_shard=2, tp=2)
    for rank, line in enumerate(lines):
        number, head = layout.data_parallel_rank(rank), layout.head_of(rank, "pp_cp_tp")
        ids = [100 * number + place for place in range(4)]
        assert line == f"rank {rank}: 'prompt {number}' {ids} from rank {head}"
    assert len(lines) == 8
