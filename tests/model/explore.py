"""Breadth-first search through a World, and the proof that every state has a way on."""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from .parts import Config, Violation
from .world import World


@dataclass(frozen=True)
class Result:
    """What a search saw. ``complete``: there was nothing left to visit."""

    states: int
    edges: int
    settled: int
    complete: bool
    seconds: float


class Stuck(AssertionError):
    """A state without a fault-free way to all shards serving one version."""


def explore(
    world: World, *, limit: int | None = None, progress: Callable[[int], None] | None = None
) -> Result:
    """Visit every state, or the first ``limit``; Violation or Stuck carries the shortest way there.

    Liveness is checked after a complete search only.
    """
    began = time.process_time()
    start = world.initial()
    index = {start: 0}
    order = [start]
    parents = array("l", [-1])
    sources, targets = array("l"), array("l")
    edges = 0
    complete = True
    for here, key in enumerate(order):
        if limit is not None and len(order) > limit:
            complete = False
            break
        try:
            for _, kind, after in world.successors(key):
                edges += 1
                there = index.get(after)
                if there is None:
                    there = index[after] = len(order)
                    order.append(after)
                    parents.append(here)
                if kind == "step":
                    sources.append(here)
                    targets.append(there)
        except Violation as violation:
            raise Violation(f"{violation}\n{_path(world, order, parents, here)}") from None
        if progress and here % 10_000 == 0:
            progress(here)
    settled = [there for there, key in enumerate(order) if world.settled(key)]
    if complete:
        stuck = _stuck(len(order), sources, targets, settled)
        if stuck is not None:
            raise Stuck(f"I5: no fault-free way on\n{_path(world, order, parents, stuck)}")
    return Result(len(order), edges, len(settled), complete, time.process_time() - began)


def _stuck(count: int, sources: array[int], targets: array[int], goals: list[int]) -> int | None:
    """Return the first state from which no goal can be reached."""
    into: list[list[int]] = [[] for _ in range(count)]
    for source, target in zip(sources, targets, strict=True):
        into[target].append(source)
    good = bytearray(count)
    for goal in goals:
        good[goal] = 1
    todo = list(goals)
    while todo:
        for source in into[todo.pop()]:
            if not good[source]:
                good[source] = 1
                todo.append(source)
    return next((state for state in range(count) if not good[state]), None)


def _path(world: World, order: list[tuple[int, ...]], parents: array[int], state: int) -> str:
    keys = []
    while state >= 0:
        keys.append(order[state])
        state = parents[state]
    keys.reverse()
    lines = []
    for before, after in pairwise(keys):
        label = next(label for label, _, there in world.successors(before) if there == after)
        lines.append(f"  {len(lines) + 1:2d} {label}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", default="2,1")
    parser.add_argument("--faults", type=int, default=1)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--trainers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--wishes", type=int, default=0)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--no-split", action="store_true")
    parser.add_argument("--no-watch", action="store_true")
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    config = Config(
        shards=tuple(map(int, given.shards.split(","))),
        faults=given.faults,
        trainers=given.trainers,
        steps=given.steps,
        wishes=given.wishes,
        fresh=given.fresh,
        eager=not given.no_eager,
        split=not given.no_split,
        watch=not given.no_watch,
        **({"kinds": frozenset(given.kinds.split(","))} if given.kinds else {}),
    )
    began = time.process_time()
    print(config)
    print(
        explore(
            World(config),
            limit=given.limit,
            progress=lambda n: print(n, round(time.process_time() - began), flush=True),
        )
    )


if __name__ == "__main__":
    main()
