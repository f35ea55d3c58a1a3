"""Watches from inside what no check from outside would see.

Frames of another epoch change nothing: a sender whose time is over may say what it likes. A worker's control is touched
only in its own thread's turns, and each attempt that is started there ends there once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from kvtransfer.exchange import Exchange
from kvtransfer.frames import Frame, Received
from kvtransfer.incoming import IncomingTransfer
from kvtransfer.outgoing import OutgoingTransfer
from kvtransfer.transports.base import Peer
from pdserve.reports import AttemptEnded, PrefillsLocally
from pdserve.types import Owner
from simulation.oracle import Violation
from simulation.turns import WorkerThreads
from worker.control import Action, Control


def watch_epochs(exchange: Exchange) -> None:
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


def _replace(whose: object, name: str, call: Callable[..., Any]) -> None:
    setattr(whose, name, call)


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


class Attempts:
    """How often a worker has begun something for an owner, and ended it."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._started: Counter[Owner] = Counter()
        self._ended: Counter[Owner] = Counter()

    @property
    def open(self) -> int:
        return (self._started - self._ended).total()

    def start(self, owner: Owner) -> None:
        self._started[owner] += 1

    def end(self, owner: Owner) -> None:
        self._ended[owner] += 1
        if self._ended[owner] > self._started[owner]:
            raise Violation(f"{self._worker} ended {owner} more often than it was started")


def watch_control(control: Control, threads: WorkerThreads, worker: str, counts: Counter[str]) -> Attempts:
    """Let the control and its roles be touched only in its own turns, and count what happens there."""
    attempts = Attempts(worker)
    for role in (control._prefill, control._decode):
        start = role.start

        def started(owner: Owner, *what: Any, start: Callable[..., Any] = start) -> Any:
            attempts.start(owner)
            counts["another sender"] += bool(what) and getattr(what[-1], "epoch", 1) > 1
            return start(owner, *what)

        _replace(role, "start", started)
        for name in [name for name in dir(role) if not name.startswith("_") and callable(getattr(role, name))]:
            _replace(role, name, _in_turn(getattr(role, name), threads))
    perform = control._perform

    def performed(actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, AttemptEnded):
                attempts.end(action.owner)
            elif isinstance(action, PrefillsLocally):
                counts["preempted delivery" if action.reason == "preempted" else "local prefill"] += 1
        perform(actions)

    _replace(control, "_perform", performed)
    _OWN_THREAD[control] = threads
    control.__class__ = _WatchedControl
    return attempts


_OWN_THREAD: WeakKeyDictionary[Control, WorkerThreads] = WeakKeyDictionary()


class _WatchedControl(Control):
    """A control whose attributes are set in its own turns only."""

    def __setattr__(self, name: str, value: object) -> None:
        _OWN_THREAD[self].check_control()
        super().__setattr__(name, value)


def _in_turn(call: Callable[..., Any], threads: WorkerThreads) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        threads.check_control()
        return call(*args)

    return checked
