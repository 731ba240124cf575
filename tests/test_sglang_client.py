"""The SGLang client against a server that refuses what SGLang would, over real gloo groups."""

from __future__ import annotations

import importlib.util
import signal
import sys
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dprims.engines.process import WorkerProcess
from dprims.synchronizer import DictSource

from .helpers.sglang_fake import FakeSglang, digest

pytestmark = [pytest.mark.slow]

EXAMPLE = Path(__file__).parent.parent / "examples" / "sglang_client.py"
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    **{f"layers.{i}.weight": ((64, 32), "float32") for i in range(6)},
    "norm.weight": ((32,), "bfloat16"),
    "scale": ((), "float32"),
    "head.weight": ((4096, 8), "float16"),
}
BUCKET_BYTES = 20_000  # so that there are several buckets, and head.weight is larger than one
LIMIT_S = 60.0

Make = Callable[..., FakeSglang]


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for name, (shape, dtype) in SHAPES.items()
    }


class TrainerRank:
    """What a trainer's process has: the weights, and the client."""

    def __init__(self, timeout_s: float) -> None:
        spec = importlib.util.spec_from_file_location("sglang_client", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        self.client: Any = importlib.util.module_from_spec(spec)
        sys.modules["sglang_client"] = self.client
        spec.loader.exec_module(self.client)
        self.tensors: dict[str, torch.Tensor] = {}
        self.timeout_s = timeout_s
        self.refitter = self.client.SglangRefit(
            DictSource(self.tensors), [], host="127.0.0.1", bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s
        )

    def add(self, url: str, ranks: int) -> None:
        self.refitter.add(self.client.SglangServer(url, ranks=ranks, timeout_s=self.timeout_s))

    def refit(self, version: int) -> tuple[list[str], dict[str, str], int]:
        self.tensors.update(weights(version))
        outcome = self.refitter.refit(version)
        return outcome.serving, dict(outcome.lost), outcome.nbytes

    def fail(self) -> None:
        self.refitter.source = Broken(self.tensors)

    def leave(self) -> None:
        self.refitter.close()


class Broken(DictSource):
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(super().__iter__()):
            if number == 5:
                raise ValueError("no more weights")
            yield pair


@pytest.fixture
def trainer() -> Iterator[WorkerProcess]:
    process = WorkerProcess("sglang-trainer", TrainerRank, (8.0,))
    process.ready.result(LIMIT_S)
    yield process
    process.close()


@pytest.fixture
def serve(trainer: WorkerProcess) -> Iterator[Make]:
    servers: list[FakeSglang] = []

    def start(shapes: Any = None, *, ranks: int = 1) -> FakeSglang:
        server = FakeSglang(shapes or SHAPES, ranks=ranks)
        servers.append(server)
        trainer.call("add", server.url, ranks).result(LIMIT_S)
        return server

    yield start
    for server in servers:
        server.kill()


def serves(server: FakeSglang, version: int) -> bool:
    return server.generate() == {"weight_version": str(version), "digest": digest(weights(version))}


def refuses(server: FakeSglang) -> bool:
    with pytest.raises(urllib.error.HTTPError, match="400"):
        server.generate()
    return True


def test_every_server_serves_what_was_sent(trainer: WorkerProcess, serve: Make) -> None:
    one, two = serve(), serve(ranks=2)
    for version in (1, 2):
        serving, lost, nbytes = trainer.call("refit", version).result(LIMIT_S)
        assert (serving, lost) == ([one.url, two.url], {})
        assert nbytes == sum(tensor.nbytes for tensor in weights(version).values())
        assert serves(one, version)
        assert serves(two, version)
    calls = [path for path in one.calls if path != "generate"]
    updates = calls.count("update_weights_from_distributed") // 2
    assert updates > 2
    step = [
        "pause_generation",
        "begin_weight_update",
        *["update_weights_from_distributed"] * updates,
        "end_weight_update",
        "flush_cache",
        "update_weight_version",
        "continue_generation",
    ]
    assert calls == ["init_weights_update_group", *step, *step]
    trainer.call("leave").result(LIMIT_S)
    assert one.calls[-1] == "destroy_weights_update_group"
    assert serves(one, 2), "it goes on with what it has"


def test_a_server_that_cannot_take_a_tensor_is_left_out_and_does_not_serve(
    trainer: WorkerProcess, serve: Make
) -> None:
    good, other = serve(), serve({**SHAPES, "layers.3.weight": ((32, 64), "float32")})
    serving, lost, _ = trainer.call("refit", 1).result(LIMIT_S)
    assert serving == [good.url]
    assert "layers.3.weight" in lost[other.url]
    assert "partially updated" in lost[other.url]
    assert serves(good, 1)
    assert refuses(other)


def test_a_server_that_is_killed_while_it_receives_holds_up_nobody(
    trainer: WorkerProcess, serve: Make
) -> None:
    first, second = serve(), serve()
    second.before["update_weights_from_distributed"] = lambda server: server.ranks[0].kill()
    serving, lost, _ = trainer.call("refit", 1).result(LIMIT_S)
    assert serving == [first.url]
    assert list(lost) == [second.url]
    assert serves(first, 1)
    fresh = serve()
    serving, lost, _ = trainer.call("refit", 2).result(LIMIT_S)
    assert (serving, lost) == ([first.url, fresh.url], {})
    assert serves(first, 2)
    assert serves(fresh, 2)


def test_a_frozen_server_is_named_when_the_time_is_up(trainer: WorkerProcess, serve: Make) -> None:
    first, second = serve(), serve()
    second.before["update_weights_from_distributed"] = lambda server: server.ranks[0].signal(signal.SIGSTOP)
    serving, lost, _ = trainer.call("refit", 1).result(LIMIT_S)
    assert serving == [first.url]
    assert second.url in lost[second.url]
    assert serves(first, 1)


def test_without_a_server_left_it_says_who_failed_and_how(trainer: WorkerProcess, serve: Make) -> None:
    only = serve({"another": ((3,), "float32")})
    error = trainer.call("refit", 1).exception(LIMIT_S)
    assert "no server took version 1" in str(error)
    assert only.url in str(error)
    assert refuses(only)


def test_a_source_that_fails_leaves_nobody_serving_half_of_a_version(
    trainer: WorkerProcess, serve: Make
) -> None:
    server = serve()
    trainer.call("fail").result(LIMIT_S)
    assert isinstance(trainer.call("refit", 1).exception(LIMIT_S), ValueError)
    assert refuses(server)


def test_the_fake_refuses_calls_out_of_order(serve: Make) -> None:
    server = serve()
    nothing: dict[str, Any] = {"names": [], "dtypes": [], "shapes": []}
    assert server.answer("update_weights_from_distributed", nothing)[0] == 400
    assert server.answer("end_weight_update", {})[0] == 400
    assert server.answer("begin_weight_update", {})[0] == 200
    assert server.answer("begin_weight_update", {})[0] == 400
    assert server.answer("flush_cache", {})[0] == 400, "requests are running"
    assert server.answer("update_weights_from_distributed", {"names": []})[0] == 422
    assert server.answer("update_weights_from_distributed", nothing | {"group": "x"})[0] == 422
    assert server.answer("destroy_weights_update_group", {"group_name": "none"})[0] == 400
