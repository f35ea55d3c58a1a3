"""The sending side of one transfer under one epoch, as a table: events in, actions out.

            start            CREDIT              all sent, commit             ACK
    QUEUED -------> OPENING --------> STREAMING -----------------> COMMITTED ------> DONE
                                      ^   |                          |               ^
                                      +---|---------- NACK ----------+               |
                                          +------ ACK, after an earlier COMMIT ------+

    each of the first four --> FAILED: abort, ABORT, silence beyond the ttl, the deadline, a breach of protocol

Ranges that are ready wait in a queue, as numbers, until there is credit for them; what the receiver HAS from an
earlier epoch's sender is left out. Tokens must stay readable until the transfer has ended. Silence is probed: with
PING in QUEUED and STREAMING, with OPEN again in OPENING, with COMMIT again in COMMITTED; so a lost frame of any type
delays a transfer by about a probe's interval.

Knows no socket, thread, clock or byte of KV. Time comes in as an argument. A frame of another epoch, or one that its
state does not allow, is counted in `refused` and never acted on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from kvtransfer.actions import Failed, Finished, Send, SendCommit, SenderAction, SendLayer
from kvtransfer.credit import CreditSpender
from kvtransfer.failure import abort_error, abort_frame
from kvtransfer.frames import Abort, Ack, Credit, Frame, Gone, Have, Layer, Nack, Open, Ping
from kvtransfer.ranges import RangeSet
from kvtransfer.timing import Silence, Timing
from pdserve.errors import InternalError, PdserveError, ProtocolError, TransferError
from pdserve.types import SampledToken


class SenderState(StrEnum):
    QUEUED = "queued"  # only keeps the ticket alive
    OPENING = "opening"  # OPEN is out; the receiver looks for blocks
    STREAMING = "streaming"
    COMMITTED = "committed"  # all is sent; the receiver verifies
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class _Queued:
    layer: int
    start: int
    stop: int
    resend: bool


class Sender:
    """One transfer's sender. `offer` is the OPEN it makes; what it offers, it must send and commit."""

    def __init__(self, offer: Open, timing: Timing, now: float) -> None:
        if offer.max_frame_bytes < offer.layout.payload_bytes(1):
            raise InternalError(f"one token's KV does not fit a frame of {offer.max_frame_bytes} bytes")
        self.state = SenderState.QUEUED
        self.credit = CreditSpender()
        self.refused = 0
        self._offer = offer
        self._timing = timing
        self._ends_at = now + timing.deadline_s
        self._silence = Silence(now)
        self._probed_at = now
        layers = range(offer.layout.layer_count)
        self._ready = [RangeSet() for _ in layers]
        self._sent = [RangeSet() for _ in layers]
        self._held = [RangeSet() for _ in layers]  # at the receiver, from earlier epochs
        self._queue: deque[_Queued] = deque()
        self._tokens: tuple[SampledToken, ...] | None = None
        self._commits = 0

    @property
    def ended(self) -> bool:
        return self.state in (SenderState.DONE, SenderState.FAILED)

    def next_deadline(self) -> float:
        """When `tick` has something to do at the latest; infinity once the transfer has ended."""
        if self.ended:
            return math.inf
        return min(self._ends_at, self._silence.lasts_until(self._timing.ttl_s), self._probe_at())

    def start(self, now: float) -> list[SenderAction]:
        """The prompt's turn has come: ask the receiver to get blocks. Does nothing after the first call."""
        if self.state is not SenderState.QUEUED:
            return []
        self.state = SenderState.OPENING
        self._probed_at = now
        return [Send(self._offer)]

    def layer_ready(self, layer: int, start: int, stop: int, now: float) -> list[SenderAction]:
        """Tokens [start, stop) of a layer are computed and stay readable. Starts a queued sender.

        What was not offered is left out, what is known to be ready already is not sent twice.
        """
        if self.ended:
            return []
        if not 0 <= layer < len(self._ready):
            return self._fail(InternalError(f"layer {layer} of {len(self._ready)} is ready"))
        actions = self.start(now)
        start, stop = max(start, self._offer.token_start), min(stop, self._offer.token_stop)
        for first, last in self._ready[layer].missing(start, stop):
            self._queue.append(_Queued(layer, first, last, resend=False))
        self._ready[layer].add(start, stop)
        return actions + self._pump(now)

    def commit(self, tokens: Sequence[SampledToken], now: float) -> list[SenderAction]:
        """Every layer is ready; `tokens` are what was sampled after the last one."""
        if self.ended:
            return []
        for layer, ready in enumerate(self._ready):
            if missing := ready.missing(self._offer.token_start, self._offer.token_stop):
                first, last = missing[0]
                return self._fail(InternalError(f"commit, but tokens [{first}, {last}) of layer {layer} are missing"))
        self._tokens = tuple(tokens)
        return self.start(now) + self._pump(now)

    def abort(self, error: PdserveError, now: float) -> list[SenderAction]:
        """Give up for a reason of this side's."""
        return [] if self.ended else self._fail(error)

    def on_frame(self, frame: Frame, now: float) -> list[SenderAction]:
        handler = _ON_FRAME[self.state].get(type(frame)) if frame.epoch == self._offer.epoch else None
        if handler is None or (isinstance(frame, Ping) and not frame.reply):
            self.refused += 1
            return []
        self._silence.end(now)
        return handler(self, frame, now)

    def excuse(self, seconds: float) -> None:
        """This side did not listen for so long: that is no silence of the receiver's. The deadline stays."""
        self._silence.excuse(seconds)

    def tick(self, now: float) -> list[SenderAction]:
        """Let time pass: what is overdue fails or is probed."""
        if self.ended:
            return []
        if now >= self._ends_at:
            return self._fail(TransferError(f"not done in {self._timing.deadline_s:g} s, still {self.state}"))
        if now >= self._silence.lasts_until(self._timing.ttl_s):
            return self._fail(TransferError(f"the receiver was silent for {self._timing.ttl_s:g} s while {self.state}"))
        if now >= self._probe_at():
            self._probed_at = now
            return [self._probe()]
        return []

    # Handlers of the table below.

    def _alive(self, frame: Ping, now: float) -> list[SenderAction]:
        return []

    def _credited(self, frame: Credit, now: float) -> list[SenderAction]:
        self.credit.grant(frame.total)
        if self.state is SenderState.OPENING:
            self.state = SenderState.STREAMING
        return self._pump(now)

    def _leave_out(self, frame: Have, now: float) -> list[SenderAction]:
        if self.credit.spent or self._commits:
            return []  # late: a NACK may have asked for the same ranges since
        if (breach := self._not_offered(frame)) is not None:
            return self._fail(breach)
        for layer, start, stop in frame.ranges:
            self._held[layer].add(start, stop)
        return []

    def _resend(self, frame: Nack, now: float) -> list[SenderAction]:
        """Queue again what was sent of the ranges. What is queued is not queued twice."""
        if (breach := self._not_offered(frame)) is not None:
            return self._fail(breach)
        for layer, start, stop in frame.ranges:
            self._held[layer].discard(start, stop)
            for first, last in self._sent[layer].within(start, stop):
                self._sent[layer].discard(first, last)
                self._queue.append(_Queued(layer, first, last, resend=True))
        self.state = SenderState.STREAMING
        return self._pump(now)

    def _acknowledged(self, frame: Ack, now: float) -> list[SenderAction]:
        if self._commits == 0:
            return self._fail(ProtocolError("ACK before COMMIT"))
        self.state = SenderState.DONE
        self._queue.clear()
        return [Finished()]

    def _aborted(self, frame: Abort, now: float) -> list[SenderAction]:
        return self._end(abort_error(frame))

    def _gone(self, frame: Frame, now: float) -> list[SenderAction]:
        return [Send(Gone(self._offer.transfer, self._offer.epoch))]

    def _pump(self, now: float) -> list[SenderAction]:
        """Send what there is credit for, in order of readiness, then COMMIT if that was all."""
        if self.state is not SenderState.STREAMING:
            return []
        actions: list[SenderAction] = []
        while self._queue:
            item = self._queue[0]
            if self._skip_held(item):
                continue
            stop = self._cut(item.start, item.stop)
            byte_count = self._offer.layout.payload_bytes(stop - item.start)
            if byte_count > self.credit.available:
                return actions
            actions.append(self._send_layer(item, stop, byte_count))
            self._queue.popleft()
            if stop < item.stop:
                self._queue.appendleft(_Queued(item.layer, stop, item.stop, item.resend))
        if self._tokens is not None:
            self.state = SenderState.COMMITTED
            self._probed_at = now
            actions.append(self._probe())
        return actions

    def _skip_held(self, item: _Queued) -> bool:
        """Replace the first of the queue by the parts of it that the receiver lacks; False if that is all of it."""
        lacking = self._held[item.layer].missing(item.start, item.stop)
        if lacking == [(item.start, item.stop)]:
            return False
        self._queue.popleft()
        self._queue.extendleft(_Queued(item.layer, a, b, item.resend) for a, b in reversed(lacking))
        for first, last in self._held[item.layer].within(item.start, item.stop):
            self._sent[item.layer].add(first, last)  # so that a NACK brings it back
        return True

    def _not_offered(self, frame: Nack | Have) -> ProtocolError | None:
        for layer, start, stop in frame.ranges:
            if layer >= len(self._sent) or start < self._offer.token_start or stop > self._offer.token_stop:
                name = type(frame).__name__.upper()
                return ProtocolError(f"{name} of layer {layer}, [{start}, {stop}), which was not offered")
        return None

    def _send_layer(self, item: _Queued, stop: int, byte_count: int) -> SendLayer:
        self._sent[item.layer].add(item.start, stop)
        spent = self.credit.spend(byte_count)
        frame = Layer(
            self._offer.transfer, self._offer.epoch, item.layer, item.start, stop, spent, payload_bytes=byte_count
        )
        return SendLayer(frame, item.resend)

    def _cut(self, start: int, stop: int) -> int:
        """Where a frame that begins at `start` ends: within the size limit, at a block's border if it crosses one."""
        limit = start + self._offer.max_frame_bytes // self._offer.layout.payload_bytes(1)
        if stop <= limit:
            return stop
        border = limit - limit % self._offer.block_tokens
        return border if border > start else limit

    def _probe_at(self) -> float:
        return max(self._probed_at, self._silence.since) + self._timing.probe_s

    def _probe(self) -> SenderAction:
        """What the receiver must answer in this state."""
        if self.state is SenderState.OPENING:
            return Send(self._offer)
        if self.state is SenderState.COMMITTED and self._tokens is not None:
            self._commits += 1
            return SendCommit(self._tokens)
        return Send(Ping(self._offer.transfer, self._offer.epoch, reply=False, spent=self.credit.spent))

    def _fail(self, error: PdserveError) -> list[SenderAction]:
        return [*self._end(error), Send(abort_frame(self._offer.transfer, self._offer.epoch, error))]

    def _end(self, error: PdserveError) -> list[SenderAction]:
        self.state = SenderState.FAILED
        self._queue.clear()
        return [Failed(error)]


_Handler = Callable[[Sender, Any, float], list[SenderAction]]

# What is not here is refused.
_ALWAYS: Final[dict[type[Any], _Handler]] = {Ping: Sender._alive, Abort: Sender._aborted}
_ON_FRAME: Final[Mapping[SenderState, Mapping[type[Any], _Handler]]] = MappingProxyType(
    {
        SenderState.QUEUED: _ALWAYS,
        SenderState.OPENING: _ALWAYS | {Credit: Sender._credited, Have: Sender._leave_out},
        SenderState.STREAMING: _ALWAYS
        | {Have: Sender._leave_out, Credit: Sender._credited, Nack: Sender._resend, Ack: Sender._acknowledged},
        SenderState.COMMITTED: _ALWAYS | {Credit: Sender._credited, Nack: Sender._resend, Ack: Sender._acknowledged},
        SenderState.DONE: {},
        SenderState.FAILED: {Credit: Sender._gone, Nack: Sender._gone},
    }
)
