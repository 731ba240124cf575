from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dprims import LayoutError, PeerLost
from dprims.testing.ranks import RankTraceback, run_ranks

LIMIT_S = 30.0


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__(lambda: None)


def add_ranks(rank: int, world_size: int, bonus: int) -> tuple[int, float]:
    total = torch.tensor([float(rank + bonus)])
    dist.all_reduce(total)
    return os.getpid(), total.item()


def fail_on_rank_two(rank: int, world_size: int) -> None:
    if rank == 2:
        raise LayoutError("rank two objects")
    dist.barrier()


def raise_unpicklable(rank: int, world_size: int) -> None:
    raise Unpicklable


def return_a_lambda(rank: int, world_size: int) -> object:
    return lambda: None


def kill_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_nobody(rank: int, world_size: int, path: str) -> None:
    with open(f"{path}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    if rank == 1:
        dist.barrier()  # rank 0 never comes


def leave_early(rank: int, world_size: int) -> float:
    if rank == 0:
        return 0.0
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=dist.new_group([1, 2], use_local_synchronization=True))
    return value.item()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_rank_order_from_real_processes() -> None:
    results = run_ranks(3, add_ranks, 10, timeout=LIMIT_S)
    assert [total for _, total in results] == [33.0] * 3
    assert len({pid for pid, _ in results} | {os.getpid()}) == 4


def test_the_first_failure_is_raised_with_its_rank_and_ends_the_others() -> None:
    with pytest.raises(LayoutError, match="rank two objects") as caught:
        run_ranks(3, fail_on_rank_two, timeout=LIMIT_S)
    cause = caught.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert cause.rank == 2
    assert "fail_on_rank_two" in str(cause)


def test_what_cannot_travel_is_told_in_words() -> None:
    with pytest.raises(RuntimeError, match="Unpicklable"):
        run_ranks(1, raise_unpicklable, timeout=LIMIT_S)
    with pytest.raises(Exception, match="lambda"):
        run_ranks(1, return_a_lambda, timeout=LIMIT_S)


def test_a_killed_rank_is_lost() -> None:
    with pytest.raises(PeerLost, match="rank 1 ended with exit code -9"):
        run_ranks(2, kill_rank_one, timeout=LIMIT_S)


def test_a_hang_ends_at_the_limit_with_every_process_killed(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"of 2 ranks these had not returned after 4 s: 1"):
        run_ranks(2, wait_for_nobody, str(tmp_path), timeout=4.0)
    assert time.monotonic() - start < LIMIT_S
    assert [is_running(int(path.read_text())) for path in sorted(tmp_path.iterdir())] == [False, False]


def test_a_rank_that_returns_early_does_not_break_the_others() -> None:
    assert run_ranks(3, leave_early, timeout=LIMIT_S) == [0.0, 3.0, 3.0]


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="n=0"):
        run_ranks(0, add_ranks, 1)
