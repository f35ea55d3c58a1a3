"""All transfers of one worker, both ways: brings each frame, command and deadline to the transfer it belongs to.

Called by one thread, the link's; holds none itself, and takes transport and clock as they come, so that a simulation
can run many of these side by side. Knows nothing of what a protocol state means: that is sender.py and receiver.py.

Whatever goes wrong in one transfer's event (a reader, a writer or a callback that raises) ends that transfer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtransfer.failure import abort_frame, without_frames
from kvtransfer.frames import (
    BadPayload,
    Commit,
    Credit,
    Frame,
    FrameError,
    Gone,
    Nack,
    Open,
    Part,
    Ping,
    Received,
    decode,
)
from kvtransfer.incoming import IncomingTransfer, OnNeedBlocks, OnReceived, OnSenderLost
from kvtransfer.kv_access import KVReader, KVWriter
from kvtransfer.outgoing import OnSent, OutgoingTransfer
from kvtransfer.port import FramePort
from kvtransfer.receiver import Expectation
from kvtransfer.stats import LinkStats
from kvtransfer.timing import Attendance, Timing
from kvtransfer.transports.base import Event, Message, Peer, Transport
from pdserve.clock import Clock
from pdserve.config import TransferConfig
from pdserve.errors import AlreadyExists, InternalError, PdserveError, TransferError
from pdserve.logs import Logger
from pdserve.tracing import Trace
from pdserve.types import SampledToken, Ticket

Transfer = OutgoingTransfer | IncomingTransfer

_ALLOWANCE = 0.5  # of a probe's interval: by how much a turn may be late before that counts as time away


@dataclass(slots=True)
class _Connection:
    """A peer we connected to, and since when no transfer has used it. `lost`: it went, and has not been heard since."""

    users: int
    idle_since: float
    lost: bool = False


class Exchange:
    """See the module's docstring. Every `on_end` that comes in is called exactly once."""

    def __init__(
        self,
        transport: Transport,
        config: TransferConfig,
        clock: Clock,
        trace: Trace,
        log: Logger,
        stats: LinkStats,
    ) -> None:
        self._transport = transport
        self._config = config
        self._linger_s = config.ticket_ttl_ms / 1000
        self._idle_s = config.connection_idle_ms / 1000
        self._clock = clock
        self._attendance = Attendance(_ALLOWANCE * config.ping_interval_ms / 1000, clock.now())
        self._trace = trace
        self._log = log
        self._stats = stats
        self._port = FramePort(transport, stats, config.integrity)
        self._outgoing: dict[bytes, OutgoingTransfer] = {}
        self._incoming: dict[bytes, IncomingTransfer] = {}
        self._lingering: dict[bytes, tuple[IncomingTransfer, float]] = {}  # ended; they answer probes until then
        self._connections: dict[Peer, _Connection] = {}

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the latest; None without transfers."""
        return min((transfer.next_deadline() for transfer in self._transfers()), default=None)

    # Commands.

    def open_outgoing(self, offer: Open, ticket: Ticket, on_end: OnSent) -> None:
        problem = self._guard(partial(self._add_outgoing, offer, ticket, on_end))
        if problem is not None:
            self._stats.transfers_failed += 1
            self._guard(partial(on_end, problem))

    def _add_outgoing(self, offer: Open, ticket: Ticket, on_end: OnSent) -> None:
        if offer.transfer in self._outgoing:
            raise AlreadyExists(f"transfer {offer.transfer.hex()} is being sent already")
        now = self._clock.now()
        timing = Timing.from_config(self._config, ticket.ttl_ms)
        peer = self._transport.connect(ticket.endpoint)
        self._outgoing[offer.transfer] = OutgoingTransfer(
            offer, timing, self._config.integrity, peer, on_end, self._port, self._stats, self._trace, now
        )
        self._connections.setdefault(peer, _Connection(users=0, idle_since=now)).users += 1

    def start_outgoing(self, transfer_id: bytes, reader: KVReader) -> None:
        self._to_outgoing(transfer_id, lambda transfer, now: transfer.start(reader, now))

    def layer_ready(self, transfer_id: bytes, layer: int, start: int, stop: int) -> None:
        self._to_outgoing(transfer_id, lambda transfer, now: transfer.layer_ready(layer, start, stop, now))

    def commit(self, transfer_id: bytes, tokens: Sequence[SampledToken]) -> None:
        self._to_outgoing(transfer_id, lambda transfer, now: transfer.commit(tokens, now))

    def abort_outgoing(self, transfer_id: bytes, error: PdserveError) -> None:
        self._to_outgoing(transfer_id, lambda transfer, now: transfer.abort(error, now))

    def expect(
        self,
        expected: Expectation,
        on_need_blocks: OnNeedBlocks,
        on_sender_lost: OnSenderLost,
        on_end: OnReceived,
    ) -> None:
        timing = Timing.from_config(self._config, self._config.ticket_ttl_ms)
        self._incoming[expected.transfer] = IncomingTransfer(
            expected,
            self._config,
            timing,
            on_need_blocks,
            on_sender_lost,
            on_end,
            self._port,
            self._stats,
            self._trace,
            self._clock.now(),
        )

    def blocks_leased(self, transfer_id: bytes, writer: KVWriter) -> None:
        self._to_incoming(transfer_id, lambda transfer, now: transfer.blocks_leased(writer, now))

    def sender_lost(self, transfer_id: bytes, epoch: int, error: PdserveError) -> None:
        self._to_incoming(transfer_id, lambda transfer, now: transfer.sender_lost(epoch, error, now))

    def renew(self, transfer_id: bytes, on_epoch: Callable[[int], None]) -> None:
        def event(transfer: IncomingTransfer, now: float) -> None:
            epoch = transfer.renew(now)
            if epoch is not None:
                on_epoch(epoch)

        self._to_incoming(transfer_id, event)

    def take_over(self, transfer_id: bytes) -> None:
        self._to_incoming(transfer_id, lambda transfer, now: transfer.take_over(now))

    def abort_incoming(self, transfer_id: bytes, error: PdserveError) -> None:
        self._to_incoming(transfer_id, lambda transfer, now: transfer.abort(error, now))

    # What the transport brings.

    def on_event(self, event: Event) -> None:
        if isinstance(event, Message):
            self._on_message(event.peer, event.parts)
        else:  # nobody is failed for it: a connection may come back, and silence has a deadline
            self._stats.peers_lost += 1
            if event.peer in self._connections:
                self._connections[event.peer].lost = True
            self._log.debug("peer lost", peer=event.peer.decode(errors="replace"))

    def _on_message(self, peer: Peer, parts: Sequence[Part]) -> None:
        try:
            received = decode(parts, checked=self._config.integrity)
        except BadPayload as damage:
            self._stats.checksum_failures += 1
            self._on_bad_payload(peer, damage.frame)
        except FrameError as problem:
            self._refuse(peer, problem)
        else:
            self._stats.frames_received += 1
            self._stats.bytes_received += received.payload.nbytes
            if peer in self._connections:  # those we connected to answer our senders
                self._connections[peer].lost = False
                self._to_sender(peer, received.frame)
            else:
                self._to_receiver(peer, received)

    def _on_bad_payload(self, peer: Peer, frame: Commit) -> None:
        incoming = None if peer in self._connections else self._incoming.get(frame.transfer)
        if incoming is not None:
            self._step(incoming, lambda now: incoming.on_bad_payload(peer, frame, now))

    def _to_sender(self, peer: Peer, frame: Frame) -> None:
        outgoing = self._outgoing.get(frame.transfer)
        if outgoing is not None and outgoing.peer == peer:
            self._step(outgoing, lambda now: outgoing.on_frame(frame, now))
        elif isinstance(frame, Nack | Credit):
            self._port.send(peer, Gone(frame.transfer, frame.epoch))

    def _to_receiver(self, peer: Peer, received: Received) -> None:
        frame = received.frame
        incoming = self._incoming.get(frame.transfer)
        if incoming is None and frame.transfer in self._lingering:
            incoming = self._lingering[frame.transfer][0]
        if incoming is not None:
            self._step(incoming, lambda now: incoming.on_frame(peer, received, now))
        elif isinstance(frame, Open | Commit | Ping):
            error = TransferError("no such transfer is expected here")
            self._port.send(peer, abort_frame(frame.transfer, frame.epoch, error))

    def _refuse(self, peer: Peer, problem: FrameError) -> None:
        self._stats.frames_refused += 1
        count = self._stats.frames_refused
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a flood must not fill the log
            name = peer.decode(errors="replace")
            self._log.warning("frame refused", peer=name, reason=problem.message, refused=count)

    # Time.

    def listened(self, wait_s: float) -> None:
        """The transport was listened to until now, after a wait that was to take at most `wait_s`. Call it before what
        was received is handled: time in which nobody listened is no peer's silence."""
        missed_s = self._attendance.missed_s(wait_s, self._clock.now())
        if missed_s == 0.0:
            return
        self._log.debug("the KV link did not listen", seconds=round(missed_s, 3))
        for transfer in self._transfers():
            transfer.excuse(missed_s)
        for transfer_id, (incoming, until) in self._lingering.items():
            self._lingering[transfer_id] = incoming, until + missed_s

    def tick(self) -> None:
        """Fail or probe what was overdue when the transport was last listened to, and let go of what has ended."""
        listened_at = self._attendance.listened_at
        for transfer in self._transfers():
            if listened_at >= transfer.next_deadline():
                self._step(transfer, partial(_tick, transfer, listened_at))
        now = self._clock.now()
        self._drop_outgoing(now)
        self._drop_incoming(now)

    def shut_down(self, error: PdserveError) -> None:
        """End every transfer with `error` and close the transport."""
        now = self._clock.now()
        for transfer in self._transfers():
            self._guard(partial(transfer.abort, error, now))
        self._outgoing.clear()
        self._incoming.clear()
        self._lingering.clear()
        self._transport.close()

    def _transfers(self) -> tuple[Transfer, ...]:
        return (*self._outgoing.values(), *self._incoming.values())

    def _drop_outgoing(self, now: float) -> None:
        """Connections stay for a while without transfers: the next one to the same worker finds them ready."""
        for transfer_id, outgoing in list(self._outgoing.items()):
            if outgoing.ended:
                del self._outgoing[transfer_id]
                connection = self._connections[outgoing.peer]
                connection.users -= 1
                connection.idle_since = now
        for peer, connection in list(self._connections.items()):
            if connection.users == 0 and (connection.lost or now >= connection.idle_since + self._idle_s):
                del self._connections[peer]
                self._transport.disconnect(peer)

    def _drop_incoming(self, now: float) -> None:
        for transfer_id, incoming in list(self._incoming.items()):
            if incoming.ended:
                del self._incoming[transfer_id]
                self._lingering[transfer_id] = incoming, now + self._linger_s
        while self._lingering:
            transfer_id, (_, until) = next(iter(self._lingering.items()))  # the oldest: they come in order
            if now < until:
                return
            del self._lingering[transfer_id]

    def _to_outgoing(self, transfer_id: bytes, event: Callable[[OutgoingTransfer, float], None]) -> None:
        """What comes for a transfer that has ended has lost a race and is left out."""
        transfer = self._outgoing.get(transfer_id)
        if transfer is not None:
            self._step(transfer, partial(event, transfer))

    def _to_incoming(self, transfer_id: bytes, event: Callable[[IncomingTransfer, float], None]) -> None:
        transfer = self._incoming.get(transfer_id)
        if transfer is not None:
            self._step(transfer, partial(event, transfer))

    def _step(self, transfer: Transfer, event: Callable[[float], None]) -> None:
        now = self._clock.now()
        problem = self._guard(partial(event, now))
        if problem is not None:
            self._guard(partial(transfer.abort, problem, now))

    def _guard(self, call: Callable[[], None]) -> PdserveError | None:
        """Call what may raise anything. Returns the error to end with, if it did."""
        try:
            call()
        except PdserveError as error:
            return without_frames(error)
        except Exception as problem:  # noqa: BLE001 - the loop's supervisor: one transfer's bug is not the others'
            self._stats.internal_errors += 1
            self._log.exception("a KV transfer's step failed")
            return InternalError(f"a KV transfer's step failed: {problem!r}")
        return None


def _tick(transfer: Transfer, listened_at: float, now: float) -> None:
    """What came since then is not known yet: no time after it is silence."""
    transfer.tick(listened_at)
