"""``dprims bench``: what this machine does, measured."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..backend import need

if TYPE_CHECKING:
    from ..testing.refit_bench import Measured

bench = typer.Typer(help="Measure what this machine does.")

LARGEST_MIB = 1 << 20
SWEEP = (16, 64, 256, 1024, 4096)
"""Into how many tensors ``--sweep`` cuts the same bytes."""


@bench.callback()
def _group() -> None:
    """Measure what this machine does."""


@bench.command()
def refit(
    model: Annotated[str, typer.Option(help="Shapes by name; --list shows them.")] = "kb256",
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL).")] = "cpu",
    receivers: Annotated[int, typer.Option(min=1, help="Receiving processes.")] = 1,
    bucket_mib: Annotated[
        float | None, typer.Option(help="Bucket size in MiB; default: 8 on cpu, 1024 on cuda.")
    ] = None,
    max_mib: Annotated[
        int | None, typer.Option(min=1, help="Take only the model's first tensors, up to so many MiB.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count; medians are shown.")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help="Run this contestant; may be given again; default: all.")
    ] = None,
    sweep: Annotated[bool, typer.Option(help="Also cut the same bytes into more and more tensors.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the result into this file (needs matplotlib).", dir_okay=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write one verified refit as a Chrome trace to this file.", dir_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Show models and contestants, and stop.")] = False,
) -> None:
    """How fast weights travel from one process to others.

    Next to the ways engines move them today. All contestants move the same tensors between the same
    processes, in turn. *wire* is from the first bucket's dispatch to the last one's arrival, *total* until
    the new weights are live.
    """
    need("torch", "torch")
    from ..synchronizer.stages import BUCKET_BYTES
    from ..testing.refit_bench import CONTESTANTS, MODELS, bench_refit, cut, model_metas

    if show:
        for title, entries in (("models", MODELS), ("contestants", CONTESTANTS)):
            typer.echo(title)
            for name, text in entries.items():
                typer.echo(f"  {name:16} {text}")
        return
    _check(device, model, tuple(MODELS), only or [], tuple(CONTESTANTS))
    bucket_bytes = BUCKET_BYTES[device] if bucket_mib is None else _bucket_bytes(bucket_mib)
    _check_picture(picture)
    _check_writable(trace, "--trace")
    metas = cut(model_metas(model), max_mib * 1024 * 1024 if max_mib else None)
    options: dict[str, Any] = {
        "device": device,
        "receivers": receivers,
        "bucket_bytes": bucket_bytes,
        "rounds": rounds,
    }
    measured = bench_refit(metas, contestants=only or tuple(CONTESTANTS), **options)
    swept: dict[int, list[Measured]] = {}
    if sweep:
        total = sum(meta.nbytes for meta in metas)
        for count in SWEEP:
            shape = (max(1, total // count // 2),)
            pieces = [replace(metas[0], name=f"w{i}", shape=shape, dtype="bfloat16") for i in range(count)]
            swept[count] = bench_refit(
                pieces, contestants=("per tensor", "cat", "dprims verified"), **options
            )
    if picture is not None:
        _draw(picture, f"{model} on {device}", measured, swept)
    if trace is not None:
        _trace(trace, measured)
    if as_json:
        rows = {"results": [_row(one, measured) for one in measured]}
        if swept:
            rows["sweep"] = [
                {"tensors": n, **_row(one, found)} for n, found in swept.items() for one in found
            ]
        about = {"model": model, "tensors": len(metas), "bucket_bytes": bucket_bytes, "receivers": receivers}
        typer.echo(json.dumps({**about, "device": device, "rounds": rounds, **rows}))
        return
    size = sum(meta.nbytes for meta in metas)
    typer.echo(
        f"{model}: {len(metas)} tensors, {size / 1e9:.3f} GB, buckets of {bucket_bytes / 2**20:g} MiB, "
        f"{receivers} receiver{'s' if receivers > 1 else ''}, {device}, median of {rounds}; "
        f"ratios to {_limit(measured).name!r}"
    )
    _table(measured)
    for count, found in swept.items():
        typer.echo(f"\n{count} tensors")
        _table(found)


@bench.command()
def pack(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count; medians are shown.")] = 9,
    max_mib: Annotated[int, typer.Option(min=1, help="Bytes to pack, in MiB.")] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How fast one device packs tensors, digests them, copies them into live ones, and has them sent.

    Next to copying the same bytes. *loop* is a sender's whole verified loop with nobody to receive. The
    host's time is shown by the tensor, and that of the loop by the bucket, with what it may be.
    """
    need("torch", "torch")
    from ..testing.pack_bench import bench_pack
    from ..testing.refit_bench import MODELS, cut, model_metas

    models = ("moe-3mb", "kb256", "kb64", "kb64-mixed")
    _check(device, models[0], tuple(MODELS), [], ())
    found = {
        model: bench_pack(cut(model_metas(model), max_mib * 1024 * 1024), device=device, rounds=rounds)
        for model in models
    }
    if as_json:
        typer.echo(json.dumps({model: asdict(speed) for model, speed in found.items()}))
        return
    typer.echo(
        f"{'GB/s (ratio)':10} {'tensors':>8} {'copy':>7} {'pack':>14} {'into live':>14} {'digest':>7} "
        f"{'loop':>7} {'us: pack':>9} {'see':>5} {'adopt':>6} {'bucket':>7} {'(at most)':>9}"
    )
    for model, one in found.items():
        packed, adopted = (
            f"{speed:.1f} ({speed / one.copy_gb_per_s:.2f})"
            for speed in (one.pack_gb_per_s, one.adopt_gb_per_s)
        )
        typer.echo(
            f"{model:12} {one.tensors:8} {one.copy_gb_per_s:7.1f} {packed:>14} {adopted:>14} "
            f"{one.digest_gb_per_s:7.1f} {one.loop_gb_per_s:7.1f} {one.pack_us_per_tensor:9.2f} "
            f"{one.unpack_us_per_tensor:5.2f} {one.adopt_us_per_tensor:6.2f} "
            f"{one.loop_us_per_bucket:7.0f} {one.loop_us_allowed:9.0f}"
        )


