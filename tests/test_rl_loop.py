"""The reinforcement-learning example: it learns while shards are killed and frozen, and accounts for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the example draws a picture: pip install 'dprims[bench]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).parent.parent / "examples" / "rl_loop.py"
STEPS = 80
SHARDS = [0, 1, 2]


EVENTS = {
    "shard 1 is killed in the refit": [0, 2],
    "shard 1 was started anew": SHARDS,
    "shard 2 is frozen in the refit": [0, 1],
    "shard 2 was thawed": SHARDS,
}
"""What happens in a run -> the shards that serve after it."""


def example(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(EXAMPLE), "--report", "report.json", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "rl-loop.png").read_bytes().startswith(b"\x89PNG")
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return example(tmp_path_factory.mktemp("rl"), "--steps", str(STEPS))


def events(run: dict[str, Any]) -> dict[str, list[int]]:
    return {row["event"]: row["members"] for row in run["rows"] if row["event"]}


def test_the_reward_rises_through_the_faults(run: dict[str, Any]) -> None:
    rewards = [row["reward"] for row in run["rows"]]
    third = STEPS // 3
    first, last = sum(rewards[:third]) / third, sum(rewards[-third:]) / third
    assert last > first + 0.25, rewards


def test_every_sample_says_which_version_made_it(run: dict[str, Any]) -> None:
    samples = {sum(row["versions"].values()) for row in run["rows"]}
    assert len(samples) == 1, "no step went without its samples"
    for before, row in zip([None, *run["rows"]], run["rows"], strict=False):
        trained = before["version"] if before else 1
        assert all(trained - 1 <= int(version) <= trained for version in row["versions"]), row
        assert row["lag"] <= 1


def test_each_step_made_one_version(run: dict[str, Any]) -> None:
    versions = [row["version"] for row in run["rows"]]
    assert versions == sorted(set(versions))
    used = {int(version) for row in run["rows"] for version in row["versions"]}
    assert used <= {1, *versions}, "a sample came from weights that the fleet never served"


def test_who_was_lost_came_back(run: dict[str, Any]) -> None:
    assert events(run) == EVENTS
    assert run["rows"][-1]["members"] == SHARDS
    assert run["agree"], "a shard does not hold the trainers' weights"


@pytest.mark.chaos
def test_the_same_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run = example(tmp_path, "--steps", "24", "--engine", "ray")
    assert events(run) == EVENTS
    assert run["agree"]


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--steps is 3; expected at least 20"):
        example(tmp_path, "--steps", "3")
