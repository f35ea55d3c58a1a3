"""Another way for payloads: what a carrier does, beside the transport that carries everything else.

A carrier has two ends for each sender and receiver, made for one another:

    sender: Outlet                              receiver: Inlet
        offer ---------------- transport ------------->  made from it
        on_note <------------- transport ---------------  news
        put(payload) -- descriptor, by transport ------>  take(descriptor)
              +--------------- the carrier's own way ------------+

Everything but the payload is small and goes as messages of the transport (carried.py), which may be lost, doubled and
reordered. So a descriptor that is stale or names what is not there must yield PayloadLost, never other bytes: the
protocol above asks again for what does not come.

Threads: those of the transport, see base.py. No call blocks. What an end does in threads of its own is bounded in time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from kvtransfer.transports.base import Part
from pdserve.errors import TransferError

Wake = Callable[[], None]


class PayloadLost(TransferError):
    """This payload will not come. The transfer goes on without it."""


class Outlet(Protocol):
    """The sender's end of one way."""

    def offer(self) -> bytes | None:
        """What the receiver makes its inlet from. None: not known yet; a wake follows."""
        ...

    def broken(self) -> str | None:
        """Why this way is of no use any more. Once it is broken it stays so."""
        ...

    def on_note(self, note: bytes) -> None:
        """News from the inlet, maybe old. Raises TransferError where it cannot come from there."""
        ...

    def reserve(self, byte_count: int) -> memoryview | None:
        """Room for a payload that `put` takes next, without a copy. None: put it as it is. Until then only: the next
        call of either may give the room to another."""
        ...

    def put(self, payload: Part) -> bytes | None:
        """Take over a payload, which must not change any more; its descriptor. None: not now."""
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """The receiver's end of one way."""

    def ready(self) -> bool:
        """Whether the sender may begin."""
        ...

    def broken(self) -> str | None:
        """Why this way is of no use any more, or None. May look at the world: called about once a second."""
        ...

    def take(self, descriptor: bytes) -> Future[memoryview]:
        """The payload, valid as long as somebody holds it; or PayloadLost. Done already, or later with a wake."""
        ...

    def note(self) -> bytes | None:
        """What the outlet should know, if that is new."""
        ...

    def close(self) -> None: ...


class Carrier(Protocol):
    """Makes ends. Both raise TransferError where this way is not open."""

    @property
    def name(self) -> str: ...

    def outlet(self, wake: Wake) -> Outlet: ...

    def inlet(self, offer: bytes, wake: Wake) -> Inlet: ...


def lost(reason: str) -> Future[memoryview]:
    """What `take` returns for a payload that will not come."""
    future: Future[memoryview] = Future()
    future.set_exception(PayloadLost(reason))
    return future