def _check(
    device: str, model: str, models: tuple[str, ...], only: list[str], contestants: tuple[str, ...]
) -> None:
    if model not in models:
        raise typer.BadParameter(f"{model!r}; known are {', '.join(models)}", param_hint="--model")
    for name in only:
        if name not in contestants:
            raise typer.BadParameter(f"{name!r}; known are {', '.join(contestants)}", param_hint="--only")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r}; cpu or cuda", param_hint="--device")
    if device == "cuda" and not need("torch", "torch").cuda.is_available():
        raise typer.BadParameter("'cuda', and there is no GPU here", param_hint="--device")


def _bucket_bytes(mib: float) -> int:
    if not 1 / 1024 <= mib <= LARGEST_MIB:  # neither is NaN
        raise typer.BadParameter(
            f"{mib:g}; expected 1/1024 (1 KiB) to {LARGEST_MIB}", param_hint="--bucket-mib"
        )
    return int(mib * 1024) * 1024


def _check_picture(path: Path | None) -> None:
    if path is None:
        return
    _check_writable(path, "--picture")
    kinds = need("matplotlib.backend_bases", "bench").FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in {*kinds, ""}:
        raise typer.BadParameter(
            f"{path}; expected a name that ends in one of {', '.join(kinds)}", param_hint="--picture"
        )


def _check_writable(path: Path | None, option: str) -> None:
    """Refuse, before anything is measured, a file that could not be written afterwards."""
    if path is None:
        return
    target = path if path.exists() else path.parent
    if target == path.parent and not target.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {target}", param_hint=option)
    if not os.access(target, os.W_OK):
        raise typer.BadParameter(f"{path}: {target} cannot be written to", param_hint=option)


def _limit(measured: list[Measured]) -> Measured:
    """What the ratios are of: the device copy where there is one, flat broadcasts, or the first."""
    by_name = {one.name: one for one in measured}
    return by_name.get("device copy") or by_name.get("flat") or measured[0]


def _row(one: Measured, measured: list[Measured]) -> dict[str, Any]:
    limit = _limit(measured)
    return {
        "name": one.name,
        "wire_s": statistics.median(one.wire_s),
        "total_s": statistics.median(one.total_s),
        "wire_gb_per_s": one.gb_per_s,
        "total_gb_per_s": one.total_gb_per_s,
        "wire_ratio": one.gb_per_s / limit.gb_per_s,
        "total_ratio": one.total_gb_per_s / limit.total_gb_per_s,
        "ratio_of": limit.name,
        "phases_s": one.phases,
    }


def _table(measured: list[Measured]) -> None:
    typer.echo(f"{'':16} {'wire GB/s':>10} {'ratio':>6} {'total GB/s':>11} {'ratio':>6}   phases, ms")
    for row in (_row(one, measured) for one in measured):
        phases = "  ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in row["phases_s"].items())
        typer.echo(
            f"{row['name']:16} {row['wire_gb_per_s']:10.2f} {row['wire_ratio']:6.2f} "
            f"{row['total_gb_per_s']:11.2f} {row['total_ratio']:6.2f}   {phases}"
        )


def _trace(path: Path, measured: list[Measured]) -> None:
    """Write the median round of the last contestant that has spans."""
    from ..synchronizer.chrome import Bar, Sheet

    lanes: dict[tuple[int, str], list[Bar]] = {}
    for rank, phase, bucket, start, stop in next((one.spans for one in reversed(measured) if one.spans), []):
        lanes.setdefault((rank, phase), []).append(Bar(f"{phase} {bucket}", start, stop))
    sheet = Sheet()
    for rank in sorted({rank for rank, _ in lanes}):
        sheet.process(rank + 1, f"rank {rank}")
    for (rank, phase), bars in lanes.items():
        sheet.flat(rank + 1, phase, bars)
    sheet.write(path)


def _draw(path: Path, title: str, measured: list[Measured], swept: dict[int, list[Measured]]) -> None:
    matplotlib = need("matplotlib", "bench")
    matplotlib.use("agg")
    pyplot = need("matplotlib.pyplot", "bench")

    figure, panes = pyplot.subplots(1, 2 if swept else 1, figsize=(12 if swept else 7, 4), squeeze=False)
    bars = panes[0][0]
    places = range(len(measured))
    bars.barh([p - 0.2 for p in places], [one.gb_per_s for one in measured], 0.4, label="wire")
    bars.barh([p + 0.2 for p in places], [one.total_gb_per_s for one in measured], 0.4, label="total")
    bars.set_yticks(list(places), [one.name for one in measured])
    bars.invert_yaxis()
    bars.set_xlabel("GB/s")
    bars.set_title(title)
    bars.legend()
    if swept:
        lines = panes[0][1]
        for name in [one.name for one in next(iter(swept.values()))]:
            points = [(n, one.total_s) for n, found in swept.items() for one in found if one.name == name]
            lines.plot(
                [n for n, _ in points], [statistics.median(s) for _, s in points], marker="o", label=name
            )
        lines.set_xscale("log")
        lines.set_yscale("log")
        lines.set_xlabel("tensors, the same bytes")
        lines.set_ylabel("seconds")
        lines.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
