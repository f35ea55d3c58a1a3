"""A worker's reports as messages of the session: the only place where they become protos."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.reports import AttemptEnded, PrefillsLocally, TicketIssued, TokensSampled
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.types import Owner, SamplingParams


def tokens_messages(reports: Iterable[TokensSampled]) -> dict[str, pb.WorkerMessage]:
    """One message for each router, with the new tokens of all its requests."""
    by_router: dict[str, pb.WorkerMessage] = {}
    for report in reports:
        message = by_router.setdefault(report.owner.router, pb.WorkerMessage(tokens=pb.Tokens()))
        message.tokens.batch.append(
            pb.OwnerTokens(
                owner=convert.owner_to_proto(report.owner),
                first_position=report.first_position,
                tokens=[convert.token_to_proto(token) for token in report.tokens],
            )
        )
    return by_router


def message_of(report: TicketIssued | PrefillsLocally | AttemptEnded) -> pb.WorkerMessage:
    match report:
        case TicketIssued():
            return pb.WorkerMessage(ticket=convert.ticket_to_proto(report.owner, report.ticket))
        case PrefillsLocally():
            local = pb.LocalPrefill(owner=convert.owner_to_proto(report.owner), reason=report.reason)
            return pb.WorkerMessage(local_prefill=local)
        case AttemptEnded():
            return pb.WorkerMessage(terminal=convert.terminal_to_proto(report.owner, report.outcome, report.epoch))


def sequence_of(message: pb.Sequence) -> tuple[Owner, list[int], list[int], SamplingParams]:
    """Owner, prompt, accepted output and sampling."""
    return (
        convert.owner_from_proto(message.owner),
        list(message.prompt_ids),
        list(message.output_ids),
        convert.sampling_from_proto(message.sampling),
    )
