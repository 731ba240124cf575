from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dprims import ParallelLayout
from dprims.cli import main

LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
}


def mesh(*arguments: str) -> int:
    return main(["mesh", *arguments])


def test_it_prints_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert mesh("--world-size", "16", "--pp", "2", "--cp", "2", "--tp", "2", "--rank", "5") == 0
    layout = ParallelLayout(world_size=16, pp=2, dp_shard=2, cp=2, tp=2)
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == layout.render(rank=5).splitlines()


def test_a_group_name_lists_all_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert mesh("--pp", "2", "--dp-shard", "2", "--tp", "2", "--group", "pp_cp_tp") == 0
    assert capsys.readouterr().out.endswith("groups pp_cp_tp\n  head 0: 0-1, 4-5\n  head 2: 2-3, 6-7\n")


def test_json_has_what_the_layout_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert mesh("-n", "16", "--pp", "2", "--tp", "2", "--ep", "4", "--etp", "2", "--json", "--rank", "9") == 0
    data = json.loads(capsys.readouterr().out)
    layout = ParallelLayout(world_size=16, pp=2, dp_shard=4, tp=2, ep=4, etp=2)
    assert ParallelLayout.from_json(json.dumps(data["layout"])) == layout
    assert data["groups"] == {name: [list(ranks) for ranks in layout.groups(name)] for name in layout.names}
    assert data["grids"]["ep_tp"] == [[list(row) for row in grid] for grid in layout.grids("ep_tp")]
    assert data["stage_heads"] == [0, 8]
    assert data["rank"]["coordinates"] == layout.coordinates(9)
    assert data["rank"]["groups"]["pp_cp_tp"] == list(layout.group_of(9, "pp_cp_tp"))


def test_json_of_one_group_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert mesh("--tp", "2", "--dp-shard", "2", "--json", "--group", "loss") == 0
    assert json.loads(capsys.readouterr().out)["groups"] == {"dp_cp": [[0, 2], [1, 3]]}


def test_another_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        mesh("--pp", "2", "--tp", "2", "--order", "tp,cp,dp_shard,dp_replicate,pp", "--json", "--group", "pp")
        == 0
    )
    assert json.loads(capsys.readouterr().out)["groups"] == {"pp": [[0, 1], [2, 3]]}


def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layout.svg"
    assert mesh("-n", "8", "--tp", "2", "--svg", str(path)) == 0
    assert ElementTree.fromstring(path.read_text()).tag.endswith("svg")
    assert capsys.readouterr().out.startswith("8 ranks")


@pytest.mark.parametrize(
    ("degrees", "change", "status", "expected"),
    [
        (
            ["--tp", "8", "--pp", "2"],
            {},
            0,
            {"attention heads": True, "key-value heads": True, "layers": True},
        ),
        (["--tp", "16"], {}, 1, {"attention heads": True, "key-value heads": False}),
        (["--tp", "5"], {}, 1, {"attention heads": False, "key-value heads": False}),
        (["--pp", "3"], {}, 1, {"layers": False}),
        (["--pp", "2"], {"tie_word_embeddings": True}, 1, {"tied weights": False}),
        (["--tp", "2"], {"tie_word_embeddings": True}, 0, {"tied weights": True}),
        (["--tp", "2"], {"tie_word_embeddings": None}, 0, {"tied weights": None}),
        (["--dp-shard", "6", "--ep", "6"], {"num_local_experts": 8}, 1, {"experts": False}),
        (["--dp-shard", "8", "--ep", "8"], {"n_routed_experts": 64}, 0, {"experts": True}),
        (["--dp-shard", "8", "--ep", "8"], {}, 0, {"experts": None}),
        (["--tp", "64"], {"num_key_value_heads": None}, 1, {"key-value heads": False}),
        (["--tp", "2"], {"num_attention_heads": "32"}, 1, {"attention heads": False}),
    ],
)
def test_a_model_is_checked(
    degrees: list[str],
    change: dict[str, Any],
    status: int,
    expected: dict[str, bool | None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | change))
    assert mesh(*degrees, "--check", str(path), "--json") == status
    rules = {check["rule"]: check["passed"] for check in json.loads(capsys.readouterr().out)["check"]}
    assert rules | expected == rules
    assert mesh(*degrees, "--check", str(path)) == status
    assert ("FAILED" in capsys.readouterr().out) == (status == 1)


def test_a_multimodal_config_is_read_for_its_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": LLAMA, "vision_config": {"num_hidden_layers": 27}}))
    assert mesh("--pp", "4", "--check", str(path), "--json") == 0
    assert "num_hidden_layers=32 over pp=4: 8 each" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "10", "--pp", "4"], "nearest sizes that work"),
        (["-n", "8", "--group", "typo"], "no group 'typo'"),
        (["-n", "8", "--rank", "8"], "rank 8 is outside"),
        (["-n", "8", "--order", "tp,pp"], "not an order of the axes"),
        (["--pp", "x"], "--pp"),
        (["--tp", "-1"], "--world-size"),
        (["--bogus"], "--bogus"),
        (["--check", "/does/not/exist"], "--check"),
        (["--svg", "/does/not/exist/x.svg"], "--svg"),
        (["--ep", "2"], "ep=2"),
    ],
)
def test_wrong_use_is_one_line_and_exits_with_two(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mesh(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000], ids=range(3))
def test_a_config_has_to_be_a_json_object(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert mesh("--check", str(path)) == 2
    assert "JSON" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dprims.cli import main\n"
        "sys.exit(main(['mesh', '-n', '1024', '--pp', '4', '--tp', '8', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert len(json.loads(done.stdout)["groups"]["pp_cp_tp"]) == 32
