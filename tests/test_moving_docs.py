"""Each snippet under "After" on docs/moving.md, run as it stands, with what the page leaves to its reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import dprims

from .helpers.pages import ROOT, blocks, finished, start

PAGE = ROOT / "docs" / "moving.md"
BLOCKS = {block.name: block.code for block in blocks(PAGE, "python")}

# What stands before and after each snippet in its script. `turn` fails unless it is alone in there.
TURN = """
import os, pathlib, time
def turn():
    inside = pathlib.Path(os.environ["FOLDER"], "inside")
    inside.touch(exist_ok=False)
    time.sleep(0.02)
    inside.unlink()
"""
JOB = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
RANK, WORLD_SIZE = dist.get_rank(), dist.get_world_size()
"""
END = """
dist.barrier()
dist.destroy_process_group()
"""
MODEL = """
import os, torch
DEVICE = "cpu"
def net(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
def train(model, batch):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(batch))
"""
PARTS: dict[str, tuple[str, str]] = {
    "lock": (JOB + TURN + "build_groups = turn\n", "assert grant.token > 0\n" + END),
    "lock actor": (TURN + "send_bucket = turn\n", "assert grant.token > 0\nprint('done')\n"),
    "mesh": (
        JOB
        + "DEVICE_TYPE, model, sharded = 'cpu', torch.nn.Linear(2, 2), []\n"
        + "def load_batch():\n    return {'from': RANK, 'tokens': torch.full((2,), RANK)}\n"
        + "def shard(model, mesh):\n    sharded.append(mesh.size())\n",
        "assert batch['from'] == layout.head_of(RANK, 'pp_cp_tp') == int(batch['tokens'][0])\n"
        "assert sharded == [2] and is_stage_head == (RANK in (0, 4))\n"
        "meshes.close()\n" + END,
    ),
    "sharding": ("", "print('done')\n"),
    "spmd trainer": (
        MODEL
        + "RANK = PP_RANK = 0\nWORLD_SIZE, IS_STAGE_HEAD, batches, model = 1, True, (1, 2, 3), net(0)\n",
        "import pathlib\npathlib.Path(os.environ['FOLDER'], 'trained').touch()\n",
    ),
    "spmd generation": (
        MODEL
        + """
import pathlib, time
SHARD, SHARD_SIZES, model = int(os.environ["SHARD"]), (1, 1), net(1 + int(os.environ["SHARD"]))
def serve(model, receiver):
    deadline = time.monotonic() + 60
    while not pathlib.Path(os.environ["FOLDER"], "trained").exists():
        assert time.monotonic() < deadline, receiver.version
        time.sleep(0.01)
""",
        "assert all(bool((parameter == 3.0).all()) for parameter in model.parameters())\nprint('served')\n",
    ),
    "controller": (
        MODEL.replace("train(model, batch)", "fill(model, batch)")
        + """
from dprims.synchronizer import ModuleSink, ModuleSource, WeightReceiver, WeightSender
parts = [net(0)[:2], net(0)[2:]]
names = [{key: f"{stage}.{key}" for key in part.state_dict()} for stage, part in enumerate(parts)]
senders = [
    WeightSender(stage, ModuleSource(part, names=names[stage].get), stage=stage)
    for stage, part in enumerate(parts)
]
models = [torch.nn.ModuleList([net(7)[:2], net(7)[2:]]) for _ in range(3)]
receivers = [WeightReceiver(2 + shard, ModuleSink(model)) for shard, model in enumerate(models)]
batches, absent_shards = (1, 2), lambda: ()
def train(batch):
    for part in parts:
        fill(part, batch)
""",
        """
assert (report.version, report.members) == (2, (0, 1, 2))
for model in models:
    assert all(bool((parameter == 2.0).all()) for parameter in model.parameters())
for worker in (*senders, *receivers):
    worker.close()
print("done", flush=True)
os._exit(0)
""",
    ),
}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A backend, and a folder that the scripts share."""
    with dprims.connect("tcpstore://127.0.0.1:0?serve=1") as served:
        yield {**os.environ, "DPRIMS_BACKEND": served.url, "FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}


def script(name: str, folder: Path) -> str:
    before, after = PARTS[name]
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(before + BLOCKS[name] + after)
    return str(path)


def test_every_snippet_is_run() -> None:
    assert BLOCKS.keys() == PARTS.keys()


def test_the_page_says_before_as_often_as_after() -> None:
    assert len(blocks(PAGE, "py")) == len(BLOCKS) - 1, "the refit without a controller is two snippets"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("lock", 4), ("mesh", 8)])
def test_a_snippet_runs_on_every_rank_of_a_job(
    name: str, ranks: int, environment: dict[str, str], tmp_path: Path
) -> None:
    job = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    del environment["DPRIMS_BACKEND"]  # the lock is to find the job's own store
    finished([start(*job, script(name, tmp_path), environment=environment)])


@pytest.mark.slow
def test_the_lock_of_processes_that_share_a_url(environment: dict[str, str], tmp_path: Path) -> None:
    path = script("lock actor", tmp_path)
    assert all("done" in said for said in finished([start(path, environment=environment) for _ in range(3)]))


def test_the_arithmetic_of_ranks(environment: dict[str, str], tmp_path: Path) -> None:
    assert finished([start(script("sharding", tmp_path), environment=environment)]) == ["done\n"]


@pytest.mark.slow
def test_trainers_and_inference_workers_without_a_controller(
    environment: dict[str, str], tmp_path: Path
) -> None:
    trainer = start(script("spmd trainer", tmp_path), environment=environment)
    served = script("spmd generation", tmp_path)
    said = finished(
        [trainer, *(start(served, environment={**environment, "SHARD": str(shard)}) for shard in range(2))]
    )
    assert "3 (0, 1)" in said[0]
    assert all("served" in one for one in said[1:])


@pytest.mark.slow
def test_a_controller_with_a_policy_and_a_generation_of_its_own(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (said,) = finished([start(script("controller", tmp_path), environment=environment)])
    assert "2 (0, 1, 2)" in said
    assert "done" in said
