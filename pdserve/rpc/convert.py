"""Between the protos of pdserve.cluster.v1 and the values of pdserve.types. One pair of functions a type."""

from __future__ import annotations

from pdserve import types
from pdserve.errors import PdserveError, ProtocolError, TransferError, error_from_code
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import inference_pb2

SESSION_VERSION = 1


def owner_to_proto(owner: types.Owner) -> pb.Owner:
    return pb.Owner(
        tenant=owner.tenant,
        request_id=owner.request_id,
        router=owner.router,
        attempt=owner.attempt,
        output=owner.output,
    )


def owner_from_proto(message: pb.Owner) -> types.Owner:
    return types.Owner(message.tenant, message.request_id, message.router, message.attempt, message.output)


def worker_to_hello(info: types.WorkerInfo) -> pb.Hello:
    return pb.Hello(
        version=SESSION_VERSION,
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role=info.role.value,
        pid=info.pid,
        host=info.host,
        kv_endpoint=info.kv_endpoint,
        fingerprint=info.fingerprint,
        model=info.model,
        vocab_size=info.limits.vocab_size,
        max_model_len=info.limits.max_model_len,
        pool_tokens=info.limits.pool_tokens,
        eos_token_ids=info.eos_token_ids,
        crash_report=info.crash_report,
    )


def worker_from_hello(message: pb.Hello) -> types.WorkerInfo:
    """Raises ProtocolError where the worker speaks another version or names an unknown role."""
    if message.version != SESSION_VERSION:
        raise ProtocolError(f"session version {message.version}: this router speaks {SESSION_VERSION}")
    if message.role not in {role.value for role in types.Role}:
        raise ProtocolError(f"role {message.role!r}: must be one of {', '.join(types.Role)}")
    if not message.worker_id or not message.incarnation:
        raise ProtocolError("hello without worker_id or incarnation")
    return types.WorkerInfo(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        role=types.Role(message.role),
        pid=message.pid,
        host=message.host,
        kv_endpoint=message.kv_endpoint,
        fingerprint=message.fingerprint,
        model=message.model,
        limits=types.ModelLimits(message.vocab_size, message.max_model_len, message.pool_tokens),
        eos_token_ids=tuple(message.eos_token_ids),
        crash_report=message.crash_report,
    )


def blocks_to_proto(blocks: types.BlockCounts) -> inference_pb2.BlockCounts:
    return inference_pb2.BlockCounts(free=blocks.free, cached=blocks.cached, leased=blocks.leased)


def load_to_proto(load: types.Load) -> pb.Load:
    return pb.Load(
        queued=load.queued, running=load.running, blocks=blocks_to_proto(load.blocks), draining=load.draining
    )


def load_from_proto(message: pb.Load) -> types.Load:
    blocks = types.BlockCounts(message.blocks.free, message.blocks.cached, message.blocks.leased)
    return types.Load(queued=message.queued, running=message.running, blocks=blocks, draining=message.draining)


def sampling_to_proto(params: types.SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
    )


def sampling_from_proto(message: pb.Sampling) -> types.SamplingParams:
    return types.SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        min_tokens=message.min_tokens,
        logit_bias=tuple((item.token_id, item.bias) for item in message.logit_bias),
    )


def ticket_to_proto(owner: types.Owner, ticket: types.Ticket) -> pb.Ticket:
    return pb.Ticket(
        owner=owner_to_proto(owner),
        transfer_id=ticket.transfer_id,
        epoch=ticket.epoch,
        endpoint=ticket.endpoint,
        cached_tokens=ticket.cached_tokens,
        ttl_ms=ticket.ttl_ms,
    )


def ticket_from_proto(message: pb.Ticket) -> types.Ticket:
    return types.Ticket(
        transfer_id=message.transfer_id,
        epoch=message.epoch,
        endpoint=message.endpoint,
        cached_tokens=message.cached_tokens,
        ttl_ms=message.ttl_ms,
    )


def token_to_proto(token: types.SampledToken) -> pb.Token:
    top = [inference_pb2.TopLogprob(token_id=i, logprob=p) for i, p in token.top_logprobs]
    return pb.Token(token_id=token.token_id, logprob=token.logprob, top=top)


def token_from_proto(message: pb.Token) -> types.SampledToken:
    logprob = message.logprob if message.HasField("logprob") else None
    return types.SampledToken(message.token_id, logprob, tuple((t.token_id, t.logprob) for t in message.top))


def terminal_to_proto(owner: types.Owner, outcome: types.Finish | PdserveError | None, epoch: int = 0) -> pb.Terminal:
    message = pb.Terminal(owner=owner_to_proto(owner), epoch=epoch)
    if isinstance(outcome, PdserveError):
        message.error_code, message.error_message = outcome.code, str(outcome)
    elif outcome is not None:
        message.finish_reason = outcome.reason.value
        if outcome.stop_token_id is not None:
            message.stop_token_id = outcome.stop_token_id
    return message


def terminal_from_proto(message: pb.Terminal) -> types.Finish | PdserveError | None:
    if message.error_code == TransferError.code:  # a worker that says so is there: what it missed is the other side
        return TransferError(message.error_message)
    if message.error_code:
        return error_from_code(message.error_code, message.error_message)
    if not message.finish_reason:
        return None
    if message.finish_reason not in {reason.value for reason in types.FinishReason}:
        raise ProtocolError(f"finish_reason {message.finish_reason!r} is unknown")
    stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
    return types.Finish(types.FinishReason(message.finish_reason), stop_token_id)
