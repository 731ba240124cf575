"""Draws the diagrams in docs/images that are lines and boxes: ``python docs/drawings.py [FOLDER]``.

The two state machines of a refit, and the layers of the package, which come from the table in
tests/test_layers.py. tests/test_drawings.py fails when a picture is not what this file draws, or when the
state machines have other phases and calls than the code.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent / "images"
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"
INK, LINE = "#1f2933", "#52606d"
PLAIN, GOOD, BAD, REST = "#e8eef5", "#dcefdc", "#f8dcd6", "#f3f0e2"

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A state: its middle, its name, and a line below it."""

    x: float
    y: float
    name: str
    text: str = ""
    fill: str = PLAIN
    width: float = 124
    height: float = 50


@dataclass(frozen=True)
class Edge:
    """An arrow along *points*, with lines of text from *at*."""

    points: Sequence[Point]
    label: str = ""
    at: Point = (0, 0)
    dashed: bool = False
    anchor: str = "middle"


LEADER_BOXES = (
    Box(80, 70, "off", "no lock yet", REST),
    Box(250, 70, "ask", "who holds what?"),
    Box(420, 70, "seal", "open decisions"),
    Box(590, 70, "resolve", "shard by shard"),
    Box(790, 70, "publish", "refit/current", GOOD),
    Box(790, 220, "idle", "waits for a request", GOOD, 140),
    Box(590, 220, "exclude", "fence who is out"),
    Box(420, 220, "reserve", "refit/next"),
    Box(250, 220, "build", "a new epoch"),
    Box(80, 220, "transfer", "recv everywhere"),
    Box(80, 390, "decide", "the cell", REST),
    Box(420, 390, "settle", "rollback to all", BAD),
    Box(420, 480, "commit", "pause, commit, resume", GOOD, 160),
    Box(1010, 390, "stopped", "condemns nobody", BAD, 134),
)
LEADER_EDGES = (
    Edge([(142, 70), (188, 70)], "elected", (165, 38)),
    Edge([(312, 70), (358, 70)]),
    Edge([(482, 70), (528, 70)]),
    Edge([(652, 70), (728, 70)]),
    Edge([(790, 95), (790, 195)], "done", (798, 150), anchor="start"),
    Edge([(720, 220), (652, 220)], "request", (687, 210)),
    Edge([(528, 220), (482, 220)]),
    Edge([(358, 220), (312, 220)]),
    Edge([(188, 220), (142, 220)]),
    Edge(
        [(420, 245), (420, 285), (105, 285), (105, 245)],
        "the groups that stand are the ones wanted",
        (262, 301),
        anchor="start",
    ),
    Edge([(250, 195), (250, 140), (765, 140), (765, 95)], "a build was all that was asked for", (430, 133)),
    Edge([(70, 245), (70, 365)], "all acknowledged:\nwrite commit", (78, 328), anchor="start"),
    Edge(
        [(250, 245), (250, 378), (142, 378)],
        "an error, a rank gone, a call overdue",
        (258, 335),
        anchor="start",
    ),
    Edge([], "in build or transfer: write abort", (258, 351), anchor="start"),
    Edge([(142, 394), (358, 394)], "the cell reads abort", (250, 410)),
    Edge([(80, 415), (80, 480), (340, 480)], "the cell reads commit", (210, 471)),
    Edge(
        [(482, 390), (790, 390), (790, 245)],
        "this try fails; the next has a new epoch",
        (492, 380),
        anchor="start",
    ),
    Edge([(500, 480), (890, 480), (890, 70), (852, 70)], "each shard done, gone or condemned", (690, 471)),
    Edge([(1010, 245), (1010, 365)], "", dashed=True),
    Edge([], "any phase", (1010, 170)),
    Edge([], "a higher term seen,\nthe lock lost, or a\nbackend that is silent", (1010, 192)),
)

