"""What the two state machines ask their shell to do. The shell carries actions out in order, at once.

Values only: neither machine touches a socket, a buffer or a callback.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.frames import Frame, Layer
from pdserve.errors import PdserveError
from pdserve.types import SampledToken


@dataclass(frozen=True, slots=True)
class Send:
    """Both: send a frame that has no payload."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Failed:
    """Both: the transfer has ended without success. Comes at most once, and never together with success."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class SendLayer:
    """Sender: read the frame's tokens and send them. `resend`: they had been sent before."""

    frame: Layer
    resend: bool


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Sender: send COMMIT with these tokens and the list of hashes."""

    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Sender: the receiver has everything. Blocks need not be kept any longer."""


@dataclass(frozen=True, slots=True)
class NeedBlocks:
    """Receiver: somebody must lease blocks for the expected tokens and then say so."""


@dataclass(frozen=True, slots=True)
class SenderLost:
    """Receiver: this epoch's sender is gone or gave up. What it brought is kept; somebody must decide how to go on:
    renew the ticket for another sender, or take over what there is."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class Write:
    """Receiver: store the payload that came with this frame, then call `written`."""

    frame: Layer


@dataclass(frozen=True, slots=True)
class Verify:
    """Receiver: compare the list that came with COMMIT with what is stored, then call `verified`."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """Receiver: everything is stored and verified."""

    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Receiver: no more will come. Tokens up to `token_stop` are stored in every layer; the rest is the caller's."""

    token_stop: int


SenderAction = Send | SendLayer | SendCommit | Finished | Failed
ReceiverAction = Send | NeedBlocks | Write | Verify | SenderLost | Delivered | TakenOver | Failed
