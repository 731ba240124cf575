"""A layout as text: a grid of ranks for each pipeline stage, and the groups of one rank.

What is drawn (`Drawing`) is shared with the SVG picture in `dprims._layout_svg`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from ._layout_degrees import AXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .layout import ParallelLayout

T = TypeVar("T")

PURPOSE = {
    "pp": "hands activations from stage to stage",
    "dp_replicate": "holds copies of the same shards",
    "dp_shard": "shards parameters",
    "cp": "splits one sequence",
    "tp": "splits one matrix",
    "dp": "reads different batches",
    "fsdp": "shards parameters, context ranks included",
    "dp_cp": "averages the loss",
    "cp_tp": "shares one batch within a stage",
    "pp_cp_tp": "shares one batch; its head reads it",
    "stage": "holds one pipeline stage",
    "world": "everyone",
    "ep": "holds different experts",
    "etp": "splits one expert's matrix",
    "efsdp": "shards the same experts",
}

_LINE = 110
_RESET, _BOLD, _DIM = "\033[0m", "\033[1m", "\033[2m"
_PASTELS = (153, 223, 151, 217, 183, 229, 116, 216, 189, 193, 180, 225)  # of the 256 terminal colours


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank in the picture."""

    rank: int
    group: int
    is_head: bool
    is_with_rank: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a picture of a layout shows; None in a row, a column or a list of stages is a gap.

    Rows are data-parallel positions and columns context-tensor positions, each with its label; `stages`
    are pipeline positions. The colour of a cell is the number of its group of the name `group`.
    """

    layout: ParallelLayout
    rank: int | None
    group: str
    rows: Sequence[tuple[int, int] | None]
    columns: Sequence[tuple[int, int] | None]
    stages: Sequence[int | None]
    numbers: dict[int, int]

    @classmethod
    def of(
        cls, layout: ParallelLayout, rank: int | None, group: str, limits: tuple[int, int, int]
    ) -> Drawing:
        """Choose what to draw: all, or the edges where rows, columns or stages exceed `limits`."""
        rows = list(product(range(layout.dp_replicate), range(layout.dp_shard)))
        columns = list(product(range(layout.cp), range(layout.tp)))
        return cls(
            layout=layout,
            rank=rank,
            group=layout.canonical(group),
            rows=_edges(rows, limits[0]),
            columns=_edges(columns, limits[1]),
            stages=_edges(range(layout.pp), limits[2]),
            numbers={head: number for number, head in enumerate(layout.heads(group))},
        )

    def cell(self, stage: int, row: tuple[int, int], column: tuple[int, int]) -> Cell:
        """Return the rank at a place of the picture."""
        rank = self.layout.rank_at(pp=stage, dp_replicate=row[0], dp_shard=row[1], cp=column[0], tp=column[1])
        head = self.layout.head_of(rank, self.group)
        with_rank = self.rank is not None and head == self.layout.head_of(self.rank, self.group)
        return Cell(rank=rank, group=self.numbers[head], is_head=rank == head, is_with_rank=with_rank)

    def row_label(self, row: tuple[int, int] | None) -> str:
        """Return ``dp 3``, or ``rep 1 shard 0`` where both kinds of data parallelism are in use."""
        if row is None:
            return "..."
        both = self.layout.dp_replicate > 1 and self.layout.dp_shard > 1
        return f"rep {row[0]} shard {row[1]}" if both else f"dp {max(row)}"

    def title(self) -> str:
        """Return ``16 ranks = pp 2 x dp_shard 2 x cp 2 x tp 2``, with the expert degrees behind it."""
        layout = self.layout
        factors = [f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1] or ["1"]
        experts = f"; experts: ep {layout.ep}, etp {layout.etp}" if layout.ep > 1 else ""
        return f"{layout.world_size} rank{'s' * (layout.world_size > 1)} = {' x '.join(factors)}{experts}"

    def table(self) -> list[tuple[str, int, int, str, str]]:
        """Return for each group name: the name, number of groups, size, the rank's own group, purpose."""
        layout, rank = self.layout, self.rank or 0
        return [
            (
                name,
                layout.world_size // layout.size(name),
                layout.size(name),
                ranks_text(layout.group_of(rank, name)),
                PURPOSE[name],
            )
            for name in layout.names
        ]

    def facts(self) -> list[tuple[str, str]]:
        """Return what else a reader wants to know, as (label, text)."""
        layout = self.layout
        first, last = ranks_text(layout.first_stage_ranks()), ranks_text(layout.last_stage_ranks())
        facts = [
            ("stage heads", ranks_text(layout.stage_heads())),
            ("batch heads", ranks_text(layout.heads("pp_cp_tp"))),
            ("first stage", first),
            ("last stage", last if layout.pp == 1 else f"{last}; of a V schedule {first}"),
        ]
        length, ranks = layout.seq_len_divisor(load_balanced=layout.cp > 1), layout.gradient_divide_factor
        if length > 1:
            balanced = " when context ranks are balanced" if layout.cp > 1 else ""
            facts.append(("sequence length", f"a multiple of {length}{balanced}"))
        if ranks > 1:
            facts.append(("gradients", f"a sum over {ranks} ranks, divided by as many"))
        if layout.order != AXES:
            facts.append(("axis order", ", ".join(layout.order)))
        return facts


