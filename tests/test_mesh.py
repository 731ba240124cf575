"""Meshes built by real processes over gloo."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dprims import LayoutError, MeshError, ParallelLayout, RankMismatch, StaleMesh
from dprims.testing.ranks import run_ranks

LIMIT_S = 60.0


def groups_made(build: Any) -> tuple[Any, int]:
    """Return what `build` returns, and how often it called torch's new_group."""
    real, calls = dist.new_group, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    dist.new_group = counted
    try:
        return build(), len(calls)
    finally:
        dist.new_group = real


def every_group_reduces(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    layout = ParallelLayout(world_size=world_size, **options)
    meshes, calls = groups_made(lambda: layout.build("cpu"))
    wrong = []
    for name in layout.names:
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=meshes.group(name))
        if total.item() != sum(layout.group_of(rank, name)):
            wrong.append(name)
        assert meshes[name] is meshes[name]
        assert meshes[name].ndim == 1
        assert meshes[name].get_group() is meshes.group(name)
        assert meshes[name].get_local_rank() == layout.index_in(rank, name)
        assert meshes.is_head(name) == (layout.head_of(rank, name) == rank)
    assert meshes["loss"] is meshes["dp_cp"]
    assert meshes.root.mesh_dim_names == layout.order
    assert meshes.root.get_coordinate() == tuple(layout.coordinates(rank).values())
    assert ParallelLayout.from_mesh(meshes.root, ep=layout.ep, etp=layout.etp) == layout
    distinct = {ranks for name in layout.names for ranks in layout.groups(name)}
    assert calls == len(distinct) - 1, "one for each set of ranks, and the world has its own"
    meshes.warm_up()
    meshes.close()
    dist.barrier()  # the default group is alive
    return wrong


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (2, {"tp": 2}),
        (4, {"pp": 2, "tp": 2}),
        (4, {"dp_replicate": 2, "dp_shard": 2}),
        (8, {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}),
        (8, {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}),
        (8, {"pp": 2, "dp_shard": 2, "cp": 2, "order": ("cp", "tp", "pp", "dp_shard", "dp_replicate")}),
    ],
    ids=str,
)
def test_every_group_is_real_and_made_once(world_size: int, options: dict[str, Any]) -> None:
    assert run_ranks(world_size, every_group_reduces, options, timeout=LIMIT_S) == [[]] * world_size


def ask_for_meshes(rank: int, world_size: int) -> None:
    layout = ParallelLayout(world_size=world_size, dp_replicate=2, dp_shard=2, tp=2, ep=2, etp=2)
    meshes = layout.build("cpu")
    hybrid = meshes["dp_replicate", "fsdp"]
    assert hybrid.mesh_dim_names == ("dp_replicate", "fsdp")
    assert hybrid is meshes["dp_replicate", "dp_shard_cp"]
    assert meshes.root is meshes[layout.order]
    assert meshes["dp_shard", "tp"].mesh.tolist() == meshes.root["dp_shard", "tp"].mesh.tolist()
    (grid,) = (grid for grid in layout.grids("ep_tp") if any(rank in row for row in grid))
    assert meshes["ep_tp"].mesh.tolist() == [list(row) for row in grid]
    assert meshes["ep_tp"] is meshes["ep", "etp"]
    for unknown in ("typo", "", "dp_tp"):
        with pytest.raises(LayoutError, match="pp_cp_tp"):
            meshes[unknown]
        with pytest.raises(LayoutError, match="pp_cp_tp"):
            meshes.group(unknown)
    for no_grid in (("tp", "dp_shard"), ("fsdp", "dp_shard"), ("fsdp", "ep")):
        with pytest.raises(MeshError, match="in this order; it has"):
            meshes[no_grid]


def test_meshes_of_several_names() -> None:
    run_ranks(8, ask_for_meshes, timeout=LIMIT_S)


def build_wrong_size(rank: int, world_size: int, size: int) -> str:
    with pytest.raises(RankMismatch) as caught:
        ParallelLayout(world_size=size, dp_shard=size).build("cpu")
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(("layout_size", "job_size"), [(8, 16), (16, 8)])
def test_a_layout_of_another_size_is_the_same_error_on_every_rank(layout_size: int, job_size: int) -> None:
    messages = run_ranks(job_size, build_wrong_size, layout_size, timeout=LIMIT_S)
    assert len(set(messages)) == 1
    assert f"world_size={layout_size}" in messages[0]
    assert f"a job of {job_size} ranks" in messages[0]


