"""A worker's side of the session's messages: reports become messages, a router's messages become calls.

Knows no stream, loop or thread: who carries the messages is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pdserve import logs
from pdserve.errors import PdserveError, error_from_code
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.types import Finish, Owner, SampledToken, SamplingParams, Ticket

_log = logs.logger("session")


class SessionHandler(Protocol):
    """What a router asks of a worker."""

    def start_decode(
        self,
        owner: Owner,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams,
        local_prefill: bool,
        share: Owner | None,
    ) -> None: ...

    def start_prefill(
        self,
        owner: Owner,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams,
        ticket: Ticket,
    ) -> None: ...

    def sender_lost(self, owner: Owner, epoch: int, error: PdserveError) -> None: ...

    def prefill_locally(self, owner: Owner) -> None: ...

    def abort(self, owner: Owner) -> None: ...

    def drain(self, cancel: bool) -> None: ...

    def drain_noted(self) -> None: ...

    def router_lost(self, router: str) -> None: ...


class Reports:
    """What a worker's services say, as messages. `send(router, message)` takes them on; any thread."""

    def __init__(self, send: Callable[[str, pb.WorkerMessage], None]) -> None:
        self._send = send

    def ticket(self, owner: Owner, ticket: Ticket) -> None:
        self._send(owner.router, pb.WorkerMessage(ticket=convert.ticket_to_proto(owner, ticket)))

    def local_prefill(self, owner: Owner, reason: str) -> None:
        message = pb.LocalPrefill(owner=convert.owner_to_proto(owner), reason=reason)
        self._send(owner.router, pb.WorkerMessage(local_prefill=message))

    def tokens(self, batch: Iterable[tuple[Owner, int, Sequence[SampledToken]]]) -> None:
        """New tokens of all requests of a step: (owner, position of the first in the output, tokens)."""
        by_router: dict[str, pb.Tokens] = {}
        for owner, first_position, tokens in batch:
            by_router.setdefault(owner.router, pb.Tokens()).batch.append(
                pb.OwnerTokens(
                    owner=convert.owner_to_proto(owner),
                    first_position=first_position,
                    tokens=[convert.token_to_proto(token) for token in tokens],
                )
            )
        for router, message in by_router.items():
            self._send(router, pb.WorkerMessage(tokens=message))

    def terminal(self, owner: Owner, outcome: Finish | PdserveError | None) -> None:
        self._send(owner.router, pb.WorkerMessage(terminal=convert.terminal_to_proto(owner, outcome)))


def deliver(message: pb.RouterMessage, handler: SessionHandler) -> None:
    """Carry out a router's message."""
    match message.WhichOneof("message"):
        case "start_decode":
            start = message.start_decode
            share = convert.owner_from_proto(start.share) if start.HasField("share") else None
            handler.start_decode(*_sequence(start.sequence), start.local_prefill, share)
        case "start_prefill":
            start = message.start_prefill
            handler.start_prefill(*_sequence(start.sequence), convert.ticket_from_proto(start.ticket))
        case "sender_lost":
            lost = message.sender_lost
            error = error_from_code(lost.error_code, lost.error_message)
            handler.sender_lost(convert.owner_from_proto(lost.owner), lost.epoch, error)
        case "prefill_locally":
            handler.prefill_locally(convert.owner_from_proto(message.prefill_locally.owner))
        case "abort":
            handler.abort(convert.owner_from_proto(message.abort.owner))
        case "drain":
            handler.drain(message.drain.cancel)
        case "drain_noted":
            handler.drain_noted()
        case "renew" | "welcome":
            pass
        case unknown:
            _log.warning("unknown message from a router", kind=unknown)


def _sequence(message: pb.Sequence) -> tuple[Owner, list[int], list[int], SamplingParams]:
    return (
        convert.owner_from_proto(message.owner),
        list(message.prompt_ids),
        list(message.output_ids),
        convert.sampling_from_proto(message.sampling),
    )
