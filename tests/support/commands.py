"""A router's messages to a worker, from values."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import PdserveError
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.types import Owner, SamplingParams, Ticket


def start_decode(
    owner: Owner,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
    *,
    local_prefill: bool = False,
    share: Owner | None = None,
) -> pb.RouterMessage:
    start = pb.StartDecode(
        sequence=_sequence(owner, prompt_ids, output_ids, params),
        local_prefill=local_prefill,
        share=None if share is None else convert.owner_to_proto(share),
    )
    return pb.RouterMessage(start_decode=start)


def start_prefill(
    owner: Owner, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams, ticket: Ticket
) -> pb.RouterMessage:
    start = pb.StartPrefill(
        sequence=_sequence(owner, prompt_ids, output_ids, params), ticket=convert.ticket_to_proto(owner, ticket)
    )
    return pb.RouterMessage(start_prefill=start)


def sender_lost(owner: Owner, epoch: int, error: PdserveError) -> pb.RouterMessage:
    lost = pb.SenderLost(
        owner=convert.owner_to_proto(owner), epoch=epoch, error_code=error.code, error_message=str(error)
    )
    return pb.RouterMessage(sender_lost=lost)


def prefill_locally(owner: Owner) -> pb.RouterMessage:
    return pb.RouterMessage(prefill_locally=pb.PrefillLocally(owner=convert.owner_to_proto(owner)))


def abort(owner: Owner) -> pb.RouterMessage:
    return pb.RouterMessage(abort=pb.Abort(owner=convert.owner_to_proto(owner)))


def _sequence(
    owner: Owner, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> pb.Sequence:
    return pb.Sequence(
        owner=convert.owner_to_proto(owner),
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        sampling=convert.sampling_to_proto(params),
    )