def build_apart(rank: int, world_size: int) -> str:
    degrees: dict[str, int] = {"tp": 2} if rank == 2 else {"cp": 2}
    with pytest.raises(RankMismatch) as caught:
        ParallelLayout(world_size=world_size, dp_shard=2, **degrees).build("cpu")
    dist.barrier()
    return str(caught.value)


def test_ranks_with_different_layouts_all_say_who_differs() -> None:
    messages = run_ranks(4, build_apart, timeout=LIMIT_S)
    assert len(set(messages)) == 1
    assert messages[0] == (
        "the ranks build different meshes: rank 2: cp=1, tp=2; rank 0: cp=2, tp=1 "
        "(1 of 4 ranks differ from rank 0)"
    )


def build_where_one_has_no_device(rank: int, world_size: int) -> str:
    os.environ.pop("LOCAL_RANK", None)
    torch.cuda.is_available = lambda: rank == 0
    with pytest.raises(MeshError) as caught:
        ParallelLayout(world_size=world_size, dp_shard=-1).build("cuda")
    dist.barrier()
    return str(caught.value)


def test_a_rank_without_a_device_is_the_same_error_on_every_rank() -> None:
    messages = run_ranks(2, build_where_one_has_no_device, timeout=LIMIT_S)
    assert messages[0] == messages[1]
    assert "torch.cuda.is_available() is False on rank 1 (1 of 2 ranks)" in messages[0]


def build_for_other_devices(rank: int, world_size: int) -> None:
    layout = ParallelLayout(world_size=world_size, tp=world_size)
    for device_type in ("banana", "", "cpu:0", "meta"):
        with pytest.raises(MeshError, match=f"device_type='{device_type}'.*backends for cpu"):
            layout.build(device_type)
    assert layout.build("cpu").cpu_group("tp") is dist.group.WORLD


def test_a_device_type_needs_a_backend() -> None:
    run_ranks(2, build_for_other_devices, timeout=LIMIT_S)


def test_no_torch_no_meshes() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import dprims\n"
        "try: dprims.ParallelLayout(world_size=1).build('cpu')\n"
        "except dprims.MissingExtra as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "torch is not installed; pip install 'dprims[torch]'\n"


def test_no_job_no_meshes() -> None:
    with pytest.raises(MeshError, match="init_process_group"):
        ParallelLayout(world_size=1).build("cpu")


def heads_make_a_group_first(rank: int, world_size: int, local: bool) -> list[float]:
    layout = ParallelLayout(world_size=world_size, pp=2, tp=2)
    totals = []
    for again in range(2):
        if layout.head_of(rank, "stage") == rank:
            heads = dist.new_group(list(layout.stage_heads()), use_local_synchronization=local)
            dist.all_reduce(torch.ones(1), group=heads)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=layout.build("cpu").group("tp"))
        totals.append(total.item())
        assert again < 2
    return totals


@pytest.mark.parametrize("local", [True, False])
def test_a_group_that_only_the_stage_heads_made_does_no_harm(local: bool) -> None:
    results = run_ranks(4, heads_make_a_group_first, local, timeout=LIMIT_S)
    assert results == [[1.0, 1.0], [1.0, 1.0], [5.0, 5.0], [5.0, 5.0]]


def build_twice(rank: int, world_size: int) -> None:
    layout = ParallelLayout(world_size=world_size, dp_shard=2, tp=2)
    first, second = layout.build("cpu"), layout.build("cpu")
    assert first.group("tp") is not second.group("tp")
    first.close()
    total = torch.ones(1)
    dist.all_reduce(total, group=second.group("tp"))
    assert total.item() == 2
    with pytest.raises(StaleMesh, match="closed"):
        first.group("tp")
    second.close()


def test_two_builds_live_side_by_side() -> None:
    run_ranks(4, build_twice, timeout=LIMIT_S)


