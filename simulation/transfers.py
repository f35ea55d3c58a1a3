"""Watches whole transfers from both of their ends.

Who is told that everything has arrived must be told the truth; a sender learns what became of its transfer from its
socket and not from its clock; who speaks with a dead worker notices in time; and what a lost sender has brought is not
sent again by the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kvtransfer.actions import TakenOver
from kvtransfer.exchange import Exchange
from kvtransfer.frames import Layer, Open, Received
from kvtransfer.receiver import Expectation, ReceiverState
from kvtransfer.transports.base import Peer
from pdserve.errors import PdserveError
from pdserve.types import Ticket
from simulation.network import KvNetwork
from simulation.oracle import Violation
from simulation.timeline import Process

_ON_ITS_WAY_S = 1.5  # how long a frame of somebody who has died may still take
_NOTICE_S = 0.2  # of a ttl that is over


class Transfers:
    """Of one run. `sound`: what is sent on the KV wire arrives, once, whole and in order."""

    def __init__(self, network: KvNetwork, ttl_s: float, sound: bool, counts: Counter[str]) -> None:
        self._network = network
        self._bearable_s = ttl_s + _ON_ITS_WAY_S + _NOTICE_S
        self._sound = sound
        self._counts = counts
        self._received: set[tuple[bytes, int]] = set()  # transfers and the epochs in which they were completed

    def watch(self, exchange: Exchange) -> None:
        """From now on, every transfer of this worker's."""
        to_receiver, renew = exchange._to_receiver, exchange.renew
        open_outgoing, expect = exchange.open_outgoing, exchange.expect

        def opened(offer: Open, ticket: Ticket, on_end: Callable[[Any], None]) -> None:
            open_outgoing(offer, ticket, partial(self._sent, offer, on_end))

        def expected(what: Expectation, need_blocks: Any, lost: Any, on_end: Callable[[Any], None]) -> None:
            expect(what, need_blocks, lost, partial(self._ended, exchange, what.transfer, on_end))

        def renewed(transfer_id: bytes, on_epoch: Callable[[int], None]) -> None:
            incoming = exchange._incoming.get(transfer_id)
            kept = incoming is not None and any(any(True for _ in each) for each in incoming._receiver._covered)
            self._counts["kept for the next sender"] += kept
            renew(transfer_id, on_epoch)

        def came(peer: Peer, received: Received) -> None:
            if self._sound and isinstance(received.frame, Layer):
                self._check_new(exchange, received.frame)
            to_receiver(peer, received)

        for name, call in (("open_outgoing", opened), ("expect", expected), ("renew", renewed), ("_to_receiver", came)):
            setattr(exchange, name, call)

    def check(self, process: Process, exchange: Exchange) -> None:
        """Nobody waits for somebody who is dead for longer than a ttl in which it could have noticed."""
        died_at = self._network.died_at
        if not died_at:
            return
        now = process.timeline.now()
        peers = [each.peer for each in exchange._outgoing.values() if not each.ended and each._opened]
        peers += [
            each._peer
            for each in exchange._incoming.values()
            if each._peer and not each.ended and each._receiver.state is not ReceiverState.SENDERLESS
        ]
        for peer in peers:
            since = max(died_at.get(peer[1:].decode(), now), process.resumed_at)
            if now > since + self._bearable_s:
                raise Violation(f"{process.name} has not noticed in {now - since:.3f} s that {peer.decode()} is dead")

    def _sent(self, offer: Open, on_end: Callable[[Any], None], outcome: PdserveError | None) -> None:
        arrived = (offer.transfer, offer.epoch) in self._received
        if outcome is None and not arrived:
            raise Violation("a sender was told that everything has arrived, and it has not")
        if outcome is not None and arrived and self._sound and "silent" in outcome.message:
            raise Violation(f"everything has arrived and was acknowledged, and its sender ends with {outcome!r}")
        on_end(outcome)

    def _ended(self, exchange: Exchange, transfer: bytes, on_end: Callable[[Any], None], outcome: Any) -> None:
        if not isinstance(outcome, (PdserveError, TakenOver)):
            self._received.add((transfer, exchange._incoming[transfer]._receiver.epoch))
        on_end(outcome)

    def _check_new(self, exchange: Exchange, frame: Layer) -> None:
        incoming = exchange._incoming.get(frame.transfer)
        if incoming is None or frame.epoch != incoming._receiver.epoch or incoming.ended:
            return
        for start, stop in incoming._receiver._covered[frame.layer]:
            if start < frame.token_stop and frame.token_start < stop:
                raise Violation(f"layer {frame.layer} of tokens [{start}, {stop}) was there, and is sent again")
