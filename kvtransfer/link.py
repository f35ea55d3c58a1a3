"""A worker's end of the KV wire: one thread that owns the transport and all transfers, both ways.

    any thread                                 link's thread                        the other worker
    expect, blocks_leased, abort_receiver --> inbox --> Receivers <--+
                                                                     +-- transport <--> frames
    open_sender, layer_ready, commit,     --> inbox --> Senders   <--+
    abort_sender

The public methods only enqueue: safe from any thread, never blocking. Callbacks come on the link's thread and must
only enqueue as well.

The contract of `on_end`: each `open_sender` and each `expect` that returns gets exactly one call of it, whatever
happens: success, failure, abort, close, a bug. From that call on the link touches neither reader nor writer, zero-copy
sends included (what is sent is the copy that the reader made). So `on_end` is the one place to give blocks back.

Timers are the link's own: a transfer whose peer died ends by itself, also where no new work comes.

`start` gives the link its thread. Without it, `accept` and then `turn` again and again do the same on the caller's:
that is how a simulation runs many links side by side.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvtransfer.exchange import Exchange
from kvtransfer.frames import MAX_PAYLOAD_BYTES, TRANSFER_ID_BYTES, Open
from kvtransfer.incoming import OnNeedBlocks, OnReceived, OnSenderLost
from kvtransfer.integrity import BLOCK_TOKENS, hash_tokens
from kvtransfer.kv_access import KVReader, KVWriter
from kvtransfer.outgoing import OnSent
from kvtransfer.receiver import Expectation
from kvtransfer.stats import LinkStats
from kvtransfer.transports.base import Transport
from pdserve.clock import Clock
from pdserve.config import TransferConfig
from pdserve.errors import ConfigError, PdserveError, ResourceExhausted, TransferError, Unavailable
from pdserve.kv_format import KVFormat
from pdserve.logs import Logger
from pdserve.tracing import Trace
from pdserve.types import Owner, SampledToken, Ticket

_FIRST_EPOCH = 1
_LONGEST_WAIT_S = 1.0
_CLOSE_TIMEOUT_S = 5.0

_Outcome = TypeVar("_Outcome")


class Link:
    """See the module's docstring. `model`: identity of all that the KV depends on besides the tokens.

    Takes the transport over and closes it. `max_transfers` bounds each direction. Transfer ids come from
    `random_bytes`. Raises ConfigError where the limits of `config` do not fit the format.
    """

    def __init__(
        self,
        transport: Transport,
        kv_format: KVFormat,
        model: bytes,
        config: TransferConfig,
        clock: Clock,
        trace: Trace,
        log: Logger,
        *,
        max_transfers: int = 256,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        _check_limits(kv_format, config)
        self._transport = transport
        self._format = kv_format
        self._model = model
        self._config = config
        self._clock = clock
        self._log = log
        self._stats = LinkStats()
        self._exchange = Exchange(transport, config, clock, trace, log, self._stats)
        self._random_bytes = random_bytes
        self._outgoing = _Places(max_transfers)
        self._incoming = _Places(max_transfers)
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # makes "accepted" and "will be seen by the thread" one thing
        self._accepting = False
        self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)

    @property
    def endpoint(self) -> str:
        """What tickets name as the place to connect to."""
        return self._transport.endpoint

    def stats(self) -> LinkStats:
        """A copy of the counts."""
        return replace(self._stats, outgoing=self._outgoing.taken, incoming=self._incoming.taken)

    def start(self) -> None:
        with self._lock:
            self._accepting = True
            self._thread.start()

    def accept(self) -> None:
        """Take commands from now on, without a thread: the caller's turns carry them out."""
        with self._lock:
            self._accepting = True

    def close(self) -> None:
        """End every transfer with TransferError, stop the thread, close the transport. Within seconds; never from a
        callback. Does nothing after the first call."""
        with self._lock:
            self._accepting = False
            started = self._thread.ident is not None
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
        on_end: OnSent,
    ) -> None:
        """Send the KV of tokens [ticket.cached_tokens, token_stop) to the ticket's issuer.

        `token_ids`: prompt and accepted output, of which the KV is computed. Until `start_sender` the ticket is only
        kept alive. `on_end(None)`: the receiver has verified everything. Raises ResourceExhausted or Unavailable (not
        running), and then `on_end` is not called.
        """
        offer = Open(
            transfer=ticket.transfer_id,
            epoch=ticket.epoch,
            layout=self._format,
            model=self._model,
            prompt_hash=hash_tokens(token_ids),
            token_start=ticket.cached_tokens,
            token_stop=token_stop,
            block_tokens=BLOCK_TOKENS,
            max_frame_bytes=self._config.max_frame_bytes,
        )
        counted = self._outgoing.take_until(on_end)
        self._accept(partial(self._exchange.open_outgoing, offer, ticket, counted), self._outgoing)
        self._log.debug("sending KV", owner=str(owner), transfer=offer.transfer.hex(), endpoint=ticket.endpoint)

    def start_sender(self, transfer_id: bytes, reader: KVReader) -> None:
        """Its turn has come: open the transfer. What is ready from now on is read through `reader`."""
        self._post(partial(self._exchange.start_outgoing, transfer_id, reader))

    def layer_ready(self, transfer_id: bytes, layer: int, start: int, stop: int) -> None:
        """Tokens [start, stop) of a layer are computed, and stay readable until `on_end`.

        Tokens that were not offered are left out, so a chunk that begins among cached ones needs no cutting.
        """
        self._post(partial(self._exchange.layer_ready, transfer_id, layer, start, stop))

    def commit(self, transfer_id: bytes, tokens: Sequence[SampledToken]) -> None:
        """All layers of all offered tokens are ready; `tokens` were sampled after the last one."""
        self._post(partial(self._exchange.commit, transfer_id, tuple(tokens)))

    def abort_sender(self, transfer_id: bytes, error: PdserveError) -> None:
        """End a transfer from this side. Does nothing if it has ended already."""
        self._post(partial(self._exchange.abort_outgoing, transfer_id, error))

    # The receiving side.

    def expect(
        self,
        owner: Owner,
        token_ids: Sequence[int],
        on_need_blocks: OnNeedBlocks,
        on_end: OnReceived,
        *,
        on_sender_lost: OnSenderLost | None = None,
        cached_tokens: int = 0,
        token_stop: int | None = None,
    ) -> Ticket:
        """Promise to receive the KV of tokens [cached_tokens, token_stop); by default up to the last of `token_ids`.

        `on_need_blocks` comes at most once, when the sender is there: lease blocks, then call `blocks_leased`.
        `on_sender_lost` comes when the sender is gone for a reason that another one may cure: answer it with `renew` or
        `take_over`; without it the transfer ends then. `on_end` comes with the sampled tokens once everything is
        stored and verified, with how much is there after `take_over`, or with the error. Raises ResourceExhausted or
        Unavailable (not running), and then none is called.
        """
        expected = Expectation(
            transfer=self._random_bytes(TRANSFER_ID_BYTES),
            epoch=_FIRST_EPOCH,
            layout=self._format,
            model=self._model,
            prompt_hash=hash_tokens(token_ids),
            token_start=cached_tokens,
            token_stop=len(token_ids) if token_stop is None else token_stop,
        )
        counted = self._incoming.take_until(on_end)
        lost = on_sender_lost or partial(self._exchange.abort_incoming, expected.transfer)
        self._accept(partial(self._exchange.expect, expected, on_need_blocks, lost, counted), self._incoming)
        self._log.debug("expecting KV", owner=str(owner), transfer=expected.transfer.hex())
        return Ticket(
            expected.transfer, expected.epoch, self.endpoint, cached_tokens, ttl_ms=self._config.ticket_ttl_ms
        )

    def blocks_leased(self, transfer_id: bytes, writer: KVWriter) -> None:
        """Every expected token has a place behind `writer`: let the sender begin."""
        self._post(partial(self._exchange.blocks_leased, transfer_id, writer))

    def sender_lost(self, transfer_id: bytes, epoch: int, error: PdserveError) -> None:
        """Somebody else knows that this epoch's sender is gone. Too late or told already: nothing happens."""
        self._post(partial(self._exchange.sender_lost, transfer_id, epoch, error))

    def renew(self, transfer_id: bytes, on_epoch: Callable[[int], None]) -> None:
        """After `on_sender_lost`: expect another sender. `on_epoch` gets the epoch that its ticket must name, on the
        link's thread; it is not called where the transfer has ended meanwhile."""
        self._post(partial(self._exchange.renew, transfer_id, on_epoch))

    def take_over(self, transfer_id: bytes) -> None:
        """Want no more of the transfer: `on_end` comes with how much is stored. What still arrives is refused."""
        self._post(partial(self._exchange.take_over, transfer_id))

    def abort_receiver(self, transfer_id: bytes, error: PdserveError) -> None:
        """End a transfer from this side. Does nothing if it has ended already."""
        self._post(partial(self._exchange.abort_incoming, transfer_id, error))

    def _accept(self, command: Callable[[], None], places: _Places) -> None:
        if not self._post(command):
            places.give_back()
            raise Unavailable("the KV link is not running")

    def _post(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if not self._accepting:
                return False
            self._inbox.append(command)
        self._transport.wake()
        return True

    # The thread.

    def _run(self) -> None:
        error: PdserveError = TransferError("the KV link was closed")
        try:
            while self._accepting:
                self.turn(self.wait_s())
        except Exception as problem:  # noqa: BLE001 - the loop's supervisor: nothing may end without its on_end
            self._stats.internal_errors += 1
            self._log.exception("the KV link broke")
            error = TransferError(f"the KV link broke: {problem!r}")
        with self._lock:
            self._accepting = False
        self._run_inbox()  # what was accepted before gets its on_end too
        self._exchange.shut_down(error)

    def turn(self, wait_s: float) -> None:
        """Wait at most `wait_s` for frames, then do what is due: the inbox, frames, timers. Who has waited already (a
        simulation) says for how long that was meant to take."""
        events = self._transport.receive(wait_s)
        self._exchange.listened(wait_s)
        self._run_inbox()  # first: what answers a ticket must find its `expect` done
        for event in events:
            self._exchange.on_event(event)
        self._exchange.tick()

    def _run_inbox(self) -> None:
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()

    def wait_s(self) -> float:
        """How long the next turn may wait. While there are transfers, no longer than until a sign of life is due: time
        in which nobody listened is told from silence only where it is longer than the wait that was meant."""
        deadline = self._exchange.next_deadline()
        if self._inbox:
            return 0.0
        if deadline is None:
            return _LONGEST_WAIT_S
        return min(max(deadline - self._clock.now(), 0.0), self._config.ping_interval_ms / 1000, _LONGEST_WAIT_S)


class _Places:
    """How many transfers there may be at once, counted from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.taken = 0

    def take_until(self, on_end: Callable[[_Outcome], None]) -> Callable[[_Outcome], None]:
        """Take a place; the returned callback gives it back, then calls `on_end`. Raises ResourceExhausted."""
        with self._lock:
            if self.taken >= self._limit:
                raise ResourceExhausted(f"{self.taken} KV transfers are under way, which is the limit")
            self.taken += 1

        def ended(outcome: _Outcome) -> None:
            self.give_back()
            on_end(outcome)

        return ended

    def give_back(self) -> None:
        with self._lock:
            self.taken -= 1


def _check_limits(kv_format: KVFormat, config: TransferConfig) -> None:
    token_bytes, frame_bytes = kv_format.payload_bytes(1), config.max_frame_bytes
    if not token_bytes <= frame_bytes <= min(config.window_bytes, MAX_PAYLOAD_BYTES):
        raise ConfigError(
            f"transfer.max_frame_bytes = {frame_bytes}: must be at least one token's KV of a layer ({token_bytes}) and "
            f"at most transfer.window_bytes ({config.window_bytes}) and {MAX_PAYLOAD_BYTES}"
        )
