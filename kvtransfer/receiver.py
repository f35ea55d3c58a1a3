"""The receiving side of one transfer, as a table: events in, actions out. One epoch has one sender.

              OPEN                    blocks_leased                COMMIT, all verified
    EXPECTED -------> WAITING_BLOCKS ---------------> RECEIVING -----------------------> COMPLETE
       ^  |                 |                          |  ^  |
       |  |                 |                          |  +--+  COMMIT, something missing or wrong: NACK
       |  +-----------------+------------+-------------+
       |                                 | ABORT, GONE, silence beyond the ttl, a breach of protocol, sender_lost
       |            renew                v              take_over
       +---------------------------- SENDERLESS ---------------------> TAKEN_OVER

    each of the first four --> FAILED: abort, an OPEN that does not fit, the deadline, KV beyond repair, an error that
    another sender would not cure, SENDERLESS beyond the ttl

`renew` begins the next epoch: what was stored stays, the new sender is told (HAVE) and sends only the rest, and its
COMMIT verifies all of it. That is right because equal fingerprints give equal bits; where they differ, the COMMIT's
list does not match and everything is sent again.

The sender of a later epoch has to OPEN within the ttl where blocks wait for it, or is lost too: it may be queued behind
prompts whose own receivers wait for these blocks.

No credit is granted before blocks are leased, so nothing can arrive that has no place. Any frame of the right epoch
renews the ticket. A complete transfer answers probes with ACK, a failed or taken over one with ABORT, as the first
answer may have been lost; for that the shell keeps the machine a while after its end.

Knows no socket, thread, clock, block or byte of KV. Time comes in as an argument. A frame of another epoch, or one
that its state does not allow, is counted in `refused` and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from kvtransfer.actions import Delivered, Failed, NeedBlocks, ReceiverAction, Send, SenderLost, TakenOver, Verify, Write
from kvtransfer.credit import CreditGranter
from kvtransfer.failure import abort_error, abort_frame, without_frames
from kvtransfer.fields import MAX_RANGES
from kvtransfer.frames import (
    MAX_PAYLOAD_BYTES,
    Abort,
    Ack,
    Commit,
    Credit,
    Frame,
    Gone,
    Have,
    Layer,
    Nack,
    Open,
    Ping,
)
from kvtransfer.integrity import block_range, list_bytes
from kvtransfer.ranges import RangeSet
from kvtransfer.timing import Silence, Timing
from pdserve.config import TransferConfig
from pdserve.errors import DataLoss, FailedPrecondition, PdserveError, ProtocolError, TransferError
from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken

MAX_REPAIR_ROUNDS = 8  # of COMMITs whose list does not match what is stored
MAX_BAD_PAYLOADS = 16  # with no good LAYER between them
MAX_FRUITLESS_ROUNDS = 16  # of COMMITs with something missing and nothing new since the one before


class ReceiverState(StrEnum):
    EXPECTED = "expected"  # the ticket is out
    WAITING_BLOCKS = "waiting for blocks"
    RECEIVING = "receiving"
    SENDERLESS = "without a sender"
    COMPLETE = "complete"
    TAKEN_OVER = "taken over"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the OPEN of a ticket's holder must say."""

    transfer: bytes
    epoch: int
    layout: KVFormat
    model: bytes
    prompt_hash: bytes
    token_start: int
    token_stop: int

    def mismatch(self, offer: Open) -> str | None:
        """The first difference, with both values, or None."""
        for name in ("layout", "model", "prompt_hash", "token_start", "token_stop"):
            offered, expected = getattr(offer, name), getattr(self, name)
            if offered != expected:
                return f"{name}: the sender has {offered!r}, the receiver {expected!r}"
        return None


