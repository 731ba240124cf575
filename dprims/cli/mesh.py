"""``dprims mesh``: show a parallel layout, on a laptop, for a job of any size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .._layout_model import Check, check_model
from .._layout_render import ranks_text
from ..layout import ParallelLayout


def mesh(
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", "-n", help="Number of ranks; without it the product of the degrees."),
    ] = None,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp_replicate: Annotated[int, typer.Option(help="Copies of the sharded model.")] = 1,
    dp_shard: Annotated[
        int | None,
        typer.Option(
            help="Data-parallel shards; left out, inferred from --world-size, as by dp_shard=-1 in Python.",
            show_default=False,
        ),
    ] = None,
    cp: Annotated[int, typer.Option(help="Context parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallel ranks; they borrow from dp_shard, cp and tp.")] = 1,
    etp: Annotated[int, typer.Option(help="Tensor parallel ranks of an expert: 1, or tp.")] = 1,
    order: Annotated[
        str | None,
        typer.Option(help="The axes, slowest first, by commas; default: pp,dp_replicate,dp_shard,cp,tp."),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Mark the groups of this rank.")] = None,
    group: Annotated[
        str | None,
        typer.Option(help="List the groups of this name, and colour by it; default: colour by pp_cp_tp."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; with --group its groups alone.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.", dir_okay=False)] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            help="Check a model's config.json: heads by tp, layers by pp, experts by ep; 1 is failure.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Show the pipeline, data, context, tensor and expert groups.

    Any one degree may be -1 and is then worked out; dp_shard is, when it is left out. Needs no GPU, no
    torch and no job.
    """
    degrees = {"pp": pp, "dp_replicate": dp_replicate, "cp": cp, "tp": tp, "ep": ep, "etp": etp}
    layout = _layout(world_size, dp_shard, degrees, order)
    name = layout.canonical(group or "pp_cp_tp")
    checks = check_model(layout, _config(check)) if check else ()
    if svg:
        _write(svg, layout.render("svg", rank=rank, group=name))
    if as_json:
        typer.echo(json.dumps(_as_data(layout, rank, group and name, checks)))
    else:
        color = "NO_COLOR" not in os.environ  # and typer takes colours away where no terminal is
        typer.echo(layout.render("text", rank=rank, group=name, color=color), nl=False)
        if group:
            _list_groups(layout, name)
        if checks:
            _list_checks(checks)
    if any(check.passed is False for check in checks):
        raise typer.Exit(1)


def _layout(
    world_size: int | None, dp_shard: int | None, degrees: dict[str, Any], order: str | None
) -> ParallelLayout:
    options: dict[str, Any] = {} if order is None else {"order": tuple(order.replace(" ", "").split(","))}
    if world_size is None:
        sizes = [*(degrees[axis] for axis in ("pp", "dp_replicate", "cp", "tp")), dp_shard or 1]
        if any(size < 1 for size in sizes):
            raise typer.BadParameter("needed to work out a degree", param_hint="--world-size")
        world_size = 1
        for size in sizes:
            world_size *= size
    elif dp_shard is None:
        dp_shard = 1 if -1 in degrees.values() else -1
    return ParallelLayout(
        world_size=world_size, dp_shard=1 if dp_shard is None else dp_shard, **degrees, **options
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--svg") from None


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is no JSON: {error}", param_hint="--check") from None
    if not isinstance(config, dict):
        raise typer.BadParameter(f"{path} holds no JSON object", param_hint="--check")
    return config


def _as_data(
    layout: ParallelLayout, rank: int | None, only: str | None, checks: tuple[Check, ...]
) -> dict[str, Any]:
    names = [only] if only else layout.names
    data: dict[str, Any] = {
        "layout": json.loads(layout.to_json()),
        "sizes": layout.sizes,
        "groups": {name: layout.groups(name) for name in names},
        "heads": {name: layout.heads(name) for name in names},
        "stage_heads": layout.stage_heads(),
        "first_stage_ranks": layout.first_stage_ranks(),
        "last_stage_ranks": {schedule: layout.last_stage_ranks(schedule) for schedule in ("loop", "v")},
        "context_and_model_parallel_size": layout.context_and_model_parallel_size,
        "gradient_divide_factor": layout.gradient_divide_factor,
        "seq_len_divisor": layout.seq_len_divisor(),
    }
    if layout.ep > 1 and not only:
        data["grids"] = {"ep_tp": layout.grids("ep_tp")}
    if rank is not None:
        data["rank"] = {
            "rank": rank,
            "coordinates": layout.coordinates(rank),
            "data_parallel_rank": layout.data_parallel_rank(rank),
            "groups": {name: layout.group_of(rank, name) for name in names},
            "heads": {name: layout.head_of(rank, name) for name in names},
        }
    if checks:
        data["check"] = [{"rule": check.rule, "passed": check.passed, "text": check.text} for check in checks]
    return data


def _list_groups(layout: ParallelLayout, name: str) -> None:
    typer.echo(f"\ngroups {name}")
    for ranks in layout.groups(name):
        typer.echo(f"  head {ranks[0]}: {ranks_text(ranks, limit=64)}")


def _list_checks(checks: tuple[Check, ...]) -> None:
    typer.echo("\ncheck")
    words = {True: ("ok", "green"), False: ("FAILED", "red"), None: ("unknown", "yellow")}
    for check in checks:
        word, color = words[check.passed]
        typer.echo(f"  {typer.style(f'{word:8}', fg=color)}{check.rule}: {check.text}")
