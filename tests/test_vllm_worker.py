"""The vLLM worker extension in workers that refuse what vLLM would, with real trainers and real groups."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dprims
from dprims.engines.process import WorkerProcess
from dprims.engines.spmd import SpmdRefit
from dprims.synchronizer import DictSource

from .helpers import services
from .helpers.sglang_fake import digest
from .helpers.vllm_fake import FakeVllm

pytestmark = [pytest.mark.slow]

EXAMPLES = Path(__file__).parent.parent / "examples"
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "model.embed.weight": ((128, 64), "float32"),
    **{f"model.layers.{i}.weight": ((64, 64), "bfloat16") for i in range(4)},
    "lm_head.weight": ((128, 64), "float32"),
}
LIMIT_S = 60.0
until = partial(services.until, limit=LIMIT_S)
TTL_S = 1.5
SIZES = "1,2"

Make = Callable[..., FakeVllm]


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for name, (shape, dtype) in SHAPES.items()
    }


class TrainerRank:
    """A trainer of one stage; its version n has the weights of seed n."""

    def __init__(self, url: str) -> None:
        self.tensors = weights(0)
        self.refit = SpmdRefit(
            DictSource(self.tensors),
            backend=url,
            rank=0,
            world_size=1,
            stage=0,
            host="127.0.0.1",
            roster_ttl_s=TTL_S,
            refit_timeout_s=20.0,
            bucket_bytes=16384,
        )

    def begin(self) -> None:
        self.refit.init_communicator()

    def sync(self) -> tuple[int, tuple[int, ...]]:
        self.tensors.update(weights(self.refit.version + 1))
        self.refit.mark_stale()
        report = self.refit.sync_weights()
        return report.version, report.members

    def close(self) -> None:
        self.refit.shutdown()


@pytest.fixture
def store() -> Iterator[str]:
    with dprims.connect("tcpstore://127.0.0.1:0?serve=1") as served:
        yield served.url


@pytest.fixture
def trainer(store: str) -> Iterator[WorkerProcess]:
    process = WorkerProcess("vllm-trainer", TrainerRank, (store,))
    process.ready.result(LIMIT_S)
    yield process
    process.close()


@pytest.fixture
def serve(store: str, trainer: WorkerProcess) -> Iterator[Make]:
    servers: list[FakeVllm] = []

    def start(shard: int, *, ranks: int, pause_mode: str = "wait", shapes: Any = None) -> FakeVllm:
        server = FakeVllm("vllm_worker.RefitWorker", str(EXAMPLES), shapes or SHAPES, ranks=ranks)
        servers.append(server)
        command = [sys.executable, EXAMPLES / "vllm_worker.py", "--url", server.url, "--backend", store]
        command += ["--shard", str(shard), "--shard-sizes", SIZES, "--pause-mode", pause_mode]
        said = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
        assert said.splitlines() == [f"rank {rank} of shard {shard} is joining" for rank in range(ranks)]
        return server

    yield start
    for server in servers:
        server.close()


def serves(server: FakeVllm, version: int) -> bool:
    return server.generate() == (str(version), {digest(weights(version))})


def test_two_servers_serve_what_was_committed(trainer: WorkerProcess, serve: Make) -> None:
    first, second = serve(0, ranks=1), serve(1, ranks=2, pause_mode="keep")
    trainer.call("begin").result(LIMIT_S)
    for version in (1, 2):
        assert trainer.call("sync").result(LIMIT_S) == (version, (0, 1))
        for server in (first, second):
            assert serves(server, version)
            assert all(one == {"joined": True, "version": version, "may_serve": True, "error": ""}
                       for one in server.status())  # fmt: skip
    commit = ["is_sleeping", "pause", "reset_prefix_cache", "update_weight_version", "resume"]
    for server in (first, second):
        assert [path for path in server.calls if path != "collective_rpc"] == 2 * commit
        assert all(running == 0 for _, running in server.on_all("held")), "loaded while the engine ran"


def test_a_server_that_dies_and_comes_back(trainer: WorkerProcess, serve: Make) -> None:
    first, second = serve(0, ranks=1), serve(1, ranks=2)
    trainer.call("begin").result(LIMIT_S)
    assert trainer.call("sync").result(LIMIT_S) == (1, (0, 1))
    second.workers[1].kill()
    until(lambda: trainer.call("sync").exception(LIMIT_S) is None, "a refit without the dead server")
    version, members = trainer.call("sync").result(LIMIT_S)
    assert members == (0,)
    assert serves(first, version)
    second.close()
    third = serve(1, ranks=2)
    until(lambda: trainer.call("sync").result(LIMIT_S)[1] == (0, 1), "the new server")
    version, _ = trainer.call("sync").result(LIMIT_S)
    assert serves(first, version)
    assert serves(third, version)


def test_a_sleeping_server_is_not_loaded_into(trainer: WorkerProcess, serve: Make) -> None:
    first, second = serve(0, ranks=1), serve(1, ranks=2)
    trainer.call("begin").result(LIMIT_S)
    assert trainer.call("sync").result(LIMIT_S) == (1, (0, 1))
    second.sleeping = True
    version, members = trainer.call("sync").result(LIMIT_S)
    assert members == (0,)
    assert serves(first, version)
    assert serves(second, 1), "it is as it was"
    assert not any(one["may_serve"] for one in second.status())
    second.sleeping = False
    until(lambda: trainer.call("sync").result(LIMIT_S)[1] == (0, 1), "the server that was woken")


def test_weights_that_do_not_fit_are_the_servers_own_failure(trainer: WorkerProcess, serve: Make) -> None:
    wrong = {**SHAPES, "lm_head.weight": ((64, 128), "float32")}
    first, second = serve(0, ranks=1), serve(1, ranks=2, shapes=wrong)
    trainer.call("begin").result(LIMIT_S)
    assert trainer.call("sync").result(LIMIT_S) == (1, (0,))
    assert serves(first, 1)
    assert second.paused, "it does not serve the half that it has loaded"


def test_wrong_arguments_are_refused(serve: Make) -> None:
    server = serve(0, ranks=1)
    for kwargs, said in (
        ({"url": "", "shard": "0", "shard_sizes": "1"}, "joined already"),
        ({"url": "", "shard": "0", "shard_sizes": "1", "pause_mode": "hard"}, "pause_mode is 'hard'"),
    ):
        status, answer = server.answer(
            "POST", "collective_rpc", {}, {"method": "dprims_join", "kwargs": {"backend": "x", **kwargs}}
        )
        assert status == 500
        assert said in answer["error"]
    assert server.answer("POST", "collective_rpc", {}, {"method": "dprims_leave"})[0] == 200
    assert server.status()[0]["joined"] is False