class Receiver:
    """One transfer's receiver."""

    def __init__(self, expected: Expectation, config: TransferConfig, timing: Timing, now: float) -> None:
        self.state = ReceiverState.EXPECTED
        self.credit = CreditGranter(config.window_bytes, config.max_frame_bytes)
        self.refused = 0
        self.offer: Open | None = None  # the OPEN that was accepted
        self._expected = expected
        self._first_epoch = expected.epoch
        self._config = config
        self._blocks_wanted = False
        self._blocks_there = False
        self._timing = timing
        self._ends_at = now + timing.deadline_s
        self._begins_by = math.inf
        self._silence = Silence(now)
        self._covered = [RangeSet() for _ in range(expected.layout.layer_count)]
        self._doubted = [RangeSet() for _ in self._covered]  # of these, what only this sender's COMMIT can mend
        self._tokens: tuple[SampledToken, ...] = ()
        self._repair_rounds = 0
        self._bad_payloads = 0
        self._fruitless_rounds = 0
        self._error: PdserveError | None = None

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def epoch(self) -> int:
        return self._expected.epoch

    def next_deadline(self) -> float:
        """When `tick` has something to do at the latest; infinity once the transfer has ended."""
        if self.ended:
            return math.inf
        return min(self._ends_at, self._silence.lasts_until(self._timing.ttl_s), self._begins_by)

    def on_frame(self, frame: Frame, now: float) -> list[ReceiverAction]:
        """A frame whose payload, if it has one, is good. The shell keeps that at hand for Write and Verify."""
        if frame.epoch != self.epoch:
            self.refused += 1
            return self._stale(frame)
        self._silence.end(now)
        handler = _ON_FRAME[self.state].get(type(frame))
        if handler is None or (isinstance(frame, Ping) and frame.reply):
            self.refused += 1
            return []
        return self._guarded(handler, frame)

    def bad_payload(self, frame: Layer | Commit, now: float) -> list[ReceiverAction]:
        """A frame came whose header is good and whose payload is not: ask for it again. Of a LAYER this is the
        other answer to Write, which may have overwritten what lay there."""
        if frame.epoch != self.epoch or self.state is not ReceiverState.RECEIVING:
            self.refused += 1
            return []
        self._silence.end(now)
        return self._guarded(Receiver._ask_again, frame)

    def blocks_leased(self, now: float) -> list[ReceiverAction]:
        """Every expected token has a place: let the sender begin, if there is one."""
        if self.ended or not self._blocks_wanted or self._blocks_there:
            return []
        self._blocks_there = True
        if self.state is ReceiverState.EXPECTED:
            self._begins_by = now + self._timing.ttl_s
        return self._let_begin() if self.state is ReceiverState.WAITING_BLOCKS else []

    def sender_lost(self, epoch: int, error: PdserveError, now: float) -> list[ReceiverAction]:
        """Somebody else knows that this epoch's sender is gone. News of an older epoch is no news."""
        return self._lose_sender(error, now) if epoch == self.epoch else []

    def renew(self, now: float) -> list[ReceiverAction]:
        """Begin the next epoch, for another sender. Only when SENDERLESS."""
        if self.state is not ReceiverState.SENDERLESS:
            return []
        self._expected = replace(self._expected, epoch=self.epoch + 1)
        self.credit = CreditGranter(self._config.window_bytes, self._config.max_frame_bytes)
        self.state = ReceiverState.EXPECTED
        if self._blocks_there:
            self._begins_by = now + self._timing.ttl_s
        self._silence.end(now)
        self._bad_payloads = 0
        self._fruitless_rounds = 0
        return []

    def take_over(self, now: float) -> list[ReceiverAction]:
        """Want no more: what is stored in every layer is the caller's, who computes the rest."""
        if self.ended:
            return []
        self._drop_doubted()
        self.state = ReceiverState.TAKEN_OVER
        self._error = TransferError("the receiver computes the rest itself")
        start = self._expected.token_start
        firsts_missing = (self._missing(layer)[:1] for layer in range(len(self._covered)))
        stop = min((gap[0][0] for gap in firsts_missing if gap), default=self._expected.token_stop)
        farewell = Send(abort_frame(self._expected.transfer, self.epoch, self._error))
        return [TakenOver(max(start, stop)), farewell]

    def written(self, frame: Layer, now: float, kept: bool = True) -> list[ReceiverAction]:
        """What Write asked for is stored. Not `kept`: reading it back gave something else. COMMIT's list names such
        blocks, and they are written again; without a COMMIT of this sender they do not count."""
        if self.state is not ReceiverState.RECEIVING:
            return []
        self._covered[frame.layer].add(frame.token_start, frame.token_stop)
        doubted = self._doubted[frame.layer]
        (doubted.discard if kept else doubted.add)(frame.token_start, frame.token_stop)
        self._fruitless_rounds = 0
        self._bad_payloads = 0
        return self._consume(frame.spent)

    def verified(self, mismatches: Sequence[tuple[int, int]], now: float) -> list[ReceiverAction]:
        """The outcome of Verify: the (layer, block)s that differ, blocks counted from the transfer's first."""
        if self.state is not ReceiverState.RECEIVING or self.offer is None:
            return []
        if not mismatches:
            self.state = ReceiverState.COMPLETE
            return [Delivered(self._tokens), Send(self._ack())]
        self._repair_rounds += 1
        if self._repair_rounds > MAX_REPAIR_ROUNDS:
            layer, block = mismatches[0]
            return self._fail(DataLoss(f"block {block} of layer {layer} differs after {MAX_REPAIR_ROUNDS} repairs"))
        for layer, block in mismatches:
            self._covered[layer].discard(*block_range(self.offer, block))
        return [self._nack_missing()]

    def abort(self, error: PdserveError, now: float) -> list[ReceiverAction]:
        """Give up for a reason of this side's."""
        return [] if self.ended else self._fail(error)

    def excuse(self, seconds: float) -> None:
        """This side did not listen for so long: that is no silence of the sender's. The deadline stays."""
        self._silence.excuse(seconds)
        self._begins_by += seconds

    def tick(self, now: float) -> list[ReceiverAction]:
        """Let time pass: what is overdue fails."""
        if self.ended:
            return []
        if now >= self._ends_at:
            return self._fail(TransferError(f"not done in {self._timing.deadline_s:g} s, still {self.state}"))
        if now >= self._silence.lasts_until(self._timing.ttl_s):
            return self._lose_sender(self._too_silent(), now)
        if now >= self._begins_by:
            idle = f"blocks have waited {self._timing.ttl_s:g} s for the next sender, which is still queued"
            return self._lose_sender(TransferError(idle), now)
        return []

    # Handlers of the table below.

    def _opened(self, offer: Open) -> list[ReceiverAction]:
        problem = self._expected.mismatch(offer) or self._unfit(offer)
        if problem is not None:
            return self._fail(FailedPrecondition(problem))
        self.offer = offer
        self._begins_by = math.inf
        self.state = ReceiverState.WAITING_BLOCKS
        if self._blocks_there:
            return [self._pong(), *self._let_begin()]
        if self._blocks_wanted:
            return [self._pong()]
        self._blocks_wanted = True
        return [self._pong(), NeedBlocks()]

    def _let_begin(self) -> list[ReceiverAction]:
        self.state = ReceiverState.RECEIVING
        return [*self._have(), self._grant()]

    def _unfit(self, offer: Open) -> str | None:
        smallest = offer.layout.payload_bytes(1)
        if not smallest <= offer.max_frame_bytes <= self._config.max_frame_bytes:
            return (
                f"max_frame_bytes: the sender has {offer.max_frame_bytes}, "
                f"the receiver takes {smallest} to {self._config.max_frame_bytes}"
            )
        if self.offer is not None and offer.block_tokens != self.offer.block_tokens:
            return f"block_tokens: this sender has {offer.block_tokens}, an earlier one {self.offer.block_tokens}"
        if list_bytes(offer) > MAX_PAYLOAD_BYTES:
            return f"block_tokens: {offer.block_tokens} makes a list of {list_bytes(offer)} bytes"
        return None

    def _waiting(self, frame: Open | Ping) -> list[ReceiverAction]:
        return [self._pong()]

    def _probed(self, frame: Ping) -> list[ReceiverAction]:
        """The credit goes with the answer: the last CREDIT may have been lost."""
        self.credit.consume(frame.spent)
        return [self._pong(), self._grant()]

    def _reopened(self, offer: Open) -> list[ReceiverAction]:
        return [*self._have(), self._grant()]

    def _layer(self, frame: Layer) -> list[ReceiverAction]:
        self._check_place(frame)
        if self._covered[frame.layer].covers(frame.token_start, frame.token_stop):
            return self._consume(frame.spent)
        if frame.spent > self.credit.granted:
            raise ProtocolError(f"{frame.spent} bytes of credit spent, {self.credit.granted} granted")
        return [Write(frame)]

    def _ask_again(self, frame: Layer | Commit) -> list[ReceiverAction]:
        if isinstance(frame, Layer):  # first of all: its place has been written over
            self._check_place(frame)
            self._covered[frame.layer].discard(frame.token_start, frame.token_stop)
        self._bad_payloads += 1
        if self._bad_payloads > MAX_BAD_PAYLOADS:
            raise TransferError(f"{self._bad_payloads} payloads in a row were corrupt")
        if isinstance(frame, Commit):
            return [self._nack(())]
        actions = self._consume(frame.spent)
        return [self._nack(((frame.layer, frame.token_start, frame.token_stop),)), *actions]

    def _commit(self, frame: Commit) -> list[ReceiverAction]:
        assert self.offer is not None
        if frame.payload_bytes != list_bytes(self.offer):
            raise ProtocolError(f"a list of {frame.payload_bytes} bytes instead of {list_bytes(self.offer)}")
        if any(self._missing(layer) for layer in range(len(self._covered))):
            self._fruitless_rounds += 1
            if self._fruitless_rounds > MAX_FRUITLESS_ROUNDS:
                raise TransferError(f"{MAX_FRUITLESS_ROUNDS} times what was missing was asked for, and did not come")
            return [self._nack_missing()]
        self._tokens = frame.tokens
        return [Verify()]

    def _acknowledge_again(self, frame: Frame) -> list[ReceiverAction]:
        return [Send(self._ack())]

    def _abort_again(self, frame: Frame) -> list[ReceiverAction]:
        assert self._error is not None
        return [Send(abort_frame(frame.transfer, frame.epoch, self._error))]

    def _aborted(self, frame: Abort) -> list[ReceiverAction]:
        return self._lose_sender(abort_error(frame), self._silence.since)

    def _gone(self, frame: Gone) -> list[ReceiverAction]:
        return self._lose_sender(TransferError("the sender no longer has the transfer"), self._silence.since)

    def _lose_sender(self, error: PdserveError, now: float) -> list[ReceiverAction]:
        """Whether the transfer can go on without this sender is not for the table to know; whether it may, is."""
        if self.ended:
            return []
        if self.state is ReceiverState.SENDERLESS or not error.retryable:
            return self._end(error)
        self._drop_doubted()
        self._begins_by = math.inf
        self.state = ReceiverState.SENDERLESS
        self._silence.end(now)
        return [SenderLost(error)]

    def _drop_doubted(self) -> None:
        """What was not kept as it came is not stored for anybody else."""
        for covered, doubted in zip(self._covered, self._doubted, strict=True):
            for start, stop in doubted.within(self._expected.token_start, self._expected.token_stop):
                covered.discard(start, stop)
                doubted.discard(start, stop)

    def _too_silent(self) -> TransferError:
        return TransferError(f"the sender was silent for {self._timing.ttl_s:g} s while {self.state}")

    def _guarded(self, handler: _Handler, frame: Frame) -> list[ReceiverAction]:
        try:
            return handler(self, frame)
        except (ProtocolError, TransferError) as raised:
            error = without_frames(raised)
            farewell = Send(abort_frame(self._expected.transfer, self.epoch, error))
            return [*self._lose_sender(error, self._silence.since), farewell]

    def _stale(self, frame: Frame) -> list[ReceiverAction]:
        """Tell the sender of another epoch that its time is over; this transfer goes on."""
        if not isinstance(frame, Open | Commit | Ping):
            return []
        error = TransferError(f"epoch {frame.epoch} is not the one that is expected")  # nor does it learn which one is
        return [Send(abort_frame(frame.transfer, frame.epoch, error))]

    def _check_place(self, frame: Layer) -> None:
        expected = self._expected
        inside = expected.token_start <= frame.token_start and frame.token_stop <= expected.token_stop
        if frame.layer >= len(self._covered) or not inside:
            raise ProtocolError(f"layer {frame.layer}, tokens [{frame.token_start}, {frame.token_stop}) not offered")
        byte_count = expected.layout.payload_bytes(frame.token_stop - frame.token_start)
        if frame.payload_bytes != byte_count or byte_count > self._config.max_frame_bytes:
            raise ProtocolError(f"{frame.payload_bytes} bytes for tokens [{frame.token_start}, {frame.token_stop})")

    def _consume(self, spent: int) -> list[ReceiverAction]:
        self.credit.consume(spent)
        return [self._grant()] if self.credit.due() else []

    def _missing(self, layer: int) -> list[tuple[int, int]]:
        return self._covered[layer].missing(self._expected.token_start, self._expected.token_stop)

    def _nack_missing(self) -> Send:
        ranges = [(layer, start, stop) for layer in range(len(self._covered)) for start, stop in self._missing(layer)]
        return self._nack(tuple(ranges[:MAX_RANGES]))

    def _have(self) -> list[ReceiverAction]:
        """What earlier epochs brought; nothing in the first one."""
        span = (self._expected.token_start, self._expected.token_stop)
        held = [(layer, *part) for layer, covered in enumerate(self._covered) for part in covered.within(*span)]
        if self.epoch == self._first_epoch or not held:
            return []
        return [Send(Have(self._expected.transfer, self.epoch, tuple(held[:MAX_RANGES])))]

    def _nack(self, ranges: tuple[tuple[int, int, int], ...]) -> Send:
        return Send(Nack(self._expected.transfer, self.epoch, ranges))

    def _grant(self) -> Send:
        return Send(Credit(self._expected.transfer, self.epoch, self.credit.grant()))

    def _pong(self) -> Send:
        return Send(Ping(self._expected.transfer, self.epoch, reply=True, spent=0))

    def _ack(self) -> Ack:
        return Ack(self._expected.transfer, self.epoch)

    def _fail(self, error: PdserveError) -> list[ReceiverAction]:
        return [*self._end(error), Send(abort_frame(self._expected.transfer, self.epoch, error))]

    def _end(self, error: PdserveError) -> list[ReceiverAction]:
        self.state = ReceiverState.FAILED
        self._error = error
        return [Failed(error)]


