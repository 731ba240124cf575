"""Draws the two pictures on docs/traces.md: ``python docs/trace_pictures.py``.

Runs a fleet of two trainer stages and three shards, one process each, over gloo: a clean refit, then one in
which a shard is killed at a bucket in the middle. Needs the extra ``bench``. Writes PNG files into
docs/images, or into the folder that is given, and the traces next to them with ``--traces``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a killed peer is no news here

from dprims.backend import need
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.synchronizer import CollectiveWeightSynchronizer, RefitReport
from dprims.testing.faults import Fault
from dprims.testing.weights import ToySink, ToySource

HERE = Path(__file__).parent / "images"
STAGES, SHARDS, LAYERS, WIDTH, BUCKET = 2, 3, 8, 1024, 4 << 20
VICTIM = 1

COLOURS = {
    "prepare": "#b8b8b8",
    "build": "#8f6bb3",
    "rebuild": "#8f6bb3",
    "transfer": "#9ec1e0",
    "gather": "#6aa5a9",
    "pack": "#3f8f6b",
    "wire": "#2f6db3",
    "digest": "#e0b03c",
    "unpack": "#7fb069",
    "cut": "#e08a8a",
    "pause": "#d9c2e9",
    "commit": "#c03d7b",
    "resume": "#d9c2e9",
    "settle": "#e07b39",
}
BAD = "#c62828"


def main() -> None:
    """Run the fleet, draw both refits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=HERE)
    parser.add_argument("--traces", action="store_true", help="leave the traces beside the pictures")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    clean, recovered = run()
    for name, report, title in (
        ("trace-clean", clean, "a clean refit"),
        ("trace-recovered", recovered, f"shard {VICTIM} is killed in the middle of a refit"),
    ):
        if arguments.traces:
            report.to_chrome_trace(arguments.folder / f"{name}.json")
        if report.trace is not None:
            draw(arguments.folder / f"{name}.png", report.trace.to_json()["traceEvents"], title)


def run() -> tuple[RefitReport, RefitReport]:
    """A clean refit of a fleet that is warm, and one that lost a shard on the way."""
    policy = LocalPolicy(ToySource, LAYERS, WIDTH, stages=STAGES)
    generation = LocalGeneration(
        ToySink, STAGES, LAYERS, WIDTH, shard_sizes=(1,) * SHARDS, train_world_size=STAGES
    )
    sync = CollectiveWeightSynchronizer(
        policy, generation, refit_timeout_s=60.0, bucket_bytes=BUCKET, roster_ttl_s=2.0
    )
    try:
        sync.init_communicator()
        sync.refit()
        sync.mark_stale()
        clean = sync.refit()
        sync.mark_stale()
        fault = Fault(action="kill", bucket=LAYERS // 2)
        generation.process(VICTIM).call_now("arm", fault).result(30.0)
        return clean, sync.refit(lambda: generation.dead_shards)
    finally:
        generation.close()
        policy.close()
        sync.shutdown()


def draw(path: Path, events: list[dict[str, Any]], title: str) -> None:
    """One row a thread of the trace, in the order in which a viewer has them."""
    need("matplotlib", "bench").use("agg")
    pyplot = need("matplotlib.pyplot", "bench")

    named = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    bars = [e for e in events if e["ph"] == "X"]
    rows: dict[tuple[int, int, int], int] = {}
    labels: list[str] = []
    for pid, tid in sorted({(e["pid"], e["tid"]) for e in bars}):
        thread = named[pid, tid, "thread_name"]["name"]
        levels = 1 + max(depth(e, bars) for e in bars if (e["pid"], e["tid"]) == (pid, tid))
        for level in range(levels):
            process = named[pid, 0, "process_name"]["name"] if tid == 1 and level == 0 else ""
            rows[pid, tid, level] = len(labels)
            labels.append(f"{process}   {thread if level == 0 else ''}".strip())
    figure, axes = pyplot.subplots(figsize=(13, 0.24 * len(labels) + 1.1))
    end = max(e["ts"] + e["dur"] for e in bars) / 1e3
    for one in bars:
        row = rows[one["pid"], one["tid"], depth(one, bars)]
        phase = one["name"].split()[0]
        bad = "FAILED" in one["name"] or "LOST" in one["name"]
        axes.barh(
            row,
            max(one["dur"] / 1e3, end / 1500),
            left=one["ts"] / 1e3,
            height=0.86,
            color=COLOURS.get(phase, "#d6d6d6"),
            edgecolor=BAD if bad else "white",
            linewidth=1.4 if bad else 0.4,
        )
        wide = one["dur"] / 1e3 > end * 0.0088 * len(one["name"])
        if wide:
            axes.text(
                (one["ts"] + one["dur"] / 2) / 1e3, row, one["name"], ha="center", va="center", fontsize=7
            )
    for mark in (e for e in events if e["ph"] == "i"):
        mine = [row for (pid, _, _), row in rows.items() if pid == mark["pid"]]
        axes.plot([mark["ts"] / 1e3] * 2, [min(mine) - 0.5, max(mine) + 0.5], color=BAD, linewidth=1.6)
        axes.text(mark["ts"] / 1e3, min(mine), f" {mark['name']}", color=BAD, fontsize=8, va="center")
    for (_pid, tid, level), row in rows.items():
        if tid == 1 and level == 0 and row:
            axes.axhline(row - 0.5, color="#777777", linewidth=0.7)
    axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, end * 1.005)
    key = [(name, pyplot.Rectangle((0, 0), 1, 1, color=colour)) for name, colour in COLOURS.items()]
    axes.legend(
        [patch for _, patch in key],
        [name for name, _ in key],
        loc="upper center",
        bbox_to_anchor=(0.45, -42 / (0.24 * len(labels) + 1.1) / 72),
        ncols=len(key),
        fontsize=7.5,
        frameon=False,
        handlelength=1.0,
        columnspacing=1.0,
    )
    axes.set_xlabel("milliseconds on the leader's clock")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def depth(one: dict[str, Any], bars: list[dict[str, Any]]) -> int:
    """In how many bars of its own row a bar lies."""
    return sum(
        other is not one
        and (other["pid"], other["tid"]) == (one["pid"], one["tid"])
        and other["ts"] <= one["ts"]
        and one["ts"] + one["dur"] <= other["ts"] + other["dur"]
        and other["dur"] > one["dur"]
        for other in bars
    )


if __name__ == "__main__":
    main()
