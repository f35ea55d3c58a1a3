"""One transfer at its sending link: carries out what its Sender asks for.

Has KV read to where it is sent from, hashes it there and passes it on. Runs on the link's thread only. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtransfer.actions import Failed, Finished, Send, SendCommit, SenderAction, SendLayer
from kvtransfer.frames import Commit, Frame, Open
from kvtransfer.integrity import Hashes, hashes_of
from kvtransfer.kv_access import KVReader, ScratchReader
from kvtransfer.port import FramePort
from kvtransfer.sender import Sender
from kvtransfer.stats import LinkStats
from kvtransfer.timing import Timing
from kvtransfer.transports.base import Peer
from pdserve.errors import PdserveError
from pdserve.tracing import Trace
from pdserve.types import SampledToken

OnSent = Callable[[PdserveError | None], None]


class OutgoingTransfer:
    """Calls `on_end` exactly once; never reads after that."""

    def __init__(
        self,
        offer: Open,
        timing: Timing,
        integrity: bool,
        peer: Peer,
        on_end: OnSent,
        port: FramePort,
        stats: LinkStats,
        trace: Trace,
        now: float,
    ) -> None:
        self.peer = peer
        self._sender = Sender(offer, timing, now)
        self._offer = offer
        self._name = offer.transfer.hex()
        self._reader: KVReader | None = None  # until it starts
        self._reread: ScratchReader | None = None
        self._hashes: Hashes | None = hashes_of(offer, integrity)
        self._opened = False
        self._on_end = on_end
        self._port = port
        self._stats = stats
        self._trace = trace

    @property
    def ended(self) -> bool:
        return self._sender.ended

    def next_deadline(self) -> float:
        return self._sender.next_deadline()

    def start(self, reader: KVReader, now: float) -> None:
        """Only the first call counts: who sends a ticket twice has two readers."""
        if self._reader is None and not self.ended:
            self._reader = reader
            self._reread = ScratchReader(reader, self._offer.layout)
            self._run(self._sender.start(now))

    def layer_ready(self, layer: int, start: int, stop: int, now: float) -> None:
        self._run(self._sender.layer_ready(layer, start, stop, now))

    def commit(self, tokens: Sequence[SampledToken], now: float) -> None:
        self._run(self._sender.commit(tokens, now))

    def abort(self, error: PdserveError, now: float) -> None:
        self._run(self._sender.abort(error, now))

    def excuse(self, seconds: float) -> None:
        """The link did not listen for so long."""
        self._sender.excuse(seconds)

    def tick(self, now: float) -> None:
        self._run(self._sender.tick(now))

    def on_frame(self, frame: Frame, now: float) -> None:
        refused = self._sender.refused
        actions = self._sender.on_frame(frame, now)
        self._stats.frames_refused += self._sender.refused - refused
        self._run(actions)

    def _run(self, actions: Sequence[SenderAction]) -> None:
        for action in actions:
            match action:
                case SendLayer():
                    self._send_layer(action)
                case Send(frame):
                    if isinstance(frame, Open) and not self._opened:
                        self._opened = True
                        self._trace.record("transfer_open", transfer=self._name, side="sender")
                    self._port.send(self.peer, frame)
                case SendCommit(tokens):
                    self._send_commit(tokens)
                case Finished():
                    self._trace.record("transfer_complete", transfer=self._name, side="sender")
                    self._end(None)
                case Failed(error):
                    self._stats.transfers_failed += 1
                    self._end(error)

    def _send_layer(self, action: SendLayer) -> None:
        assert self._reader is not None
        assert self._hashes is not None
        frame = action.frame
        layer, start, stop = frame.layer, frame.token_start, frame.token_stop
        payload = self._port.buffer(self.peer, frame.payload_bytes)
        self._reader.read_into(layer, start, stop, payload)
        checksum = self._hashes.absorb(layer, start, stop, payload)
        self._port.send(self.peer, replace(frame, checksum=checksum), payload)
        self._trace.record("frame_sent", transfer=self._name, layer=layer, start=start, stop=stop, bytes=payload.nbytes)
        if action.resend:
            self._stats.frames_resent += 1
            self._stats.bytes_resent += payload.nbytes
        self._complete(layer, start, stop)  # blocks that go in pieces

    def _send_commit(self, tokens: tuple[SampledToken, ...]) -> None:
        assert self._hashes is not None
        for layer in range(self._offer.layout.layer_count):  # blocks that need not go: the receiver has them
            self._complete(layer, self._offer.token_start, self._offer.token_stop)
        hashes = self._hashes.packed()
        self._port.send(self.peer, Commit(self._offer.transfer, self._offer.epoch, tokens, len(hashes)), hashes)
        self._trace.record("transfer_commit", transfer=self._name, side="sender")

    def _complete(self, layer: int, start: int, stop: int) -> None:
        assert self._reread is not None
        assert self._hashes is not None
        self._hashes.complete(layer, start, stop, self._reread)

    def _end(self, error: PdserveError | None) -> None:
        self._reader = None
        self._reread = None
        self._hashes = None
        self._on_end(error)
