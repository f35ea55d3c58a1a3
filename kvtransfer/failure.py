"""How the error that ends a transfer leaves the link: to a callback as it is, to the other side as an ABORT, and what
that means there.
"""

from __future__ import annotations

from kvtransfer.frames import Abort
from pdserve.errors import PdserveError, TransferError, error_from_code

_MESSAGE_CHARS = 250  # at most four bytes each: fits ABORT's limit

# Errors that mean the same on both sides. Any other only tells this side that the transfer did not work out: who wants
# the request no more, as a worker that has lost its router, does not speak for the request.
_SHARED_CODES = frozenset({"FAILED_PRECONDITION", "DATA_LOSS"})


def without_frames(error: PdserveError) -> PdserveError:
    """An error that was raised, for others to keep. Its traceback and those of what led to it hold all the frames on
    the way, and so the memory of whatever payload was at hand: an arena shared with another process would stay for as
    long as somebody remembers why a transfer failed."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def abort_frame(transfer: bytes, epoch: int, error: PdserveError) -> Abort:
    message = error.message.encode("utf-8", "replace").decode()
    return Abort(transfer, epoch, error.code, message[:_MESSAGE_CHARS])


def abort_error(frame: Abort) -> PdserveError:
    """What the side that received `frame` ends with."""
    if frame.code in _SHARED_CODES:
        return error_from_code(frame.code, frame.message)
    return TransferError(f"the other side gave up: {frame.code}: {frame.message}")