_Handler = Callable[[Receiver, Any], list[ReceiverAction]]

_ENDED: Final = (ReceiverState.COMPLETE, ReceiverState.TAKEN_OVER, ReceiverState.FAILED)

# What is not here is refused.
_UNTIL_THE_END: Final[dict[type[Any], _Handler]] = {Abort: Receiver._aborted, Gone: Receiver._gone}
_TURNED_AWAY: Final[dict[type[Any], _Handler]] = {
    Ping: Receiver._abort_again,
    Open: Receiver._abort_again,
    Commit: Receiver._abort_again,
}
_ON_FRAME: Final[Mapping[ReceiverState, Mapping[type[Any], _Handler]]] = MappingProxyType(
    {
        ReceiverState.EXPECTED: _UNTIL_THE_END | {Ping: Receiver._waiting, Open: Receiver._opened},
        ReceiverState.WAITING_BLOCKS: _UNTIL_THE_END | {Ping: Receiver._waiting, Open: Receiver._waiting},
        ReceiverState.RECEIVING: _UNTIL_THE_END
        | {
            Ping: Receiver._probed,
            Open: Receiver._reopened,
            Layer: Receiver._layer,
            Commit: Receiver._commit,
        },
        ReceiverState.COMPLETE: {
            Ping: Receiver._acknowledge_again,
            Open: Receiver._acknowledge_again,
            Commit: Receiver._acknowledge_again,
        },
        ReceiverState.SENDERLESS: {},
        ReceiverState.TAKEN_OVER: _TURNED_AWAY,
        ReceiverState.FAILED: _TURNED_AWAY,
    }
)
