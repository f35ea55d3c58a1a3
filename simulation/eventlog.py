"""What happened in a run, in lines that a person can read: virtual time, process, what. Off, it costs nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from kvtransfer.frames import FrameError, decode
from kvtransfer.transports.base import Message
from pdserve.clock import Clock, ManualClock
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import inference_pb2
from simulation.timeline import Event

_SHOWN = frozenset(("epoch", "layer", "token_start", "token_stop", "spent", "total", "reply", "ranges", "message"))
_PRODUCT = logging.getLogger("pdserve")


class EventLog:
    """Keeps lines if it is on. `clock` is the run's."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.clock: Clock = ManualClock()
        self.lines: list[str] = []

    def event(self, event: Event) -> None:
        if self.on:
            self.write(event.process.name if event.process else "world", f"{event.label} {_describe(event.detail)}")

    def write(self, who: str, what: str) -> None:
        if self.on:
            self.lines.append(f"{self.clock.now():10.6f} {who:14} {what}")

    @contextmanager
    def product(self) -> Iterator[None]:
        """Take what the product logs into this log; where it is off, let the product log nothing."""
        handler = _Lines(self)
        level, propagate = _PRODUCT.level, _PRODUCT.propagate
        _PRODUCT.setLevel(logging.DEBUG if self.on else logging.CRITICAL + 1)
        _PRODUCT.propagate = False
        _PRODUCT.addHandler(handler)
        try:
            yield
        finally:
            _PRODUCT.removeHandler(handler)
            _PRODUCT.setLevel(level)
            _PRODUCT.propagate = propagate


def _describe(detail: object) -> str:
    match detail:
        case None:
            return ""
        case inference_pb2.GenerateResponse():
            kind = detail.WhichOneof("event")
            return "" if kind in (None, "started") else " ".join(str(getattr(detail, kind)).split())
        case pb.WorkerMessage() | pb.RouterMessage():
            return _describe_message(detail)
        case Message():
            return f"{_describe_frame(detail)} from {detail.peer.decode()[1:].removeprefix('simulated://')}"
    return str(detail)


def _describe_message(message: pb.WorkerMessage | pb.RouterMessage) -> str:
    body = getattr(message, message.WhichOneof("message") or "")
    if isinstance(body, pb.Tokens):
        return ", ".join(f"{_owner(item.owner)} +{len(item.tokens)} at {item.first_position}" for item in body.batch)
    owner = getattr(body, "owner", None) or getattr(getattr(body, "sequence", None), "owner", None)
    fields = ("epoch", "local_prefill", "reason", "finish_reason", "error_code", "error_message")
    known = {name: getattr(body, name) for name in fields if getattr(body, name, "")}
    if isinstance(body, pb.StartPrefill):
        known["epoch"] = body.ticket.epoch
    return f"{_owner(owner) if owner else ''} {' '.join(f'{name}={value}' for name, value in known.items())}"


def _owner(owner: pb.Owner) -> str:
    output = f"[{owner.output}]" if owner.output else ""
    return f"{owner.request_id}{output}@{owner.router}/{owner.attempt}"


def _describe_frame(message: Message) -> str:
    try:
        frame = decode(message.parts).frame
    except FrameError as error:
        return f"damaged ({error})"
    values = {field.name: getattr(frame, field.name) for field in fields(frame) if field.name in _SHOWN}
    shown = " ".join(f"{name}={value}" for name, value in values.items())
    return f"{type(frame).__name__.upper()} {frame.transfer.hex()[:6]} {shown}"


class _Lines(logging.Handler):
    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        self._log.write("", f"  {record.name.removeprefix('pdserve.')}: {record.getMessage()} {fields}")
