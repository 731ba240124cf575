"""What is set while torch makes a weight group is then what it was, whatever happens and whoever looks."""

from __future__ import annotations

import threading

import pytest

from dprims.synchronizer.environment import FORBEARING, forbearing


def test_what_was_set_is_set_again_and_what_was_not_is_not() -> None:
    name, *others = FORBEARING
    environ = {name: "3", "PATH": "/bin"}
    with forbearing(environ):
        assert environ == FORBEARING | {"PATH": "/bin"}
    assert environ == {name: "3", "PATH": "/bin"}
    assert not set(others) & environ.keys()


def test_it_is_put_back_when_the_group_cannot_be_made() -> None:
    environ: dict[str, str] = {}
    with pytest.raises(RuntimeError, match="no"), forbearing(environ):
        raise RuntimeError("no")
    assert environ == {}


def test_two_threads_that_make_groups_leave_nothing_behind() -> None:
    environ: dict[str, str] = {}
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with forbearing(environ):
            inside.set()
            assert leave.wait(20)

    def second() -> None:
        with forbearing(environ):
            assert environ == FORBEARING

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert inside.wait(20)
    threads.append(threading.Thread(target=second))
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert environ == {}
