"""The threads of a simulated worker: which of them has its turn. Each turn is an event, or lies within another's."""

from __future__ import annotations

from collections.abc import Callable

from simulation.oracle import Violation
from simulation.timeline import Process

_WAKE_S = 0.0001  # how long a thread takes to wake up

Call = Callable[[], None]


class WorkerThreads:
    """`worker.ports.Turns` for a control, and the names of the other threads. `current`: who has its turn, if any."""

    def __init__(self, process: Process) -> None:
        self.current = ""
        self._process = process

    # The control's thread.

    def post(self, call: Call) -> None:
        """As from any thread: it happens later, in a turn of the control's own."""
        self._process.after(_WAKE_S, "control", lambda: self.control_turn(call))

    def later(self, delay_s: float, call: Call) -> None:
        self._process.after(delay_s, "timer", lambda: self.control_turn(call))

    def control_turn(self, call: Call) -> None:
        if self.current:
            raise Violation(f"{self._process.name}: the control was entered in a turn of the thread {self.current!r}")
        self.turn("control", call)

    def check_control(self) -> None:
        """Who touches what the control owns must have its turn."""
        if self.current != "control":
            thread = self.current or "nobody's"
            raise Violation(f"{self._process.name}: the control's state was touched by another thread: {thread}")

    # The others.

    def turn(self, thread: str, call: Call) -> None:
        """The link's turns may lie within a step of the engine: it does not wait for its end."""
        before, self.current = self.current, thread
        try:
            call()
        finally:
            self.current = before