def text(layout: ParallelLayout, *, rank: int | None, group: str, color: bool) -> str:
    """Return the layout for a terminal."""
    drawing = Drawing.of(layout, rank, group, limits=(8, 12, 8))
    legend = f"by {drawing.group}: * is its head" + ("" if rank is None else f", [ ] the one of rank {rank}")
    lines = [_style(drawing.title(), _BOLD, color), legend, "", *_grids(drawing, color), ""]

    table, whose = drawing.table(), f"of rank {rank or 0}"
    width = max(len(whose), *(len(ranks) for *_, ranks, _ in table))
    lines.append(_style(f"{'name':12}  {'groups x size':>14}  {whose}", _BOLD, color))
    for name, count, size, ranks, purpose in table:
        counted = f"{count} x {size:<4}"
        lines.append(f"{name:12}  {counted:>14}  {ranks:{width}}  {_style(purpose, _DIM, color)}")
    lines += ["", *(f"{label:15}  {value}" for label, value in drawing.facts())]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def ranks_text(ranks: Iterable[int], limit: int = 6) -> str:
    """Return ranks for people, runs joined: ``0-3, 8-11``; a long list is cut before its end."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    if len(parts) > limit:
        parts = [*parts[: limit - 2], "...", parts[-1]]
    return ", ".join(parts)


def _edges(items: Sequence[T], limit: int) -> list[T | None]:
    """Return the items, or the first and last of too many with None between."""
    if len(items) <= limit:
        return list(items)
    return [*items[: limit - limit // 4], None, *items[len(items) - limit // 4 :]]


def _grids(drawing: Drawing, color: bool) -> list[str]:
    """Return the stages side by side, as many as fit into a line."""
    labels = ["", "", *(drawing.row_label(row) for row in drawing.rows)]
    indent = max(map(len, labels)) + 1
    digits = len(str(drawing.layout.world_size - 1))
    width = max((digits + 3) * len(drawing.columns), len(f"stage {drawing.layout.pp} "))
    beside = max(1, (_LINE - indent) // (width + 2))
    blocks = [_grid(drawing, stage, digits, width, color) for stage in drawing.stages]
    lines: list[str] = []
    for start in range(0, len(blocks), beside):
        if beside == 1 and drawing.stages[start] is None:
            lines += ["", "..."]
            continue
        rows = zip(labels, *blocks[start : start + beside], strict=True)
        lines += ["", *(f"{label:{indent}}{'  '.join(parts)}" for label, *parts in rows)]
    return lines[1:]


def _grid(drawing: Drawing, stage: int | None, digits: int, width: int, color: bool) -> list[str]:
    """Return the lines of one stage: its name, the context parallel positions, its rows."""
    if stage is None:
        return [f"{'...':{width}}"] * (len(drawing.rows) + 2)
    starts = ""
    for column in drawing.columns:
        # A narrow column holds the number alone.
        label = "" if column is None or column[1] else f"cp {column[0]}"
        starts += f"{label if len(label) <= (digits + 3) * drawing.layout.tp - 1 else label[3:]:{digits + 3}}"
    name = f" stage {stage}"
    lines = [_style(name, _BOLD, color) + " " * (width - len(name)), f" {starts}"[:width].ljust(width)]
    for row in drawing.rows:
        cells = ""
        for column in drawing.columns:
            if row is None or column is None:
                cells += f"{'...':^{digits + 3}}"
            else:
                cells += _cell_text(drawing.cell(stage, row, column), digits, color)
        lines.append(cells + " " * (width - (digits + 3) * len(drawing.columns)))
    return lines


def _cell_text(cell: Cell, digits: int, color: bool) -> str:
    left, right = "[]" if cell.is_with_rank else "  "
    shown = f"{left}{cell.rank:>{digits}}{'*' if cell.is_head else right}"
    style = f"\033[30;48;5;{_PASTELS[cell.group % len(_PASTELS)]}m{_BOLD if cell.is_head else ''}"
    return _style(shown, style, color) + " "


def _style(line: str, style: str, color: bool) -> str:
    return f"{style}{line}{_RESET}" if color else line
