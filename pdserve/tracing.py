"""A trace: what happened when, on this host's monotonic clock, kept in a ring in memory.

Times of two processes on one host compare. Recording is one append; reading copies.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TraceEvent:
    time_ns: int
    name: str
    fields: dict[str, Any]


class Trace:
    """A bounded ring of events. Append and copy are safe from any thread (a deque's are atomic)."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._events: deque[TraceEvent] = deque(maxlen=capacity)

    def record(self, name: str, **fields: Any) -> None:
        self._events.append(TraceEvent(time.monotonic_ns(), name, fields))

    def events(self, since_ns: int = 0) -> list[TraceEvent]:
        """What is kept, from `since_ns` on (the clock of time.monotonic_ns)."""
        return [event for event in list(self._events) if event.time_ns >= since_ns]
