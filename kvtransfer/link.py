"""A worker's end of the KV wire: one thread that owns the transport and all transfers, both ways.

    engine thread                          link's thread                             the other worker
    expect, blocks_leased, abort_receiver --> inbox --> Receiver tables <--+
                                                                           +-- transport <--> frames
    open_sender, layer_ready, commit,     --> inbox --> Sender tables   <--+
    abort_sender

The public methods only enqueue: safe from any thread, never blocking. Callbacks come on the link's thread and must
only enqueue as well.

The contract of `on_end`: each accepted `open_sender` and `expect` gets exactly one call of it, whatever happens: success,
failure, abort, close, a bug. From that call on the link touches neither reader nor writer, zero-copy sends included
(what is sent is the copy that the reader made). So the one place that gives blocks back is the callback's.

Timers are the link's own: a transfer whose peer died ends by itself, also where no new work comes. The thread knows
nothing of what a protocol state means; that is sender.py and receiver.py.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvtransfer.failure import abort_frame
from kvtransfer.frames import (
    MAX_PAYLOAD_BYTES,
    TRANSFER_ID_BYTES,
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
from kvtransfer.incoming import IncomingTransfer, OnNeedBlocks, OnReceived
from kvtransfer.integrity import BLOCK_TOKENS, hash_tokens
from kvtransfer.layout import KVLayout, KVReader, KVWriter
from kvtransfer.outgoing import OnSent, OutgoingTransfer
from kvtransfer.port import FramePort
from kvtransfer.receiver import Expectation
from kvtransfer.stats import LinkStats
from kvtransfer.timing import Timing
from kvtransfer.transports.base import Message, Peer, Transport
from pdserve.clock import Clock
from pdserve.config import TransferConfig
from pdserve.errors import (
    AlreadyExists,
    ConfigError,
    InternalError,
    PdserveError,
    ResourceExhausted,
    TransferError,
    Unavailable,
)
from pdserve.logs import Logger
from pdserve.tracing import Trace
from pdserve.types import Owner, SampledToken, Ticket

_FIRST_EPOCH = 1
_LONGEST_WAIT_S = 1.0
_CLOSE_TIMEOUT_S = 5.0

_Transfer = OutgoingTransfer | IncomingTransfer


@dataclass(slots=True)
class _Connection:
    """A peer we connected to, and since when no transfer uses it."""

    users: int
    idle_since: float


class Link:
    """See the module's docstring. `model`: identity of all that the KV depends on besides the tokens.

    Takes the transport over and closes it. Raises ConfigError where the limits do not fit the layout.
    """

    def __init__(
        self,
        transport: Transport,
        layout: KVLayout,
        model: bytes,
        config: TransferConfig,
        clock: Clock,
        trace: Trace,
        log: Logger,
        *,
        max_transfers: int = 256,
    ) -> None:
        _check_limits(layout, config)
        self._transport = transport
        self._layout = layout
        self._model = model
        self._config = config
        self._clock = clock
        self._trace = trace
        self._log = log
        self._max_transfers = max_transfers
        self._stats = LinkStats()
        self._port = FramePort(transport, self._stats)
        self._outgoing: dict[bytes, OutgoingTransfer] = {}
        self._incoming: dict[bytes, IncomingTransfer] = {}
        self._lingering: dict[bytes, tuple[IncomingTransfer, float]] = {}  # ended: until when they answer probes
        self._connections: dict[Peer, _Connection] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # guards the three below, and that nothing is accepted once closing
        self._accepting = False
        self._outgoing_count = 0
        self._incoming_count = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)

    @property
    def endpoint(self) -> str:
        """What tickets name as the place to connect to."""
        return self._transport.endpoint

    def stats(self) -> LinkStats:
        """A copy of the counts."""
        return replace(self._stats, outgoing=self._outgoing_count, incoming=self._incoming_count)

    def start(self) -> None:
        with self._lock:
            self._accepting = True
        self._thread.start()

    def close(self) -> None:
        """End every transfer with TransferError, stop the thread, close the transport. Bounded; not from a callback."""
        with self._lock:
            started, self._accepting, self._closing = self._thread.ident is not None, False, True
        if not started:
            self._transport.close()
            return
        self._transport.wake()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._log.error("the link's thread did not end", timeout_s=_CLOSE_TIMEOUT_S)

    # The sending side.

    def open_sender(
        self,
        ticket: Ticket,
        owner: Owner,
        token_ids: Sequence[int],
        token_stop: int,
        reader: KVReader,
        on_end: OnSent,
        *,
        queued: bool = False,
    ) -> None:
        """Send the KV of tokens [ticket.cached_tokens, token_stop) to the ticket's issuer.

        `token_ids`: prompt and accepted output, of which the KV was computed. `queued`: only keep the ticket alive,
        and open the transfer at `start_sender` or the first `layer_ready`. `on_end(None)`: the receiver has verified
        everything. Raises ResourceExhausted or Unavailable (link closed), and then `on_end` is not called.
        """
        offer = Open(
            transfer=ticket.transfer_id,
            epoch=ticket.epoch,
            layout=self._layout,
            model=self._model,
            prompt_hash=hash_tokens(token_ids),
            token_start=ticket.cached_tokens,
            token_stop=token_stop,
            block_tokens=BLOCK_TOKENS,
            max_frame_bytes=self._config.max_frame_bytes,
        )
        with self._lock:
            self._check_accepting(self._outgoing_count)
            self._outgoing_count += 1
            self._inbox.append(partial(self._add_outgoing, offer, ticket, owner, reader, on_end, queued))
        self._transport.wake()

    def start_sender(self, transfer_id: bytes) -> None:
        """The turn of a queued sender has come."""
        self._post(partial(self._to_outgoing, transfer_id, OutgoingTransfer.start))

    def layer_ready(self, transfer_id: bytes, layer: int, start: int, stop: int) -> None:
        """Tokens [start, stop) of a layer are computed, and stay readable until `on_end`."""
        self._post(partial(self._to_outgoing, transfer_id, lambda t, now: t.layer_ready(layer, start, stop, now)))

    def commit(self, transfer_id: bytes, tokens: Sequence[SampledToken]) -> None:
        """All layers of all offered tokens are ready; `tokens` were sampled after the last one."""
        self._post(partial(self._to_outgoing, transfer_id, lambda t, now: t.commit(tokens, now)))

    def abort_sender(self, transfer_id: bytes, error: PdserveError) -> None:
        """End a transfer from this side. Does nothing if it has ended already."""
        self._post(partial(self._to_outgoing, transfer_id, lambda t, now: t.abort(error, now)))

    # The receiving side.

    def expect(
        self,
        owner: Owner,
        token_ids: Sequence[int],
        on_need_blocks: OnNeedBlocks,
        on_end: OnReceived,
        *,
        cached_tokens: int = 0,
        token_stop: int | None = None,
    ) -> Ticket:
        """Promise to receive the KV of tokens [cached_tokens, token_stop); the default stop is all of `token_ids`.

        `on_need_blocks` comes once, when the sender is there: lease blocks, then call `blocks_leased`. `on_end` comes
        with the sampled tokens once everything is stored and verified, or with the error. Raises ResourceExhausted or
        Unavailable (link closed), and then neither is called.
        """
        expected = Expectation(
            transfer=secrets.token_bytes(TRANSFER_ID_BYTES),
            epoch=_FIRST_EPOCH,
            layout=self._layout,
            model=self._model,
            prompt_hash=hash_tokens(token_ids),
            token_start=cached_tokens,
            token_stop=len(token_ids) if token_stop is None else token_stop,
        )
        with self._lock:
            self._check_accepting(self._incoming_count)
            self._incoming_count += 1
            self._inbox.append(partial(self._add_incoming, expected, owner, on_need_blocks, on_end))
        self._transport.wake()
        return Ticket(
            expected.transfer, expected.epoch, self.endpoint, cached_tokens, ttl_ms=self._config.ticket_ttl_ms
        )

    def blocks_leased(self, transfer_id: bytes, writer: KVWriter) -> None:
        """Every expected token has a place behind `writer`: let the sender begin."""
        self._post(partial(self._to_incoming, transfer_id, lambda t, now: t.blocks_leased(writer, now)))

    def abort_receiver(self, transfer_id: bytes, error: PdserveError) -> None:
        """End a transfer from this side. Does nothing if it has ended already."""
        self._post(partial(self._to_incoming, transfer_id, lambda t, now: t.abort(error, now)))

    def _check_accepting(self, count: int) -> None:
        if not self._accepting:
            raise Unavailable("the KV link is not running")
        if count >= self._max_transfers:
            raise ResourceExhausted(f"{count} KV transfers are under way, which is the limit")

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._accepting:
                return  # everything has ended or is about to
            self._inbox.append(command)
        self._transport.wake()

    # From here on: the link's thread.

    def _run(self) -> None:
        error: PdserveError = TransferError("the KV link was closed")
        try:
            while self._turn():
                pass
        except Exception as problem:  # noqa: BLE001 - the loop's supervisor: nothing may end without its on_end
            self._stats.internal_errors += 1
            self._log.exception("the KV link broke")
            error = TransferError(f"the KV link broke: {problem!r}")
        finally:
            self._shut_down(error)

    def _turn(self) -> bool:
        """Wait for something, then handle what there is. False: it was the last turn."""
        events = self._transport.receive(self._wait_s())
        closing = self._closing  # read first: what was accepted before is in the inbox by now
        for event in events:
            if isinstance(event, Message):
                self._on_message(event.peer, event.parts)
            else:
                self._stats.peers_lost += 1
                self._log.debug("peer lost", peer=event.peer.decode(errors="replace"))
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
        self._tick()
        return not closing

    def _wait_s(self) -> float:
        if self._inbox or self._closing:
            return 0.0
        now = self._clock.now()
        due = min(
            (transfer.next_deadline() for transfer in (*self._outgoing.values(), *self._incoming.values())),
            default=now + _LONGEST_WAIT_S,
        )
        return min(max(due - now, 0.0), _LONGEST_WAIT_S)

    def _on_message(self, peer: Peer, parts: Sequence[Part]) -> None:
        try:
            received = decode(parts)
        except BadPayload as damage:
            self._stats.checksum_failures += 1
            incoming = None if peer in self._connections else self._incoming.get(damage.frame.transfer)
            if incoming is not None:
                self._step(incoming, lambda now: incoming.on_bad_payload(peer, damage.frame, now))
        except FrameError as problem:
            self._refuse(peer, str(problem))
        else:
            self._stats.frames_received += 1
            self._stats.bytes_received += received.payload.nbytes
            self._route(peer, received)

    def _route(self, peer: Peer, received: Received) -> None:
        """Those we connected to answer our senders; all others speak to our receivers."""
        frame = received.frame
        if peer in self._connections:
            outgoing = self._outgoing.get(frame.transfer)
            if outgoing is None or outgoing.peer != peer:
                self._answer_unknown_sender(peer, frame)
            else:
                self._step(outgoing, lambda now: outgoing.on_frame(frame, now))
            return
        incoming = self._incoming.get(frame.transfer)
        if incoming is None and frame.transfer in self._lingering:
            incoming = self._lingering[frame.transfer][0]
        if incoming is None:
            self._answer_unknown_receiver(peer, frame)
        else:
            self._step(incoming, lambda now: incoming.on_frame(peer, received, now))

    def _answer_unknown_sender(self, peer: Peer, frame: Frame) -> None:
        if isinstance(frame, Nack | Credit):
            self._port.send(peer, Gone(frame.transfer, frame.epoch))

    def _answer_unknown_receiver(self, peer: Peer, frame: Frame) -> None:
        if isinstance(frame, Open | Commit | Ping):
            error = TransferError("no such transfer is expected here")
            self._port.send(peer, abort_frame(frame.transfer, frame.epoch, error))

    def _refuse(self, peer: Peer, reason: str) -> None:
        self._stats.frames_refused += 1
        count = self._stats.frames_refused
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a flood must not fill the log
            self._log.warning("frame refused", peer=peer.decode(errors="replace"), reason=reason, refused=count)

    def _add_outgoing(
        self, offer: Open, ticket: Ticket, owner: Owner, reader: KVReader, on_end: OnSent, queued: bool
    ) -> None:
        now = self._clock.now()
        timing = Timing.from_config(self._config, ticket.ttl_ms)
        try:
            if offer.transfer in self._outgoing:
                raise AlreadyExists(f"transfer {offer.transfer.hex()} is being sent already")
            peer = self._transport.connect(ticket.endpoint)
            transfer = OutgoingTransfer(offer, timing, peer, reader, on_end, self._port, self._stats, self._trace, now)
        except PdserveError as error:
            self._count_outgoing(-1)
            self._stats.transfers_failed += 1
            self._guard(partial(on_end, error))
            return
        self._outgoing[offer.transfer] = transfer
        connection = self._connections.setdefault(peer, _Connection(users=0, idle_since=now))
        connection.users += 1
        self._log.debug("sending KV", owner=str(owner), transfer=offer.transfer.hex(), endpoint=ticket.endpoint)
        if not queued:
            self._step(transfer, transfer.start)

    def _add_incoming(
        self, expected: Expectation, owner: Owner, on_need_blocks: OnNeedBlocks, on_end: OnReceived
    ) -> None:
        timing = Timing.from_config(self._config, self._config.ticket_ttl_ms)
        self._incoming[expected.transfer] = IncomingTransfer(
            expected,
            self._config,
            timing,
            on_need_blocks,
            on_end,
            self._port,
            self._stats,
            self._trace,
            self._clock.now(),
        )
        self._log.debug("expecting KV", owner=str(owner), transfer=expected.transfer.hex())

    def _to_outgoing(self, transfer_id: bytes, event: Callable[[OutgoingTransfer, float], None]) -> None:
        transfer = self._outgoing.get(transfer_id)
        if transfer is not None:
            self._step(transfer, partial(event, transfer))

    def _to_incoming(self, transfer_id: bytes, event: Callable[[IncomingTransfer, float], None]) -> None:
        transfer = self._incoming.get(transfer_id)
        if transfer is not None:
            self._step(transfer, partial(event, transfer))

    def _step(self, transfer: _Transfer, event: Callable[[float], None]) -> None:
        """One event of one transfer. Whatever goes wrong in it ends that transfer and no other."""
        now = self._clock.now()
        problem = self._guard(partial(event, now))
        if problem is not None:
            self._guard(lambda: transfer.abort(problem, now))

    def _guard(self, call: Callable[[], None]) -> PdserveError | None:
        """Call into a reader, a writer or a callback, which may raise anything. Returns what to end with."""
        try:
            call()
        except PdserveError as error:
            return error
        except Exception as problem:  # noqa: BLE001 - the loop's supervisor: one transfer's bug is not the others'
            self._stats.internal_errors += 1
            self._log.exception("a KV transfer's step failed")
            return InternalError(f"a KV transfer's step failed: {problem!r}")
        return None

    def _tick(self) -> None:
        now = self._clock.now()
        transfers: tuple[_Transfer, ...] = (*self._outgoing.values(), *self._incoming.values())
        for transfer in transfers:
            if not transfer.ended and now >= transfer.next_deadline():
                self._step(transfer, transfer.tick)
        self._drop_ended(now)

    def _drop_ended(self, now: float) -> None:
        for transfer_id, outgoing in [item for item in self._outgoing.items() if item[1].ended]:
            del self._outgoing[transfer_id]
            connection = self._connections[outgoing.peer]
            connection.users -= 1
            connection.idle_since = now
            self._count_outgoing(-1)
        linger_s = self._config.ticket_ttl_ms / 1000
        for transfer_id, incoming in [item for item in self._incoming.items() if item[1].ended]:
            del self._incoming[transfer_id]
            self._lingering[transfer_id] = incoming, now + linger_s
            self._count_incoming(-1)
        while self._lingering:
            transfer_id, (_, until) = next(iter(self._lingering.items()))  # the oldest: insertion is in order
            if now < until:
                break
            del self._lingering[transfer_id]
        for peer, connection in list(self._connections.items()):
            if connection.users == 0 and now >= connection.idle_since + linger_s:
                del self._connections[peer]
                self._transport.disconnect(peer)

    def _count_outgoing(self, change: int) -> None:
        with self._lock:
            self._outgoing_count += change

    def _count_incoming(self, change: int) -> None:
        with self._lock:
            self._incoming_count += change

    def _shut_down(self, error: PdserveError) -> None:
        with self._lock:
            self._accepting = False
        for _ in range(len(self._inbox)):  # accepted before: each must get its on_end
            self._guard(self._inbox.popleft())
        now = self._clock.now()
        for transfer in (*self._outgoing.values(), *self._incoming.values()):
            self._guard(partial(transfer.abort, error, now))
        self._drop_ended(now)
        self._transport.close()


def _check_limits(layout: KVLayout, config: TransferConfig) -> None:
    token_bytes, frame_bytes = layout.payload_bytes(1), config.max_frame_bytes
    if not token_bytes <= frame_bytes <= min(config.window_bytes, MAX_PAYLOAD_BYTES):
        raise ConfigError(
            f"transfer.max_frame_bytes = {frame_bytes}: must be at least one token's KV of a layer ({token_bytes}) and "
            f"at most transfer.window_bytes ({config.window_bytes}) and {MAX_PAYLOAD_BYTES}"
        )
