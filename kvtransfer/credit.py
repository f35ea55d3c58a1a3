"""Flow control: how many payload bytes may be on their way.

Both sides count one stream of bytes, from 0, for a (transfer, epoch):

    0            consumed            spent              granted
    |---------------|------------------|-------------------|
     stored or lost   on their way       may be sent

    granted - consumed <= window

Every number on the wire is a cumulative total, and each side keeps the highest it has seen, so a frame that is
doubled, late or lost mints nothing. `spent` travels with every LAYER and PING: a frame that was lost is consumed as
soon as a later one arrives, so losses do not eat up the window.
"""

from __future__ import annotations

from pdserve.errors import InternalError, ProtocolError


class CreditSpender:
    """The sender's side: spends what it was granted."""

    __slots__ = ("_granted", "_spent")

    def __init__(self) -> None:
        self._granted = 0
        self._spent = 0

    @property
    def granted(self) -> int:
        return self._granted

    @property
    def spent(self) -> int:
        return self._spent

    @property
    def available(self) -> int:
        return self._granted - self._spent

    def grant(self, total: int) -> None:
        """The receiver granted `total` bytes so far. An older total changes nothing."""
        self._granted = max(self._granted, total)

    def spend(self, byte_count: int) -> int:
        """Use `byte_count` of what is available. Returns the new total spent."""
        if byte_count > self.available:
            raise InternalError(f"{byte_count} bytes spent of {self.available} available")
        self._spent += byte_count
        return self._spent


class CreditGranter:
    """The receiver's side: keeps a window open ahead of what it has consumed.

    A new total is due once it would grant `step_bytes` more than the last one, so that not every frame is answered.
    The step leaves room for one frame in the window, so a sender that waits for one frame's credit gets it.
    """

    __slots__ = ("_consumed", "_granted", "_step_bytes", "_window_bytes")

    def __init__(self, window_bytes: int, max_frame_bytes: int) -> None:
        if not 0 < max_frame_bytes <= window_bytes:
            raise ValueError(f"frames of {max_frame_bytes} bytes do not fit a window of {window_bytes}")
        self._window_bytes = window_bytes
        self._step_bytes = max(1, min(window_bytes // 2, window_bytes - max_frame_bytes))
        self._consumed = 0
        self._granted = 0

    @property
    def granted(self) -> int:
        return self._granted

    @property
    def consumed(self) -> int:
        return self._consumed

    def consume(self, spent: int) -> None:
        """Everything up to the sender's total `spent` was stored or lost. Raises ProtocolError beyond the grant."""
        if spent > self._granted:
            raise ProtocolError(f"the sender spent {spent} bytes of credit, but {self._granted} were granted")
        self._consumed = max(self._consumed, spent)

    def due(self) -> bool:
        """Whether a new total is worth a frame."""
        return self._consumed + self._window_bytes - self._granted >= self._step_bytes

    def grant(self) -> int:
        """Open the window up to its full width. Returns the total to send."""
        self._granted = self._consumed + self._window_bytes
        return self._granted