def use_after_the_end(rank: int, world_size: int, port: int) -> None:
    layout = ParallelLayout(world_size=world_size, pp=2, tp=2)
    meshes = layout.build("cpu")
    uses = (
        lambda: meshes.root,
        lambda: meshes["tp"],
        lambda: meshes.group("tp"),
        lambda: meshes.cpu_group("tp"),
        lambda: meshes.is_head(),
        lambda: meshes.broadcast_from_head(1),
        lambda: meshes.warm_up(),
    )
    dist.barrier()
    dist.destroy_process_group()
    for use in uses:
        with pytest.raises(StaleMesh, match="destroyed: build again"):
            use()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world_size)
    for use in uses:
        with pytest.raises(StaleMesh, match="replaced: build again"):
            use()
    meshes.close()
    again = layout.build("cpu")
    assert again.broadcast_from_head(rank, "tp") == layout.head_of(rank, "tp")


def test_meshes_do_not_outlive_their_process_group() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(4, use_after_the_end, store.port, timeout=LIMIT_S)


def close_over_the_default_group(rank: int, world_size: int) -> None:
    layout = ParallelLayout(world_size=world_size, pp=2, tp=2)
    with layout.build("cpu") as meshes:
        assert meshes.group("pp_cp_tp") is dist.group.WORLD
    meshes.close()
    assert dist.is_initialized()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    with pytest.raises(StaleMesh, match="closed"):
        meshes.root  # noqa: B018


def test_closing_leaves_the_default_group_alive() -> None:
    run_ranks(4, close_over_the_default_group, timeout=LIMIT_S)


def close_after_a_failure(rank: int, world_size: int) -> None:
    meshes = ParallelLayout(world_size=world_size, dp_shard=2, tp=2).build("cpu")
    real, calls = dist.destroy_process_group, []

    def fail_once(group: Any = None) -> None:
        calls.append(group)
        if len(calls) == 2:
            raise RuntimeError("no")
        real(group)

    dist.destroy_process_group = fail_once
    with pytest.raises(RuntimeError, match="no"):
        meshes.close()
    meshes.close()
    meshes.close()
    assert calls[1] is calls[2]
    assert len(calls) == 4, "three groups of this rank, one of them tried twice"


def test_closing_again_destroys_what_an_error_left() -> None:
    run_ranks(4, close_after_a_failure, timeout=LIMIT_S)


