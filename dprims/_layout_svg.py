"""A layout as a stand-alone SVG document: stages side by side, one colour for each group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._layout_render import Drawing, ranks_text

if TYPE_CHECKING:
    from .layout import ParallelLayout

_FONT = "ui-sans-serif, system-ui, 'Segoe UI', 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
_INK, _MUTED, _FAINT = "#1f2733", "#5b6675", "#d5dae1"
_CELL, _GAP, _MARGIN, _ROW = 28, 3, 28, 20
_CONTEXT_GAP = 8
_WIDTH = 1400
_GOLDEN_ANGLE = 137.508
_SWATCHES = 12


def svg(layout: ParallelLayout, *, rank: int | None, group: str) -> str:
    """Return the picture of a layout as SVG text."""
    return _Page(Drawing.of(layout, rank, group, limits=(16, 24, 8))).render()


class _Page:
    """Lays the parts out from top to bottom, each at `y`, and collects their elements."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.parts: list[str] = []
        self.y = float(_MARGIN)
        self.right = 0.0
        self.cell_width = max(_CELL, 8 + 7 * len(str(drawing.layout.world_size - 1)))
        self.label_width = 14 + 6.6 * max(len(drawing.row_label(row)) for row in drawing.rows)

    def render(self) -> str:
        drawing = self.drawing
        self.heading()
        self.stages()
        self.legend()
        self.table()
        width, height = round(self.right + _MARGIN), round(self.y + _MARGIN)
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="{_FONT}" font-size="12" fill="{_INK}">'
        )
        background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        return "\n".join(
            [opening, f"<title>{drawing.title()}</title>", background, *self.parts, "</svg>", ""]
        )

    def heading(self) -> None:
        layout = self.drawing.layout
        self.y += 16
        self.text(
            _MARGIN, self.y, f"{layout.world_size} rank{'s' * (layout.world_size > 1)}", size=22, weight=650
        )
        self.y += 24
        factors = self.drawing.title().partition(" = ")[2].replace(" x ", " \u00d7 ")
        self.text(
            _MARGIN,
            self.y,
            f"{factors}   \u00b7   rank order {', '.join(layout.order)}",
            fill=_MUTED,
            size=13,
        )
        self.y += 26

    # -- the grid --------------------------------------------------------------------------------------

    def column_x(self) -> list[float]:
        """Return the left edge of each column, context parallel positions set apart."""
        edges, x, previous = [], 0.0, None
        for column in self.drawing.columns:
            if previous is not None and (column is None or column[0] != previous[0]):
                x += _CONTEXT_GAP if self.drawing.layout.tp > 1 else 0
            edges.append(x)
            x += self.cell_width + _GAP
            previous = column
        return [*edges, x - _GAP]

    def stages(self) -> None:
        columns = self.column_x()
        width = max(columns[-1], 52)
        left = _MARGIN + self.label_width
        beside = max(1, int((_WIDTH - left - _MARGIN + 24) // (width + 24)))
        height = 44 + len(self.drawing.rows) * (_CELL + _GAP)
        for start in range(0, len(self.drawing.stages), beside):
            self.row_labels(self.y)
            for place, stage in enumerate(self.drawing.stages[start : start + beside]):
                self.stage(left + place * (width + 24), self.y, stage, columns)
            self.y += height + 26

    def row_labels(self, top: float) -> None:
        for number, row in enumerate(self.drawing.rows):
            y = top + 44 + number * (_CELL + _GAP) + _CELL / 2 + 4
            self.text(_MARGIN, y, self.drawing.row_label(row).replace("...", "\u22ee"), fill=_MUTED)

    def stage(self, x: float, y: float, stage: int | None, columns: list[float]) -> None:
        if stage is None:
            self.text(x, y + 12, "\u22ef", size=20, fill=_MUTED)
            return
        self.text(x, y + 12, f"stage {stage}", size=13, weight=600)
        self.context_brackets(x, y, columns)
        for row_number, row in enumerate(self.drawing.rows):
            top = y + 44 + row_number * (_CELL + _GAP)
            for edge, column in zip(columns, self.drawing.columns, strict=False):
                if row is None or column is None:
                    mark = "\u22ef" if row is not None else "\u22ee"
                    self.text(x + edge + self.cell_width / 2, top + 18, mark, fill=_MUTED, anchor="middle")
                else:
                    self.cell(x + edge, top, stage, row, column)

    def context_brackets(self, x: float, y: float, columns: list[float]) -> None:
        """Draw one bracket over the tensor ranks of each context parallel position."""
        positions = [column[0] if column else None for column in self.drawing.columns]
        for position in dict.fromkeys(positions):
            if position is None:
                continue
            first = positions.index(position)
            last = len(positions) - 1 - positions[::-1].index(position)
            left, right = x + columns[first], x + columns[last] + self.cell_width
            self.line(left, y + 37, right, y + 37)
            self.text((left + right) / 2, y + 31, f"cp {position}", size=11, fill=_MUTED, anchor="middle")

    def cell(self, x: float, y: float, stage: int, row: tuple[int, int], column: tuple[int, int]) -> None:
        cell = self.drawing.cell(stage, row, column)
        fill, edge = _colors(cell.group, len(self.drawing.numbers))
        if cell.is_head:
            self.rect(x, y, self.cell_width, _CELL, fill, _INK, stroke_width=2)
        else:
            self.rect(x, y, self.cell_width, _CELL, fill, edge)
        if cell.is_with_rank:
            middle = x + self.cell_width / 2
            self.line(middle - 7, y + _CELL - 5, middle + 7, y + _CELL - 5, stroke=_INK, width=1.5)
        weight = 700 if cell.is_head or cell.rank == self.drawing.rank else 400
        self.text(x + self.cell_width / 2, y + 18, str(cell.rank), anchor="middle", weight=weight)

    # -- below it --------------------------------------------------------------------------------------

    def legend(self) -> None:
        drawing, x = self.drawing, float(_MARGIN)
        count = len(drawing.numbers)
        self.text(x, self.y, f"colour: {drawing.group}", weight=600)
        shown = "" if count <= _SWATCHES else f", the first {_SWATCHES}"
        x += self.text(
            x + 8 + 7 * len(f"colour: {drawing.group}"), self.y, f"{count} groups{shown}", fill=_MUTED
        )
        self.y += 18
        x = float(_MARGIN)
        for head, number in list(drawing.numbers.items())[:_SWATCHES]:
            label = ranks_text(drawing.layout.group_of(head, drawing.group), limit=4)
            width = 16 + 6.6 * len(label) + 20
            if x + width > _WIDTH - _MARGIN and x > _MARGIN:
                x, self.y = float(_MARGIN), self.y + _ROW
            fill, edge = _colors(number, count)
            self.rect(x, self.y - 10, 12, 12, fill, edge)
            self.text(x + 17, self.y, label)
            x += width
        self.y += _ROW + 4
        self.rect(_MARGIN + 1, self.y - 10, 11, 11, "none", _INK, stroke_width=2)
        self.text(_MARGIN + 17, self.y, "head of its group")
        if drawing.rank is not None:
            self.line(_MARGIN + 150, self.y - 1, _MARGIN + 164, self.y - 1, stroke=_INK, width=1.5)
            self.text(_MARGIN + 170, self.y, f"in one group with rank {drawing.rank}")
        self.y += 30

    def table(self) -> None:
        drawing = self.drawing
        left: list[float] = [_MARGIN, _MARGIN + 118, _MARGIN + 218]
        rows = drawing.table()
        left.append(left[2] + 6.6 * max(12, *(len(ranks) for *_, ranks, _ in rows)) + 24)
        for x, label in zip(
            left, ("group", "count \u00d7 size", f"of rank {drawing.rank or 0}", "what it does"), strict=True
        ):
            self.text(x, self.y, label, fill=_MUTED, weight=600)
        self.y += 8
        end = left[3] + 6.6 * max(len(purpose) for *_, purpose in rows)
        for name, count, size, ranks, purpose in rows:
            self.line(_MARGIN, self.y, end, self.y)
            self.y += _ROW - 5
            weight = 700 if name == drawing.group else 400
            self.text(left[0], self.y, name, weight=weight)
            self.text(left[1], self.y, f"{count} \u00d7 {size}")
            self.text(left[2], self.y, ranks)
            self.text(left[3], self.y, purpose, fill=_MUTED)
            self.y += 5
        self.line(_MARGIN, self.y, end, self.y)
        self.y += _ROW + 2
        for label, value in drawing.facts():
            self.text(left[0], self.y, label, fill=_MUTED, weight=600)
            self.text(left[1], self.y, value)
            self.y += _ROW - 2
        self.y -= _ROW

    # -- elements --------------------------------------------------------------------------------------

    def text(
        self,
        x: float,
        y: float,
        content: str,
        *,
        size: int = 12,
        weight: int = 400,
        fill: str = _INK,
        anchor: str = "start",
    ) -> float:
        """Add a text and return about how wide it is."""
        width = size * 0.56 * len(content)
        self.right = max(self.right, x + (width / 2 if anchor == "middle" else width))
        style = f' font-size="{size}"' * (size != 12) + f' font-weight="{weight}"' * (weight != 400)
        style += f' fill="{fill}"' * (fill != _INK) + f' text-anchor="{anchor}"' * (anchor != "start")
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{style}>{content}</text>')
        return width

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = _FAINT, width: float = 1
    ) -> None:
        self.right = max(self.right, x2)
        place = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.parts.append(f'<line {place} stroke="{stroke}" stroke-width="{width:g}"/>')

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str, *, stroke_width: int = 1
    ) -> None:
        self.right = max(self.right, x + width)
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{height / 5:.0f}"'
        self.parts.append(f'<rect {place} fill="{fill}" stroke="{edge}" stroke-width="{stroke_width}"/>')


def _colors(number: int, count: int) -> tuple[str, str]:
    """Return fill and edge of a group: hues spread evenly over few groups, by the golden angle over many."""
    hue = 210 + (number * 360 / count if count <= 8 else number * _GOLDEN_ANGLE)
    lightness = 84 if count <= 8 or number % 2 == 0 else 76
    return f"hsl({hue % 360:.0f}, 70%, {lightness}%)", f"hsl({hue % 360:.0f}, 40%, {lightness - 22}%)"
