"""Where frames leave: encodes them, hands them to the transport and counts. Knows no transfer."""

from __future__ import annotations

from kvtransfer.frames import Frame, Part, encode
from kvtransfer.stats import LinkStats
from kvtransfer.transports.base import Peer, Transport


class FramePort:
    """Used by the link's thread only."""

    def __init__(self, transport: Transport, stats: LinkStats, checked: bool) -> None:
        self._transport = transport
        self._checked = checked
        self._stats = stats

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        """Where to write the payload that is sent next, so that it needs no copy."""
        return self._transport.buffer(peer, byte_count)

    def send(self, peer: Peer, frame: Frame, payload: Part | None = None) -> None:
        parts = encode(frame, payload, checked=self._checked)
        self._transport.send(peer, parts)
        self._stats.frames_sent += 1
        self._stats.bytes_sent += sum(len(part) for part in parts[1:])
