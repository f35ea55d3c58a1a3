"""Transports inside one process, for tests: each owns a mailbox in a shared network.

Ordered and without loss, but for peers that are closed and mailboxes that are full. Bytes are copied on send, so that
no buffer is shared that a wire would not share.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kvtransfer.transports.base import Event, Message, Part, Peer, PeerLost, fresh_buffer
from pdserve.errors import TransferError

_SCHEME = "memory://"
_MAX_QUEUED = 65_536  # messages in one mailbox
_MAX_BATCH = 64


class MemoryNetwork:
    """Where the transports of one test find each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._count = 0

    def transport(self) -> MemoryTransport:
        """A new transport with an endpoint of its own."""
        with self._lock:
            self._count += 1
            endpoint = f"{_SCHEME}{self._count}"
            mailbox = self._mailboxes[endpoint] = _Mailbox()
        return MemoryTransport(self, endpoint, mailbox)

    def deliver(self, endpoint: str, message: Message) -> bool:
        """Put a message into the mailbox of an endpoint. False: nobody there, or full."""
        with self._lock:
            mailbox = self._mailboxes.get(endpoint)
        return mailbox is not None and mailbox.put(message)

    def remove(self, endpoint: str) -> None:
        with self._lock:
            self._mailboxes.pop(endpoint, None)


class MemoryTransport:
    """A Transport. Made by MemoryNetwork.transport.

    A peer is the other's endpoint, after ">" for one connected to and "<" for one who connected to us.
    """

    def __init__(self, network: MemoryNetwork, endpoint: str, mailbox: _Mailbox) -> None:
        self._network = network
        self._endpoint = endpoint
        self._mailbox = mailbox
        self._lost: list[PeerLost] = []

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def connect(self, endpoint: str) -> Peer:
        if not endpoint.startswith(_SCHEME):
            raise TransferError(f"{endpoint!r} is not an endpoint of this transport")
        return b">" + endpoint.encode()

    def disconnect(self, peer: Peer) -> None:
        pass

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        return fresh_buffer(byte_count)

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        direction = b"<" if peer[:1] == b">" else b">"  # how we look from there
        message = Message(direction + self._endpoint.encode(), [bytes(part) for part in parts])
        if not self._network.deliver(peer[1:].decode(), message):
            self._lost.append(PeerLost(peer))

    def receive(self, timeout_s: float) -> list[Event]:
        lost, self._lost = self._lost, []
        return [*lost, *self._mailbox.take(0.0 if lost else timeout_s)]

    def wake(self) -> None:
        self._mailbox.wake()

    def close(self) -> None:
        self._network.remove(self._endpoint)


class _Mailbox:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: deque[Message] = deque()
        self._woken = False

    def put(self, message: Message) -> bool:
        with self._changed:
            if len(self._messages) >= _MAX_QUEUED:
                return False
            self._messages.append(message)
            self._changed.notify()
            return True

    def take(self, timeout_s: float) -> list[Message]:
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._woken, timeout_s)
            self._woken = False
            return [self._messages.popleft() for _ in range(min(len(self._messages), _MAX_BATCH))]

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()