def build_and_close(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return open files and threads after each of several builds, the meshes closed and still referenced."""
    layout = ParallelLayout(world_size=world_size, pp=2, tp=2)
    dist.barrier()
    counts = []
    for _ in range(10):
        meshes = layout.build("cpu")
        meshes.warm_up()
        meshes.broadcast_from_head({"ids": torch.ones(3)})
        dist.barrier()
        meshes.close()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts in /proc")
def test_builds_that_are_closed_leave_no_files_and_threads() -> None:
    for counts in run_ranks(4, build_and_close, timeout=LIMIT_S):
        assert counts[-1] <= counts[0]


def tear_down_everything(rank: int, world_size: int) -> None:
    layout = ParallelLayout(world_size=world_size, pp=2, tp=2)
    if layout.head_of(rank, "stage") == rank:
        dist.new_group(list(layout.stage_heads()), use_local_synchronization=True)
    layout.build("cpu")
    dist.destroy_process_group()


def test_the_whole_job_can_be_torn_down() -> None:
    run_ranks(4, tear_down_everything, timeout=LIMIT_S)


@dataclass
class Batch:
    """A container of a user's own."""

    ids: torch.Tensor
    notes: list[Any]


def a_batch(number: int) -> dict[str, Any]:
    ids = torch.arange(6).view(2, 3) + number
    return {
        "batch": Batch(ids, ["text", number, None, {"same": ids}]),
        "large": torch.full((700, 700), float(number)),
        "strided": torch.arange(6.0).view(2, 3).t() + number,
        "kinds": (
            torch.tensor(True),
            torch.tensor([1 + 2j]),
            torch.ones(3, dtype=torch.bfloat16),
            torch.ones(2, dtype=torch.float8_e4m3fn),
            torch.empty(0, 4),
            torch.tensor(number, dtype=torch.int16),
        ),
        "weight": nn.Parameter(torch.full((2,), float(number))),
    }


def receive_batches(rank: int, world_size: int, options: dict[str, Any]) -> None:
    layout = ParallelLayout(world_size=world_size, **options)
    meshes = layout.build("cpu")
    for name in layout.names:
        head = layout.head_of(rank, name)
        sent = a_batch(head) if meshes.is_head(name) else {"ignored": torch.ones(3)}
        got = meshes.broadcast_from_head(sent, name)
        if head == rank:
            assert got is sent
        expected = a_batch(head)
        assert torch.equal(got["batch"].ids, expected["batch"].ids)
        assert got["batch"].notes[:3] == ["text", head, None]
        assert got["batch"].notes[3]["same"] is got["batch"].ids, "one tensor stays one"
        assert torch.equal(got["large"], expected["large"])
        assert torch.equal(got["strided"], expected["strided"])
        for one, other in zip(got["kinds"], expected["kinds"], strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
        assert torch.equal(got["weight"].detach(), expected["weight"].detach())
        assert rank == head or not got["weight"].requires_grad
        got["large"].add_(1)  # memory of its own
    dist.barrier()


@pytest.mark.parametrize(
    ("world_size", "options"), [(8, {"pp": 2, "dp_shard": 2, "tp": 2}), (2, {"dp_shard": 2})]
)
def test_a_batch_arrives_whole_in_every_group(world_size: int, options: dict[str, Any]) -> None:
    run_ranks(world_size, receive_batches, options, timeout=LIMIT_S)


def send_what_cannot_be_sent(rank: int, world_size: int) -> list[str]:
    layout = ParallelLayout(world_size=world_size, tp=2, pp=2)
    meshes = layout.build("cpu")
    told = []
    for obj in (lambda: None, torch.eye(3).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(MeshError) as caught:
            meshes.broadcast_from_head(obj if rank == 0 else None)
        told.append(str(caught.value))
    assert meshes.broadcast_from_head("still works" if rank == 0 else None) == "still works"
    return told


def test_a_head_that_cannot_send_tells_everyone() -> None:
    results = run_ranks(4, send_what_cannot_be_sent, timeout=LIMIT_S)
    assert results == [results[0]] * 4
    function, sparse, meta = results[0]
    assert "rank 0, head of pp_cp_tp [0, 1, 2, 3]" in function
    assert "only plain dense tensors travel" in sparse
    assert "expected cpu" in meta


def build_twins(rank: int, world_size: int) -> None:
    layout = ParallelLayout(world_size=world_size, dp_shard=2, tp=2)
    plain = layout.build("cpu", cpu_twins=True)
    assert plain.cpu_group("tp") is plain.group("tp"), "gloo carries CPU tensors itself"


def test_a_group_that_carries_cpu_tensors_is_its_own_twin() -> None:
    run_ranks(4, build_twins, timeout=LIMIT_S)


def time_out(rank: int, world_size: int) -> bool:
    meshes = ParallelLayout(world_size=world_size, dp_shard=2, tp=2).build("cpu", timeout=0.5)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            dist.all_reduce(torch.ones(1), group=meshes.group("tp"))
    dist.barrier()
    return True


def test_the_groups_have_the_timeout_that_was_asked_for() -> None:
    assert all(run_ranks(4, time_out, timeout=LIMIT_S))


def from_meshes_of_others(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert ParallelLayout.from_mesh(mesh) == ParallelLayout(world_size=8, pp=2, dp_shard=2, tp=2)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("tp", "pp"))
    layout = ParallelLayout.from_mesh(mesh)
    assert layout.groups("pp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.group_of(rank, "tp") == tuple(mesh["tp"].mesh.tolist())
    wrong = (
        (init_device_mesh("cpu", (8,)), "None"),
        (init_device_mesh("cpu", (2, 4), mesh_dim_names=("fsdp", "tp")), "fsdp"),
        (mesh["tp"], "expected 0 to 3"),
        (DeviceMesh("cpu", [[0, 2, 4, 6], [1, 3, 5, 7]], mesh_dim_names=("pp", "tp")), "row-major"),
    )
    for other, said in wrong:
        with pytest.raises(LayoutError, match=said):
            ParallelLayout.from_mesh(other)


def test_a_layout_of_an_existing_mesh() -> None:
    run_ranks(8, from_meshes_of_others, timeout=LIMIT_S)


def log_lines(rank: int, world_size: int) -> list[str]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("dprims.mesh")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    ParallelLayout(world_size=world_size, tp=world_size).build("cpu").close()
    return lines


def test_a_build_is_one_line_of_log() -> None:
    for rank, lines in enumerate(run_ranks(2, log_lines, timeout=LIMIT_S)):
        assert lines == [f"built 1 groups on rank {rank} for ParallelLayout(world_size=2, tp=2)"]
