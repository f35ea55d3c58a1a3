"""How a stream outlives its router: what to ask another one for, and when. Pure.

The first message of a stream says all that the request was made into; with the token ids received so far, any router
gives the rest of the same stream.
"""

from __future__ import annotations

import uuid
from typing import Final

from pdserve.client.stream import StreamFold
from pdserve.errors import DeadlineExceeded, PdserveError, Unavailable
from pdserve.rpc import inference_pb2 as pb

MAX_LOSSES: Final = 20  # of its connection, after which a stream gives up
ENDED: Final = "the stream was cancelled, or its client closed"


class ConnectionLost(Unavailable):
    """Nobody answered, or the answer broke off: not a refusal by a router."""


def identified(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request with an id of its own, so that it can be asked for again."""
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    return request


def may_resume(error: PdserveError, others: bool) -> bool:
    """Whether to ask again. A router that refuses because it is shutting down, or has no worker, is only one of several
    where there are `others`."""
    return isinstance(error, ConnectionLost) or (others and isinstance(error, Unavailable))


def time_left_s(deadline_s: float | None, now: float) -> float | None:
    """What is left of a stream's time for another call; None where it has no limit. Raises DeadlineExceeded."""
    if deadline_s is None:
        return None
    if deadline_s <= now:
        raise DeadlineExceeded("the time was over when another router was found")
    return deadline_s - now


def resumption(request: pb.GenerateRequest, fold: StreamFold) -> pb.GenerateRequest:
    """What to send to go on where the stream broke off."""
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.resume.SetInParent()
    if fold.started is not None:
        again.model = fold.started.model
        again.prompt_token_ids.CopyFrom(pb.TokenIds(ids=fold.started.prompt_token_ids))
        again.sampling.seed = fold.started.seed
        again.resume.outputs.extend(pb.TokenIds(ids=token_ids) for token_ids in fold.token_ids())
        again.resume.states.extend(fold.resume_states())
    return again
