"""Each example, run alone as its reader would."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_S = 200.0
# Ray starts its workers at nice 15, and waits five seconds for a nameserver that does not answer.
ENVIRONMENT = os.environ | {"RAY_worker_niceness": "0", "GRPC_DNS_RESOLVER": "native"}

RUNS = {
    ("refit.py",): "step 4: version 4 on shards (0, 1, 2)",
    ("toy_backend.py",): " checks passed",
    ("ray_refit.py",): "step 4: version 4 on shards (0, 1, 2)",
}


def call(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=ENVIRONMENT,
    )


@pytest.mark.parametrize("command", RUNS, ids=" ".join)
def test_an_example_runs_alone(command: tuple[str, ...]) -> None:
    run = call(*command)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert RUNS[command] in run.stdout


def test_no_example_is_left_out() -> None:
    covered = {name for name, *_ in RUNS}
    elsewhere = {
        "fenced.py",  # tests/test_examples_lock.py
        "lock.py",  # tests/test_examples_lock.py
        "mesh.py",  # tests/test_mesh_example.py
        "rl_loop.py",  # tests/test_rl_loop.py runs it
        "sglang_client.py",  # tests/test_sglang_client.py
        "torchrun_refit.py",  # tests/test_spmd.py runs it
        "vllm_worker.py",  # tests/test_vllm_worker.py
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} - covered <= elsewhere


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_says_what_it_is_and_refuses_what_it_does_not_know(name: str) -> None:
    told = call(name, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    purpose = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    assert purpose.partition("\n")[0] in told.stdout
    refused = call(name, "--no-such-option")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "error: " in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr


ABSENT = {
    ("fenced.py", "redis://127.0.0.1:1"): 1,
    ("fenced.py", "nowhere://h"): 2,
    ("torchrun_refit.py", "trainer"): 2,
    ("vllm_worker.py", "--url", "http://127.0.0.1:1", "--shard", "0", "--shard-sizes", "1"): 1,
    ("sglang_client.py", "--server", "http://127.0.0.1:1", "--weights", "WEIGHTS"): 1,
    ("sglang_client.py", "--server", "http://127.0.0.1:1", "--weights", "nowhere"): 1,
}


@pytest.mark.parametrize("command", ABSENT, ids=" ".join)
def test_what_is_not_there_is_said_in_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(4)}, weights)
    run = call(*(str(weights) if argument == "WEIGHTS" else argument for argument in command))
    assert (run.returncode, run.stdout) == (ABSENT[command], "")
    assert "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1].startswith(f"{command[0]}: ")
