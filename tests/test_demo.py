"""The demo as its user runs it: each kind of fault, and each wrong argument."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import save_file

import dprims
from dprims.cli import main
from dprims.synchronizer.protocol import Version, encode_version, next_key
from dprims.testing.servers import RedisServer

LIMIT_S = 90.0


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model of four layers, with an embedding, a head and an integer tensor."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    tensors = {"embeddings.weight": torch.randn(600, 128), "embeddings.position_ids": torch.arange(512)}
    for layer in range(4):
        tensors[f"encoder.layer.{layer}.weight"] = torch.randn(256, 256)
        tensors[f"encoder.layer.{layer}.half"] = torch.randn(128, 128).bfloat16()
    tensors["head.weight"] = torch.randn(64, 128)
    save_file(tensors, str(path))
    return str(path)


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dprims", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def result(*arguments: str) -> dict[str, Any]:
    run = demo("--json", "--bucket-bytes", "65536", *arguments)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    assert found["verdict"] == {
        "agree": True,
        "tensors": 11,
        "shards": dict.fromkeys(found["verdict"]["shards"], "agrees"),
    }
    return found


@pytest.mark.parametrize("fault", ["kill", "raise", "stop", "none"])
def test_the_fleet_agrees_after_each_kind_of_fault(weights: str, fault: str) -> None:
    found = result("--weights", weights, "--fault", fault, "--refit-timeout", "30", "--roster-ttl", "1.5")
    steps = found["steps"]
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    assert [step["members"] for step in steps[2:]] == [[0, 1, 2]] * 2
    assert steps[1]["members"] == ([0, 2] if fault in ("kill", "stop") else [0, 1, 2])
    outages = [step["outage_s"] for step in steps]
    assert [outage > 0 for outage in outages] == [False, fault != "none", False, False]
    assert outages[1] < 15.0, "the deadline ended it, not the decision"
    words = " ".join(event["what"] for event in found["timeline"])
    assert ("re-admitted as incarnation" in words) == (fault in ("kill", "stop"))


@pytest.mark.slow
def test_it_runs_on_ray_with_the_same_verdict(weights: str) -> None:
    found = result("--weights", weights, "--engine", "ray", "--steps", "3", "--shards", "2", "--stages", "1")
    assert [step["members"] for step in found["steps"]] == [[0, 1], [0], [0, 1]]
    words = " ".join(event["what"] for event in found["timeline"])
    assert "died: its worker process has died" in words
    assert "shard 1 re-admitted as incarnation" in words


def test_the_bundled_model_is_what_it_sends_by_default() -> None:
    run = demo("--fault", "none", "--steps", "1", "--shards", "1")
    assert run.returncode == 0, run.stderr
    assert "90.9" in run.stdout
    assert run.stdout.strip().endswith(
        "verdict: every shard holds the trainers' weights (104 tensors, SHA-256 of each)"
    )


def test_one_shard_and_one_stage_are_enough(weights: str) -> None:
    assert (
        len(result("--weights", weights, "--stages", "1", "--shards", "1", "--fault", "raise")["steps"]) == 4
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--weights", "/no/such/file"), "--weights is '/no/such/file'"),
        (("--stages", "0"), "--stages is 0"),
        (("--stages", "5"), "--stages is 5"),
        (("--shards", "0"), "--shards is 0"),
        (("--shards", "1", "--fault", "kill"), "--shards is 1"),
        (("--fault", "explode"), "--fault is 'explode'"),
        (("--fault-bucket", "999"), "--fault-bucket is 999"),
        (("--fault-bucket", "-1"), "--fault-bucket is -1"),
        (("--refit-timeout", "0"), "--refit-timeout is 0"),
        (("--device", "tpu"), "--device is 'tpu'"),
        (("--engine", "slurm"), "--engine is 'slurm'"),
        (("--backend", "nosuch://x"), "nosuch"),
        (("--stages", "two"), "--stages"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    weights: str, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = () if "--weights" in arguments else ("--weights", weights)
    assert main(["demo", *given, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert words in said.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_said(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--weights", weights, "--device", "cuda"]) == 2
    assert "--device is 'cuda'; torch finds no GPU here" in capsys.readouterr().err


def test_a_truncated_or_foreign_file_is_named(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(Path(weights).read_bytes()[:5000])
    text = tmp_path / "notes.txt"
    text.write_text("not weights")
    for path in (cut, text):
        assert main(["demo", "--weights", str(path)]) == 2
        said = capsys.readouterr().err
        assert str(path) in said
        assert len(said.strip().splitlines()) == 1


def test_interrupting_it_leaves_no_process(weights: str) -> None:
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "dprims",
            "demo",
            "--weights",
            weights,
            "--steps",
            "100000",
            "--fault",
            "none",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert run.stdout is not None
        while "0,1,2" not in run.stdout.readline():  # the first refit is done
            assert run.poll() is None
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(LIMIT_S) == 130
        deadline = time.monotonic() + LIMIT_S
        while _session(run.pid):
            assert time.monotonic() < deadline, f"left behind: {_session(run.pid)}"
    finally:
        for pid in (run.pid, *_session(run.pid)):
            if run.poll() is None or pid != run.pid:
                os.kill(pid, signal.SIGKILL)
        run.wait()
        if run.stdout is not None:
            run.stdout.close()


def _session(session: int) -> list[int]:
    """The processes of a session that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def test_on_somebodys_backend_it_keeps_to_itself_and_leaves_nothing(redis_server: RedisServer) -> None:
    """A fleet of the user's may run there, under the default name."""
    with redis.Redis.from_url(redis_server.url) as client, dprims.connect(redis_server.url) as backend:
        backend.write_fenced(next_key("dprims/refit"), encode_version(Version(41)), 7)
        before = {key for key in client.keys("*") if client.ttl(key) == -1}
        done = demo("--backend", redis_server.url, "--fault", "none")
        assert done.returncode == 0, done.stderr
        left = {key for key in client.keys("*") if client.ttl(key) == -1}
        assert {key for key in left - before if not key.endswith(b":token")} == set()
        assert backend.read_fenced(next_key("dprims/refit")) == (7, encode_version(Version(41)))
