"""`dprims bench refit` as its user runs it: real processes, few bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dprims.cli import main
from dprims.testing.refit_bench import CONTESTANTS, MODELS, bench_refit, cut, model_metas

FEW = ("--model", "kb256", "--max-mib", "8", "--bucket-mib", "1", "--rounds", "1")


def bench(*arguments: str) -> int:
    return main(["bench", "refit", *arguments])


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert bench(*FEW, "--json", *arguments) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_table_has_every_contestant_that_the_device_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*FEW) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("kb256: 32 tensors, 0.008 GB, buckets of 1 MiB, 1 receiver, cpu, median of 1")
    assert [row[:16].strip() for row in rows] == [name for name in CONTESTANTS if name != "device copy"]


def test_json_says_the_same_with_phases(capsys: pytest.CaptureFixture[str]) -> None:
    answer = as_json(capsys, "--only", "flat", "--only", "dprims verified")
    assert (answer["tensors"], answer["bucket_bytes"], answer["device"]) == (32, 1 << 20, "cpu")
    flat, ours = answer["results"]
    assert flat["wire_ratio"] == 1.0
    assert ours["ratio_of"] == "flat"
    assert 0 < ours["wire_s"] <= ours["total_s"]
    assert {"pack (sender)", "digest (receiver)", "wire (receiver)"} <= set(ours["phases_s"])


def test_several_receivers_and_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    as_json(capsys, "--only", "dprims verified", "--receivers", "2", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2, 3}
    assert {event["name"].split()[0] for event in events if event["ph"] == "X"} >= {"pack", "wire", "digest"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "gpt-9"), "--model: 'gpt-9'; known are qwen3-8b"),
        (("--only", "magic"), "--only: 'magic'; known are"),
        (("--device", "tpu"), "--device: 'tpu'; cpu or cuda"),
        (("--receivers", "0"), "--receivers"),
        (("--rounds", "0"), "--rounds"),
        *(
            (("--bucket-mib", value), "--bucket-mib: ")
            for value in ("nan", "inf", "-1", "0", "0.0001", "1e300")
        ),
        (("--trace", "/no/such/folder/x.json"), "--trace: /no/such/folder/x.json: there is no folder"),
        (("--picture", "/no/such/folder/x.png"), "--picture: /no/such/folder/x.png: there is no folder"),
        (("--picture", "x.tables"), "--picture: x.tables; expected a name that ends in one of"),
    ],
)
def test_wrong_use_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert bench(*arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_packing_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pack", "--max-mib", "8", "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"moe-3mb", "kb256", "kb64", "kb64-mixed"}
    assert all(value > 0 for one in found.values() for value in one.values())
    assert main(["bench", "pack", "--max-mib", "1", "--rounds", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--list") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*MODELS, *CONTESTANTS))


@pytest.mark.parametrize(
    ("model", "count", "gigabytes"),
    [
        ("qwen3-8b", 399, 16.4),
        ("moe-3mb", 4608, 14.5),
        ("llama-70b", 723, 141.1),
        ("qwen3-30b-a3b", 18867, 61.1),
    ],
)
def test_models_have_the_shapes_of_their_names(model: str, count: int, gigabytes: float) -> None:
    metas = model_metas(model)
    assert len({meta.name for meta in metas}) == len(metas) == count
    assert sum(meta.nbytes for meta in metas) / 1e9 == pytest.approx(gigabytes, abs=0.1)


def test_a_model_is_cut_to_memory() -> None:
    metas = model_metas("llama-70b")
    assert sum(meta.nbytes for meta in cut(metas, 10 << 30)) <= 10 << 30
    assert len(cut(metas, 1)) == 1
    assert cut(metas, None) == metas


def test_unknown_contestants_and_models_are_named() -> None:
    with pytest.raises(ValueError, match="'magic'"):
        bench_refit([], contestants=["magic"], bucket_bytes=1 << 20)
    with pytest.raises(ValueError, match="'gpt-9'"):
        model_metas("gpt-9")
