"""Faults on a worker's KV wire that can be switched on and off while it runs. For a worker under test.

Nothing here happens unless a worker is started with a file for it (sabotage.py). While that file is there, the rules in
it strike what the worker sends (see kvtransfer.transports.faulty for what they mean):

    {"seed": 3, "rules": [{"fault": "drop", "frame": "layer", "rate": 0.1}, {"fault": "delay", "seconds": 0.2}]}

Counting begins anew whenever the file changes. What was struck is logged as "wire fault".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvtransfer import frames
from kvtransfer.transports.base import Event, Part, Peer, Transport
from kvtransfer.transports.faulty import Fault, FaultRule, FaultyTransport
from pdserve import logs
from pdserve.clock import Clock

_FRAMES: Final = {
    name.__name__.lower(): name
    for name in (frames.Open, frames.Layer, frames.Commit, frames.Ack, frames.Nack, frames.Credit, frames.Ping)
}

_log = logs.logger("kv")


class SwitchedFaults:
    """A Transport round `inner` that misbehaves as long as the file tells it to."""

    def __init__(self, inner: Transport, file: Path, clock: Clock) -> None:
        self._inner = inner
        self._file = file
        self._clock = clock
        self._version = 0
        self._faulty = FaultyTransport(inner, (), 0, clock)

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    def connect(self, endpoint: str) -> Peer:
        return self._inner.connect(endpoint)

    def disconnect(self, peer: Peer) -> None:
        self._faulty.disconnect(peer)

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        return self._faulty.buffer(peer, byte_count)

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        self._look()
        before = self._faulty.injected.copy()
        self._faulty.send(peer, parts)
        for fault in self._faulty.injected - before:
            _log.warning("wire fault", fault=fault.value)

    def receive(self, timeout_s: float) -> list[Event]:
        return self._faulty.receive(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._faulty.close()

    def _look(self) -> None:
        """Follow the file. What the former rules held back is lost, as on a wire."""
        try:
            version = self._file.stat().st_mtime_ns
            content = self._file.read_text() if version != self._version else ""
        except FileNotFoundError:
            version, content = 0, ""
        if version == self._version:
            return
        self._version = version
        seed, rules = parse_faults(content) if content else (0, ())
        self._faulty = FaultyTransport(self._inner, rules, seed, self._clock)


def parse_faults(text: str) -> tuple[int, tuple[FaultRule, ...]]:
    """The seed and the rules of such a file. Raises ValueError for what is none."""
    document = json.loads(text)
    return int(document["seed"]), tuple(_rule(**rule) for rule in document["rules"])


def _rule(fault: str, frame: str | None = None, **numbers: Any) -> FaultRule:
    return FaultRule(Fault(fault), None if frame is None else _FRAMES[frame], **numbers)
