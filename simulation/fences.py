"""Watches that frames of another epoch change nothing: a sender whose time is over may say what it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtransfer.exchange import Exchange
from kvtransfer.frames import Frame, Received
from kvtransfer.incoming import IncomingTransfer
from kvtransfer.outgoing import OutgoingTransfer
from kvtransfer.transports.base import Peer
from simulation.oracle import Violation


def watch(exchange: Exchange) -> None:
    """Look at the transfer before and after each frame that is not of its epoch."""
    to_receiver, to_sender = exchange._to_receiver, exchange._to_sender

    def watched_receiver(peer: Peer, received: Received) -> None:
        incoming = exchange._incoming.get(received.frame.transfer)
        stale = incoming is not None and received.frame.epoch != incoming._receiver.epoch
        state = _of_receiver(incoming) if stale and incoming is not None else None
        to_receiver(peer, received)
        if state is not None and incoming is not None:
            _compare(state, _of_receiver(incoming), received.frame)

    def watched_sender(peer: Peer, frame: Frame) -> None:
        outgoing = exchange._outgoing.get(frame.transfer)
        stale = outgoing is not None and frame.epoch != outgoing._offer.epoch
        state = _of_sender(outgoing) if stale and outgoing is not None else None
        to_sender(peer, frame)
        if state is not None and outgoing is not None:
            _compare(state, _of_sender(outgoing), frame)

    _replace(exchange, "_to_receiver", watched_receiver)
    _replace(exchange, "_to_sender", watched_sender)


def _replace(exchange: Exchange, name: str, call: Callable[..., None]) -> None:
    setattr(exchange, name, call)


def _compare(before: Any, after: Any, frame: Frame) -> None:
    if before != after:
        raise Violation(f"a {type(frame).__name__.upper()} of epoch {frame.epoch} changed a transfer of another epoch")


def _of_receiver(incoming: IncomingTransfer) -> Any:
    receiver = incoming._receiver
    covered = [list(ranges) for ranges in receiver._covered]
    return (
        receiver.state,
        receiver._silence.since,
        covered,
        receiver.credit.granted,
        receiver.credit.consumed,
        incoming._peer,
    )


def _of_sender(outgoing: OutgoingTransfer) -> Any:
    sender = outgoing._sender
    return sender.state, sender._silence.since, sender.credit.granted, sender.credit.spent, len(sender._queue)
