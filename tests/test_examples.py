"""Each example, run alone as its reader would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("command", RUNS, ids=" ".join)
def test_an_example_runs_alone(command: tuple[str, ...]) -> None:
    name, *arguments = command
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=ENVIRONMENT,
    )
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
