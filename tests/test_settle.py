"""Letting every rank unwind before a failure reaches the caller."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from dprims.synchronizer.settle import _settle_before_propagating, as_future


def done(error: Exception | None = None) -> Future[int]:
    future: Future[int] = Future()
    if error is None:
        future.set_result(1)
    else:
        future.set_exception(error)
    return future


def test_nothing_to_wait_for_takes_no_time() -> None:
    assert _settle_before_propagating([], 1000.0, "train") == []


def test_all_are_waited_for_and_what_they_raise_is_swallowed() -> None:
    late: Future[int] = Future()
    threading.Timer(0.05, late.set_exception, (RuntimeError("the same failure, seen from here"),)).start()
    assert _settle_before_propagating([done(), done(ValueError("x")), late], 30.0, "train") == []
    assert late.done()


def test_it_returns_as_soon_as_the_last_one_is_done() -> None:
    late: Future[int] = Future()
    threading.Timer(0.05, late.set_result, (1,)).start()
    began = time.monotonic()
    _settle_before_propagating([late], 60.0, "train")
    assert time.monotonic() - began < 30.0


def test_who_is_stuck_is_returned_and_logged_when_the_budget_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck: Future[int] = Future()
    assert _settle_before_propagating([done(), stuck, done()], 0.05, "generation") == [1]
    assert "1 of 3 generation rank(s) had not unwound" in caplog.text


def test_a_budget_that_is_over_already_still_looks() -> None:
    assert _settle_before_propagating([done(), Future()], -5.0, "train") == [1]


class Handle:
    """As Ray's ObjectRef: a future on request."""

    def future(self) -> Future[int]:
        return done()


def test_futures_of_other_kinds_are_adapted_and_anything_else_is_named() -> None:
    assert as_future(Handle()).result() == 1
    future = done()
    assert as_future(future) is future
    with pytest.raises(TypeError, match="returned a int; expected a Future"):
        as_future(3)
