"""The thread that owns a control."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from worker.loop import ControlLoop

WAIT_S = 10.0


class Bed:
    """A running loop; `broken` is set when it was found broken."""

    def __init__(self) -> None:
        self.broken = threading.Event()
        self.loop = ControlLoop(self.broken.set)


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    made.loop.start()
    yield made
    made.loop.close()


def test_what_is_posted_from_any_thread_is_called_on_its_own_in_order(bed: Bed) -> None:
    called: list[tuple[int, int]] = []
    for number in range(100):
        bed.loop.post(lambda number=number: called.append((number, threading.get_ident())))
    owner = bed.loop.ask(threading.get_ident, WAIT_S)
    assert called == [(number, owner) for number in range(100)]
    assert owner != threading.get_ident()


def test_what_is_to_come_later_comes_on_its_thread_too(bed: Bed) -> None:
    came, who = threading.Event(), []
    bed.loop.post(lambda: bed.loop.later(0.01, lambda: (who.append(threading.get_ident()), came.set())))
    assert came.wait(WAIT_S)
    assert who == [bed.loop.ask(threading.get_ident, WAIT_S)]


@pytest.mark.parametrize("later", [False, True])
def test_a_call_that_fails_is_the_end_of_a_worker(bed: Bed, later: bool) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    bed.loop.post((lambda: bed.loop.later(0.0, fail)) if later else fail)
    assert bed.broken.wait(WAIT_S)


def test_after_its_end_nothing_is_called_any_more() -> None:
    bed = Bed()
    bed.loop.start()
    bed.loop.close()
    called = threading.Event()
    bed.loop.post(called.set)
    assert not called.is_set()
    bed.loop.close()


def test_a_task_that_is_cut_off_at_the_end_still_does_what_it_has_to() -> None:
    bed, begun, ended = Bed(), threading.Event(), threading.Event()
    bed.loop.start()

    async def stream() -> None:
        try:
            begun.set()
            await asyncio.sleep(WAIT_S)
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    tasks: list[asyncio.Task[None]] = []
    bed.loop.post(lambda: tasks.append(asyncio.get_running_loop().create_task(stream())))
    assert begun.wait(WAIT_S)
    bed.loop.close()
    assert ended.is_set()
