"""Time as an argument: what waits or expires takes a Clock, so that a test or a simulation can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. Only differences mean anything, but they compare across processes of one host."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """Stands still until it is told to advance."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"seconds: {seconds} is negative; time does not go back")
        self._now += seconds
