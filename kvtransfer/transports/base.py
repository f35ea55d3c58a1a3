"""What a transport does: carry messages of a few parts between peers, and nothing else.

A transport keeps a message whole and keeps the order of messages to one peer. It may lose messages (a peer that went
away, a queue that is full) and says so where it knows; the protocol above repairs losses. It knows no frame, no
transfer and no credit.

Threads: one thread at a time calls connect, disconnect, send, receive and close. `wake` and `endpoint` are safe from
any thread, also after close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Part = bytes | memoryview
Peer = bytes  # opaque: who a message goes to or came from, as this transport names them


@dataclass(frozen=True, slots=True)
class Message:
    """A message that came. The parts stay valid as long as somebody holds them."""

    peer: Peer
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Messages to this peer were dropped: it is not reachable now, or does not take what is sent."""

    peer: Peer


Event = Message | PeerLost


class Transport(Protocol):
    @property
    def endpoint(self) -> str:
        """Where others connect to."""
        ...

    def connect(self, endpoint: str) -> Peer:
        """The peer behind an endpoint. Returns at once; messages wait until the connection stands.

        Connecting twice gives the same peer. Messages that come from an endpoint connected to carry this peer;
        it never equals the name of one who connected to us. Raises TransferError for a malformed endpoint.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer made by `connect`, and what waits for it. Does nothing for any other."""
        ...

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        """Where to write a payload that `send` then takes to this peer without a copy, where the transport has such a
        place; else fresh memory. It may be left unsent, and is only to be used until the next call of either."""
        ...

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        """Pass a message on without blocking. The parts must not change any more; they may be read after the return.

        What cannot be sent now waits in a bounded outbox. A message that has to be dropped is reported by `receive`
        as PeerLost, never as an exception.
        """
        ...

    def receive(self, timeout_s: float) -> list[Event]:
        """Wait for events for at most `timeout_s`, and take a bounded number of them. Empty after `wake`."""
        ...

    def wake(self) -> None:
        """Make the current or the next `receive` return."""
        ...

    def close(self) -> None:
        """Drop what is queued and give everything back, within a second. Does nothing after the first call."""
        ...


def fresh_buffer(byte_count: int) -> memoryview:
    """Memory of its own, with whatever is in it."""
    return np.empty(byte_count, np.uint8).data
