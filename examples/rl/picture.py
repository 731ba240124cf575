"""The picture of a run: reward, age of the samples, time of the refits, and which shards served."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

INK, SOFT, ALARM = "#1f5a96", "#a9c4de", "#c0392b"
MARKERS = "ox^sDv"
"""One for each shard that was left behind, again and again."""


def draw(rows: Sequence[Any], shards: int, path: Path) -> None:
    """Write the rows of a run as a picture; the suffix of *path* says which format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = [row.step for row in rows]
    figure, (top, age, time, lanes) = plt.subplots(
        4, 1, figsize=(10, 8), sharex=True, height_ratios=(5, 2.2, 2.2, 1.8), layout="constrained"
    )
    top.plot(steps, [row.reward for row in rows], ".", color=SOFT, markersize=5, label="one step")
    top.plot(steps, _running([row.reward for row in rows]), color=INK, label="mean of 9 steps")
    top.plot(steps, _running([row.exact for row in rows]), color=INK, ls=":", label="whole word right")
    top.set(ylabel="reward", ylim=(0, 1.02))
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False, "fontsize": 8}
    top.legend(**beside)  # inside it would cover a curve, of one run or another
    top.set_title("Learning to write words backwards while shards die", loc="left", pad=30)

    age.step(steps, [row.lag for row in rows], where="mid", color=INK, label="oldest sample\nof the step")
    for shard in range(shards):
        behind = _behind(rows, shard)
        if any(behind):
            shown = [lag or float("nan") for lag in behind]
            marker = MARKERS[shard % len(MARKERS)]
            label = f"what shard {shard}\nserved last"
            age.plot(steps, shown, marker, color=ALARM, mfc="none", markersize=3.5, label=label)
    age.set(ylabel="versions\nbehind", ylim=(-0.8, None))
    age.legend(**beside)

    time.semilogy(steps, [row.refit_s for row in rows], color=INK)
    time.set(ylabel="refit,\nseconds")

    for shard in range(shards):
        for serving, run in groupby(rows, key=lambda row, shard=shard: shard in row.members):
            part = list(run)
            left, width = part[0].step - 0.5, len(part)
            lanes.barh(shard, width, left=left, height=0.62, color=INK if serving else ALARM)
    lanes.set(yticks=range(shards), yticklabels=[f"shard {shard}" for shard in range(shards)], xlabel="step")
    lanes.set_ylim(shards - 0.5, -0.5)
    lanes.set_xlim(0.5, len(rows) + 0.5)

    for number, row in enumerate(row for row in rows if row.event):
        for axis in (top, age, time):
            axis.axvline(row.step, color=ALARM, lw=0.8, ls="--", alpha=0.7)
        top.annotate(
            row.event,
            (row.step, 1.02),
            xytext=(0, 4 + 11 * (number % 2)),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=ALARM,
            annotation_clip=False,
        )
    for axis in (top, age, time, lanes):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _behind(rows: Sequence[Any], shard: int) -> list[int]:
    """At each step, by how many versions the fleet is ahead of what a shard served last."""
    last, behind = rows[0].version, []
    for row in rows:
        last = row.version if shard in row.members else last
        behind.append(row.version - last)
    return behind


def _running(values: Sequence[float], width: int = 9) -> list[float]:
    """The mean of the values around each one."""
    half = width // 2
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
