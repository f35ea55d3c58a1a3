"""Virtual time: a clock, the events to come in order, and the processes they happen to.

A process may be dead (its events never happen) or frozen (they wait, in order, until it resumes). Nothing here knows
what an event does. Equal times happen in the order in which they were planned, so a run is a function of its seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Event:
    """`process` is who it happens to, `label` what a log calls it, `detail` what it brings, for a log to describe."""

    process: Process | None
    label: str
    call: Call
    detail: object = None


class Timeline:
    """A Clock that jumps from one event to the next."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._planned = 0

    def now(self) -> float:
        return self._now

    def at(self, time_s: float, label: str, call: Call, process: Process | None = None, detail: object = None) -> None:
        self._planned += 1
        heapq.heappush(self._events, (max(time_s, self._now), self._planned, Event(process, label, call, detail)))

    def after(self, delay_s: float, label: str, call: Call, process: Process | None = None) -> None:
        self.at(self._now + delay_s, label, call, process)

    def next_event(self) -> Event | None:
        """Advance to the next event that can happen now, and take it; None if there is none."""
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            if event.process is None or event.process.takes(event):
                return event
        return None


class Process:
    """What can crash, freeze and resume. `host` names its place in the network, `name` this start of it. `check` is
    called after every event of it with the event's label."""

    def __init__(self, timeline: Timeline, host: str, name: str) -> None:
        self.timeline = timeline
        self.host = host
        self.name = name
        self.alive = True
        self.frozen = False
        self.resumed_at = 0.0
        self.check: Callable[[str], None] = lambda label: None
        self.wires: list[Any] = []  # its open connections
        self._held: list[Event] = []

    def takes(self, event: Event) -> bool:
        """Whether an event that is due happens now."""
        if self.alive and self.frozen:
            self._held.append(event)
        return self.alive and not self.frozen

    def at(self, time_s: float, label: str, call: Call, detail: object = None) -> None:
        self.timeline.at(time_s, label, call, self, detail)

    def after(self, delay_s: float, label: str, call: Call, detail: object = None) -> None:
        self.timeline.at(self.timeline.now() + delay_s, label, call, self, detail)

    def freeze(self) -> None:
        """As SIGSTOP."""
        self.frozen = True

    def resume(self) -> None:
        """As SIGCONT: everything that came meanwhile happens now."""
        self.frozen = False
        self.resumed_at = self.timeline.now()
        held, self._held = self._held, []
        for event in held:
            self.at(self.timeline.now(), event.label, event.call, event.detail)

    def kill(self) -> None:
        """As SIGKILL."""
        self.alive = False
        self._held.clear()
