"""What happened in a run, in lines that a person can read: virtual time, process, what. Off, it costs nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from bench.simulation.timeline import Event
from pdserve.clock import Clock, ManualClock

_PRODUCT = logging.getLogger("pdserve")


class EventLog:
    """Keeps lines if it is on. `clock` is the run's."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.clock: Clock = ManualClock()
        self.lines: list[str] = []

    def event(self, event: Event) -> None:
        if self.on:
            self.write(event.process.name if event.process else "world", event.label)

    def write(self, who: str, what: str) -> None:
        if self.on:
            self.lines.append(f"{self.clock.now():10.6f} {who:14} {what}")

    @contextmanager
    def product(self) -> Iterator[None]:
        """Take what the product logs into this log; where it is off, let the product log nothing."""
        handler = _Lines(self)
        level, propagate = _PRODUCT.level, _PRODUCT.propagate
        _PRODUCT.setLevel(logging.DEBUG if self.on else logging.CRITICAL + 1)
        _PRODUCT.propagate = False
        _PRODUCT.addHandler(handler)
        try:
            yield
        finally:
            _PRODUCT.removeHandler(handler)
            _PRODUCT.setLevel(level)
            _PRODUCT.propagate = propagate


class _Lines(logging.Handler):
    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        self._log.write("", f"  {record.name.removeprefix('pdserve.')}: {record.getMessage()} {fields}")
