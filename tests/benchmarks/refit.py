"""How fast weights travel between two processes here, as ratios within one run.

    pytest -s tests/benchmarks/refit.py

The same code is behind `dprims bench refit`, which also measures GPUs.
"""

from __future__ import annotations

import statistics

import pytest

from dprims.synchronizer.plan import TensorMeta
from dprims.testing.refit_bench import Measured, bench_refit, model_metas

BUCKET = 8 << 20


def table(measured: list[Measured]) -> dict[str, Measured]:
    print()
    for one in measured:
        phases = "  ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in one.phases.items())
        print(f"{one.name:16} wire {one.gb_per_s:6.2f} GB/s  total {one.total_gb_per_s:6.2f} GB/s  {phases}")
    return {one.name: one for one in measured}


@pytest.mark.timeout(300)
def test_a_thousand_tensors_over_gloo() -> None:
    """256 MB in 1,024 tensors: near flat broadcasts of the same bytes, and far from one a tensor."""
    found = table(
        bench_refit(
            model_metas("kb256"),
            contestants=("flat", "per tensor", "async buckets", "cat", "dprims", "dprims verified"),
            bucket_bytes=BUCKET,
            rounds=9,
        )
    )
    ours = found["dprims verified"].gb_per_s
    assert ours >= 0.6 * found["flat"].gb_per_s
    assert ours >= 2.3 * found["per tensor"].gb_per_s


@pytest.mark.timeout(300)
def test_the_guard_costs_little() -> None:
    """64 MB in 16 buckets, each wait under a guard, against plain waits."""
    metas = [TensorMeta(f"w{i}", (1 << 20,), "float32") for i in range(16)]
    found = table(bench_refit(metas, contestants=("flat", "flat guarded"), bucket_bytes=4 << 20, rounds=41))
    plain, guarded = (statistics.median(found[name].total_s) for name in ("flat", "flat guarded"))
    assert guarded <= 1.03 * plain


@pytest.mark.timeout(600)
def test_time_grows_with_bytes_and_not_with_tensors() -> None:
    """64 MB in 16 and in 4,096 tensors."""
    seconds = {}
    for count in (16, 4096):
        metas = [TensorMeta(f"w{i}", ((32 << 20) // count,), "bfloat16") for i in range(count)]
        found = table(bench_refit(metas, contestants=("dprims verified",), bucket_bytes=BUCKET, rounds=9))
        seconds[count] = statistics.median(found["dprims verified"].total_s)
    assert seconds[4096] <= 3 * seconds[16]