MEMBER_BOXES = (
    Box(90, 110, "joining", "entry, then term", REST),
    Box(300, 110, "ready", "serves what is live;\nwhen new: nothing", GOOD, 150, 66),
    Box(510, 110, "building", "joins the groups"),
    Box(700, 110, "receiving", "bucket by bucket"),
    Box(900, 110, "staged", "in doubt: decides\nnothing by itself", REST, 140, 66),
    Box(900, 270, "paused", "serves nothing"),
    Box(700, 270, "committed", "live = staged,\nstill paused", GOOD, 130, 62),
    Box(900, 390, "nothing live", "its shard is condemned", BAD, 170),
)
MEMBER_EDGES = (
    Edge([(152, 110), (225, 110)], "has read\nthe fence", (188, 88)),
    Edge([(375, 110), (448, 110)], "build", (411, 102)),
    Edge([(572, 110), (638, 110)], "recv", (605, 102)),
    Edge([(762, 110), (830, 110)], "digest ok", (796, 102)),
    Edge([(900, 143), (900, 245)], "pause", (908, 200), anchor="start"),
    Edge([(838, 270), (765, 270)], "commit", (801, 262)),
    Edge([(635, 270), (300, 270), (300, 143)], "resume", (460, 262)),
    Edge(
        [(900, 77), (900, 30), (300, 30), (300, 77)],
        "rollback, or abort read in the cell: what is staged is dropped",
        (640, 22),
    ),
    Edge([(510, 85), (510, 30)], ""),
    Edge([(700, 85), (700, 30)], ""),
    Edge([], "failed or cut: write abort", (708, 62), anchor="start"),
    Edge(
        [(860, 245), (860, 205), (330, 205), (330, 143)], "rollback, resume: the version before", (590, 198)
    ),
    Edge([(900, 295), (900, 365)], "commit fails half way", (908, 335), anchor="start"),
    Edge(
        [(815, 390), (90, 390), (90, 135)],
        "the roster entry is lost, from anywhere: a new incarnation",
        (440, 381),
        dashed=True,
    ),
)


def leader() -> str:
    """The leader of refits."""
    return drawing(1100, 525, LEADER_BOXES, LEADER_EDGES, "The phases of the leader of refits")


def member() -> str:
    """One rank of a shard."""
    return drawing(1080, 430, MEMBER_BOXES, MEMBER_EDGES, "The states of one rank of a generation shard")


# -- layers --------------------------------------------------------------------------------------------

PARTS = {
    "command line": (600, 40, "dprims demo, lock, status, ...", ("cli", "demo")),
    "testing": (110, 140, "servers, faults, conformance", ("testing",)),
    "status": (555, 140, "a fleet, read from its backend", ("status",)),
    "doctor": (820, 140, "what is wrong, and what to do", ("doctor",)),
    "engines": (110, 240, "processes, Ray, torchrun", ("engines",)),
    "synchronizer": (110, 340, "groups, transfer, guard, leader", ("synchronizer.collective",)),
    "meshes": (110, 440, "process groups, tied weights", ("mesh", "tied")),
    "protocol": (330, 440, "leader and member, plan", ("synchronizer.protocol",)),
    "locks, rosters": (550, 440, "policy over any backend", ("lock",)),
    "backends": (940, 440, "each imports its client when used", ("backends", "torchstore")),
    "values": (220, 540, "layout, membership, health", ("layout", "membership")),
    "metrics": (460, 540, "Prometheus, if enabled", ("metrics",)),
    "backend": (700, 540, "what a backend offers; connect", ("backend",)),
    "exceptions": (460, 640, "every error", ("exceptions",)),
}
"""Where each part stands, what it is, and a module of each layer that belongs to it."""


def layers(table: Sequence[Any], modules: Iterable[str]) -> str:
    """The layers of *table* (``LAYERS`` of tests/test_layers.py): who imports stands above the imported."""
    names = list(modules)
    owner = {name: next((layer for layer in table if _matches(name, layer.modules)), None) for name in names}
    own = {part: [owner[module] for module in of] for part, (_, _, _, of) in PARTS.items()}
    inside = {
        part: [
            name
            for name in names
            if owner[name] in mine
            and not name.rpartition(".")[2].startswith("_")
            and not any(other.startswith(f"{name}.") for other in names)
        ]
        for part, mine in own.items()
    }
    below = {
        part: {
            other
            for other in PARTS
            if other != part
            and all(
                name == "exceptions" or any(_matches(name, layer.may) for layer in own[part])
                for name in inside[other]
            )
        }
        for part in PARTS
    }
    boxes = [
        Box(x, y, part, f"{text}\n{_needs(own[part])}", _fill(own[part]), 216, 62)
        for part, (x, y, text, _) in PARTS.items()
    ]
    place = {box.name: box for box in boxes}
    edges = []
    for part, others in below.items():
        for other in sorted(others):
            if not any(other in below[middle] for middle in others):
                above, under = place[part], place[other]
                aside = max(
                    -70.0, min(70.0, (above.x - under.x) * 0.2)
                )  # arrow tips do not lie upon each other
                edges.append(Edge([(above.x - aside / 2, above.y + 31), (under.x + aside, under.y - 31)]))
    return drawing(1050, 690, boxes, edges, "Who may import whom: arrows lead to what is imported")


