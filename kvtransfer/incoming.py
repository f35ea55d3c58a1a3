"""One transfer at its receiving link: carries out what its Receiver asks for.

Writes KV through the caller's writer and reads it back at once: what is stored, not what came, is held against the
frame's checksum, and later against COMMIT's list. So a payload that was damaged on its way may lie in the blocks for a
moment; they are this transfer's own and nobody reads them before they are verified. Runs on the link's thread only.
Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtransfer.actions import (
    Delivered,
    Failed,
    NeedBlocks,
    ReceiverAction,
    Send,
    SenderLost,
    TakenOver,
    Verify,
    Write,
)
from kvtransfer.failure import abort_frame
from kvtransfer.frames import Commit, Frame, Layer, Open, Ping, Received
from kvtransfer.integrity import Hashes, hashes_of
from kvtransfer.kv_access import KVWriter, ScratchReader
from kvtransfer.port import FramePort
from kvtransfer.receiver import Expectation, Receiver
from kvtransfer.stats import LinkStats
from kvtransfer.timing import Timing
from kvtransfer.transports.base import Peer
from pdserve.config import TransferConfig
from pdserve.errors import PdserveError, TransferError
from pdserve.tracing import Trace
from pdserve.types import SampledToken

OnNeedBlocks = Callable[[], None]
OnSenderLost = Callable[[PdserveError], None]
OnReceived = Callable[[Sequence[SampledToken] | TakenOver | PdserveError], None]

_NOTHING = memoryview(b"")


class IncomingTransfer:
    """Calls `on_end` exactly once; never touches the writer after that."""

    def __init__(
        self,
        expected: Expectation,
        config: TransferConfig,
        timing: Timing,
        on_need_blocks: OnNeedBlocks,
        on_sender_lost: OnSenderLost,
        on_end: OnReceived,
        port: FramePort,
        stats: LinkStats,
        trace: Trace,
        now: float,
    ) -> None:
        self._receiver = Receiver(expected, config, timing, now)
        self._name = expected.transfer.hex()
        self._peer: Peer | None = None  # the ticket's holder, once it was heard
        self._writer: KVWriter | None = None
        self._reread: ScratchReader | None = None
        self._layout = expected.layout
        self._integrity = config.integrity
        self._hashes: Hashes | None = None
        self._on_need_blocks = on_need_blocks
        self._on_sender_lost = on_sender_lost
        self._on_end = on_end
        self._port = port
        self._stats = stats
        self._trace = trace

    @property
    def ended(self) -> bool:
        return self._receiver.ended

    def next_deadline(self) -> float:
        return self._receiver.next_deadline()

    def blocks_leased(self, writer: KVWriter, now: float) -> None:
        if not self.ended:
            self._writer = writer
            self._reread = ScratchReader(writer, self._layout)
            self._run(self._receiver.blocks_leased(now), self._peer, _NOTHING, now)

    def sender_lost(self, epoch: int, error: PdserveError, now: float) -> None:
        self._run(self._receiver.sender_lost(epoch, error, now), self._peer, _NOTHING, now)

    def renew(self, now: float) -> int | None:
        """Expect another sender; the epoch it must have. None where no other is wanted any more."""
        before = self._receiver.epoch
        self._run(self._receiver.renew(now), None, _NOTHING, now)
        self._peer = None
        return self._receiver.epoch if self._receiver.epoch > before else None

    def take_over(self, now: float) -> None:
        self._run(self._receiver.take_over(now), self._peer, _NOTHING, now)

    def abort(self, error: PdserveError, now: float) -> None:
        self._run(self._receiver.abort(error, now), self._peer, _NOTHING, now)

    def excuse(self, seconds: float) -> None:
        """The link did not listen for so long."""
        self._receiver.excuse(seconds)

    def tick(self, now: float) -> None:
        self._run(self._receiver.tick(now), self._peer, _NOTHING, now)

    def on_frame(self, peer: Peer, received: Received, now: float) -> None:
        if self._admit(peer, received.frame):
            refused = self._receiver.refused
            actions = self._receiver.on_frame(received.frame, now)
            self._stats.frames_refused += self._receiver.refused - refused
            self._run(actions, peer, received.payload, now)

    def on_bad_payload(self, peer: Peer, frame: Commit, now: float) -> None:
        if self._admit(peer, frame):
            refused = self._receiver.refused
            actions = self._receiver.bad_payload(frame, now)
            self._stats.frames_refused += self._receiver.refused - refused
            self._run(actions, peer, _NOTHING, now)

    def _admit(self, peer: Peer, frame: Frame) -> bool:
        """Whether `peer` may speak. The first that knows transfer and epoch is the ticket's holder; a second one, who
        has the ticket as well, is told so and changes nothing."""
        if frame.epoch != self._receiver.epoch:
            return True  # refused with an answer, by the table
        if self._peer is None:
            self._peer = peer
        if peer == self._peer:
            return True
        self._stats.frames_refused += 1
        if isinstance(frame, Open | Commit | Ping):
            self._port.send(peer, abort_frame(frame.transfer, frame.epoch, _taken()))
        return False

    def _run(self, actions: Sequence[ReceiverAction], peer: Peer | None, payload: memoryview, now: float) -> None:
        """`peer` gets the answers; `payload` is what came with the frame that caused the actions."""
        for action in actions:
            match action:
                case Write(frame):
                    self._run(self._write(frame, payload, now), peer, _NOTHING, now)
                case Send(frame):
                    if peer is not None:  # nobody was heard yet: nobody to tell
                        self._port.send(peer, frame)
                case NeedBlocks():
                    self._trace.record("transfer_open", transfer=self._name, side="receiver")
                    assert self._receiver.offer is not None
                    self._hashes = hashes_of(self._receiver.offer, self._integrity)
                    self._on_need_blocks()
                case Verify():
                    self._trace.record("transfer_commit", transfer=self._name, side="receiver")
                    self._run(self._receiver.verified(self._mismatches(payload), now), peer, _NOTHING, now)
                case SenderLost(error):
                    self._trace.record("sender_lost", transfer=self._name, epoch=self._receiver.epoch)
                    self._on_sender_lost(error)
                case TakenOver():
                    self._trace.record("transfer_taken_over", transfer=self._name, token_stop=action.token_stop)
                    self._end(action)
                case Delivered(tokens):
                    self._trace.record("transfer_complete", transfer=self._name, side="receiver")
                    self._end(tokens)
                case Failed(error):
                    self._stats.transfers_failed += 1
                    self._end(error)

    def _write(self, frame: Layer, payload: memoryview, now: float) -> Sequence[ReceiverAction]:
        """Store a frame's payload, read it back, and tell the table whether it was damaged, or is kept otherwise."""
        assert self._writer is not None
        assert self._reread is not None
        assert self._hashes is not None
        layer, start, stop = frame.layer, frame.token_start, frame.token_stop
        self._hashes.forget(layer, start, stop)
        self._writer.write(layer, start, stop, payload)
        if not self._hashes.verify(layer, start, stop, self._reread, frame.checksum):
            damaged = self._hashes.absorb(layer, start, stop, payload) != frame.checksum
            self._hashes.forget(layer, start, stop)
            if damaged:
                self._stats.checksum_failures += 1
                return self._receiver.bad_payload(frame, now)
            return self._receiver.written(frame, now, kept=False)
        self._hashes.complete(layer, start, stop, self._reread)
        self._trace.record(
            "frame_received", transfer=self._name, layer=layer, start=start, stop=stop, bytes=payload.nbytes
        )
        return self._receiver.written(frame, now)

    def _mismatches(self, payload: memoryview) -> list[tuple[int, int]]:
        assert self._hashes is not None
        mismatches = self._hashes.mismatches(payload)
        self._stats.integrity_failures += len(mismatches)
        return mismatches

    def _end(self, outcome: Sequence[SampledToken] | TakenOver | PdserveError) -> None:
        self._writer = None
        self._reread = None
        self._hashes = None
        self._on_end(outcome)


def _taken() -> TransferError:
    return TransferError("another worker is sending under this ticket already")
