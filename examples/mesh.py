"""Parallel groups, first on paper and then in a job.

With no GPU, no torch and no job, the groups of 1,024 ranks that share one batch::

    python examples/mesh.py

The same file as a job of 8 processes, which builds the groups and broadcasts a batch from each head::

    torchrun --standalone --nproc-per-node 8 examples/mesh.py
"""

from __future__ import annotations

import argparse
import os

from dprims import ParallelLayout


def layout_for(world_size: int) -> ParallelLayout:
    """Split the ranks four ways where there are many; data parallelism takes what is left."""
    if world_size >= 256:
        return ParallelLayout(world_size=world_size, pp=4, dp_shard=-1, cp=2, tp=8)
    return ParallelLayout(world_size=world_size, pp=2, dp_shard=-1, tp=2)


def on_paper(layout: ParallelLayout) -> None:
    """Print who shares a batch with whom, and who reads it."""
    print(layout.render("text"))
    for number, ranks in enumerate(layout.groups("pp_cp_tp")):
        print(f"batch {number}: read by rank {ranks[0]}, shared by {len(ranks)} ranks: {ranks}")


def in_a_job(layout: ParallelLayout) -> None:
    """Build the groups; every head reads its batch, and every rank of its group receives it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with layout.build("cpu") as meshes:
        batch = None
        if meshes.is_head("pp_cp_tp"):
            number = layout.data_parallel_rank(rank)
            batch = {"prompt": f"prompt {number}", "ids": torch.arange(4) + 100 * number}
        batch = meshes.broadcast_from_head(batch, "pp_cp_tp")

        head = layout.head_of(rank, "pp_cp_tp")
        line = f"rank {rank}: {batch['prompt']!r} {batch['ids'].tolist()} from rank {head}"
        lines: list[str] = [""] * layout.world_size
        dist.all_gather_object(lines, line)
        if rank == 0:
            print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    if "RANK" in os.environ:
        in_a_job(layout_for(int(os.environ["WORLD_SIZE"])))
    else:
        on_paper(layout_for(1024))