def _matches(module: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def _needs(own: Sequence[Any]) -> str:
    """The packages that a part imports with itself; those that it imports when it uses them are left out."""
    packages = sorted({package for layer in own for package in layer.packages})
    if all(layer.never for layer in own):
        return "no clock, no input or output"
    return f"imports {', '.join(packages)}" if packages else "standard library"


def _fill(own: Sequence[Any]) -> str:
    if all(layer.never for layer in own):
        return GOOD
    return REST if any(layer.packages for layer in own) else PLAIN


# -- the pen -------------------------------------------------------------------------------------------


def drawing(width: float, height: float, boxes: Iterable[Box], edges: Iterable[Edge], title: str) -> str:
    """An SVG of these boxes and arrows."""
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' role='img'>",
        f"<title>{escape(title)}</title>",
        (
            "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' "
            f"orient='auto-start-reverse'><path d='M0,0 L8,4 L0,8 z' fill='{LINE}'/></marker></defs>"
        ),
        f"<rect width='{width:g}' height='{height:g}' fill='#ffffff'/>",
    ]
    parts += [_edge(edge) for edge in edges]
    parts += [_box(box) for box in boxes]
    return "\n".join([*parts, "</svg>", ""])


def _box(box: Box) -> str:
    lines = box.text.split("\n") if box.text else []
    top = box.y - (len(lines) * 14) / 2 + 5
    left, up = box.x - box.width / 2, box.y - box.height / 2
    return "\n".join(
        [
            (
                f"<rect x='{left:g}' y='{up:g}' width='{box.width:g}' height='{box.height:g}' rx='7' "
                f"fill='{box.fill}' stroke='{LINE}'/>"
            ),
            _text(box.x, top, box.name, 14, bold=True),
            *(_text(box.x, top + 15 + 13 * i, line, 11) for i, line in enumerate(lines)),
        ]
    )


def _edge(edge: Edge) -> str:
    parts = []
    if edge.points:
        points = " ".join(f"{x:g},{y:g}" for x, y in edge.points)
        dash = " stroke-dasharray='6 4'" if edge.dashed else ""
        parts.append(
            f"<polyline points='{points}' fill='none' stroke='{LINE}' stroke-width='1.4' "
            f"marker-end='url(#tip)'{dash}/>"
        )
    x, y = edge.at
    lines = edge.label.split("\n") if edge.label else []
    parts += [_text(x, y + 14 * i, line, 12, anchor=edge.anchor) for i, line in enumerate(lines)]
    return "\n".join(parts)


def _text(x: float, y: float, text: str, size: int, *, anchor: str = "middle", bold: bool = False) -> str:
    weight = " font-weight='bold'" if bold else ""
    return (
        f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}'{weight} fill='{INK}' "
        f"text-anchor='{anchor}'>{escape(text)}</text>"
    )


PICTURES: dict[str, Callable[[Sequence[Any], Iterable[str]], str]] = {
    "leader.svg": lambda *_: leader(),
    "member.svg": lambda *_: member(),
    "layers.svg": layers,
}
"""What there is to draw, by file name, from the table of layers and the names of all modules."""


def main() -> None:
    """Draw them all."""
    import sys

    parser = argparse.ArgumentParser(description="Draw the diagrams of lines and boxes.")
    parser.add_argument("folder", nargs="?", type=Path, default=IMAGES)
    folder = parser.parse_args().folder
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.test_layers import LAYERS, MODULES

    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(LAYERS, MODULES), encoding="utf-8")


if __name__ == "__main__":
    main()
