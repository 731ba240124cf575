"""``dprims demo``: a refit of real weights that survives a shard which dies in the middle."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..demo import DemoResult, Step


def demo(
    weights: Annotated[str, typer.Option(help="Safetensors file; default: a small embedding model.")] = "",
    stages: Annotated[int, typer.Option(help="Trainer stages; each owns its share of the layers.")] = 2,
    shards: Annotated[int, typer.Option(help="Generation shards, one process each.")] = 3,
    steps: Annotated[int, typer.Option(help="Training steps, with a refit after each.")] = 4,
    fault: Annotated[
        str, typer.Option(help="What hits a shard in step 2: kill, stop, raise or none.")
    ] = "kill",
    fault_bucket: Annotated[
        int | None, typer.Option(help="At which bucket; default: the middle one.")
    ] = None,
    refit_timeout: Annotated[float, typer.Option(help="Deadline of a refit, in seconds.")] = 30.0,
    stall_timeout: Annotated[float, typer.Option(help="Longest time without progress, in seconds.")] = 30.0,
    roster_ttl: Annotated[
        float, typer.Option(help="Silence after which a rank counts as gone, in seconds.")
    ] = 2.0,
    bucket_bytes: Annotated[int, typer.Option(help="Size of a full bucket.")] = 4 << 20,
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL).")] = "cpu",
    backend: Annotated[
        str | None, typer.Option(help="Backend URL, for a fleet of its own; default: a store of its own.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="local (a process a rank) or ray (an actor a rank, on a Ray of its own).")
    ] = "local",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Refit real weights, lose a shard in the middle, and recover.

    Train, refit, lose a shard in the middle of it, recover, take the shard back, and compare all weights.
    Exit status 0 only when every tensor of every shard equals the trainers'.
    """
    # this process and its ranks are the demo's own: torch's warnings of killed peers are no news in them
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from ..demo import DemoConfig, default_weights, run_demo

    config = DemoConfig(
        weights=weights or default_weights(),
        stages=stages,
        shards=shards,
        steps=steps,
        fault=fault,
        fault_bucket=fault_bucket,
        refit_timeout=refit_timeout,
        stall_timeout=stall_timeout,
        roster_ttl=roster_ttl,
        bucket_bytes=bucket_bytes,
        device=device,
        backend=backend,
        engine=engine,
    )
    config.check()
    logging.getLogger("dprims").addHandler(logging.NullHandler())  # the timeline says it better
    show = _Show(json_output)
    if not json_output:
        print(f"weights  {config.weights}")
        where = f"{device}, {engine} engine" if engine != "local" else device
        print(f"fleet    {stages} trainer stages, {shards} generation shards, {where}; fault: {fault}")
    with show.progress, _silence() if engine == "ray" else nullcontext():
        result = run_demo(config, show)
    if json_output:
        print(json.dumps(result.to_json()))
    else:
        _print(result)
    if not result.agree:
        raise typer.Exit(1)


class _Show:
    """A line that says what is being done, where a person watches; table rows as they come."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._out = sys.stdout
        self.progress: Any = nullcontext()
        self._status: Any = None
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = self.progress = Console(stderr=True).status("starting")

    def __call__(self, kind: str, what: Any) -> None:
        if kind == "doing" and self._status is not None:
            self._status.update(what)
        elif kind == "step" and not self._quiet:
            if what.step == 1:
                self._print(
                    _ROW.format("step", "version", "epoch", "shards", "MB", "seconds", "GB/s", "outage")
                )
            self._print(_row(what))

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what anybody else prints: Ray tells on stdout, at length, that a worker died."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


_ROW = "{:>4}  {:>7}  {:>22}  {:>10}  {:>7}  {:>7}  {:>6}  {:>8}"


def _row(step: Step) -> str:
    return _ROW.format(
        step.step,
        step.version,
        step.epoch,
        ",".join(map(str, step.members)),
        f"{step.bytes / 1e6:.1f}",
        f"{step.seconds:.3f}",
        f"{step.gb_per_s:.2f}",
        f"{step.outage_s:.3f} s" if step.outage_s else "-",
    )


def _print(result: DemoResult) -> None:
    if result.note:
        print(f"\n{result.note}")
    if result.timeline:
        print("\nrecovery, in seconds after the fault")
        for at, what in result.timeline:
            print(f"  {at:7.3f}  {what}")
    print()
    for shard, verdict in result.verdicts.items():
        print(f"shard {shard}: {verdict}")
    whole = "every shard holds the trainers' weights" if result.agree else "the weights DIFFER"
    print(f"verdict: {whole} ({result.tensors} tensors, SHA-256 of each)")
