"""The gRPC front: pdserve.v1.Inference. Protos become requests and calls of the router, and events become protos.

What a request means, and what its stream says, is `generation.py`'s. The client going away, in whatever state, ends the
request. Errors become a gRPC status with details (the wrong field, when to try again).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from pdserve import logs
from pdserve.errors import Cancelled, InvalidArgument, NotFound, PdserveError, ResourceExhausted
from pdserve.rpc import convert
from pdserve.rpc import inference_pb2 as pb
from pdserve.rpc.inference_pb2_grpc import InferenceServicer
from pdserve.types import Finish, FinishReason, SampledToken
from router.actions import ResumeState, StateChanged
from router.generation import (
    AttemptLoop,
    ChatPrompt,
    GenerationEvent,
    GenerationFinished,
    GenerationService,
    GenerationStarted,
    PromptInput,
    ResumePoint,
    TextDelta,
    TextPrompt,
    TokenPrompt,
)
from router.status import ModelStatus, RouterStatus, WorkerState, WorkerStatus
from router.text import ChatMessage, Tokenizer
from router.validation import GenerateParams

_log = logs.logger("front")

_MAX_ERROR_BYTES = 1_000  # thrice that much as it is sent, and gRPC takes 8 KiB of all metadata

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class ServedRouter(AttemptLoop, Protocol):
    """What the front asks of the router."""

    def cancel(self, request_id: str, error: PdserveError | None = None) -> bool: ...

    def drain_worker(self, worker_id: str, cancel: bool) -> None: ...

    async def model_status(self) -> ModelStatus: ...

    def status(self) -> RouterStatus: ...


class Frontend(InferenceServicer):
    """The servicer. Stateless but for the calls that are open."""

    def __init__(self, router: ServedRouter, tokenizer: Tokenizer) -> None:
        self._router = router
        self._generations = GenerationService(router, tokenizer)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            generation = await self._generations.start(prompt(request), params(request), resume_point(request))
        except PdserveError as error:
            await _abort(context, error)
        try:
            async for event in generation:
                yield response(event)
        except PdserveError as error:
            await _abort(context, error)
        finally:
            generation.close()

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        if not self._router.cancel(request.request_id, Cancelled(f"request {request.request_id} was aborted")):
            await _abort(context, NotFound(f"request_id: {request.request_id!r} is not in flight at this router"))
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        try:
            return _model_info(await self._router.model_status())
        except PdserveError as error:
            await _abort(context, error)
            raise AssertionError("unreachable") from error

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainWorkerResponse:
        try:
            self._router.drain_worker(request.worker_id, request.cancel)
        except PdserveError as error:
            await _abort(context, error)
        return pb.DrainWorkerResponse()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext) -> pb.ServerInfo:
        return _server_info(self._router.status())


# Requests, from protos.


def prompt(request: pb.GenerateRequest) -> PromptInput:
    match request.WhichOneof("input"):
        case "prompt":
            return TextPrompt(request.prompt)
        case "prompt_token_ids":
            return TokenPrompt(request.prompt_token_ids.ids)
        case "chat":
            return ChatPrompt(tuple(ChatMessage(message.role, message.content) for message in request.chat.messages))
    raise InvalidArgument("prompt", "is missing: set prompt, prompt_token_ids or chat")


def resume_point(request: pb.GenerateRequest) -> ResumePoint | None:
    """None: it is no resumed request."""
    if not request.HasField("resume"):
        return None
    received_ids = tuple(tuple(output.ids) for output in request.resume.outputs)
    return ResumePoint(received_ids, {state.output_index: _resume_state(state) for state in request.resume.states})


def _resume_state(message: pb.ResumeState) -> ResumeState:
    return ResumeState(
        message.prompt_fingerprint,
        message.output_fingerprint,
        not message.inexact,
        message.crashes,
        message.crashed_at,
    )


def params(request: pb.GenerateRequest) -> GenerateParams:
    """A request without an id gets one."""
    sampling = request.sampling

    def given(field: Any) -> Any:
        return getattr(sampling, field) if sampling.HasField(field) else None

    return GenerateParams(
        request_id=request.request_id or uuid.uuid4().hex,
        model=request.model,
        temperature=given("temperature"),
        top_p=given("top_p"),
        top_k=given("top_k"),
        min_p=given("min_p"),
        seed=given("seed"),
        max_tokens=given("max_tokens"),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=given("logprobs"),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        repetition_penalty=given("repetition_penalty"),
        min_tokens=given("min_tokens"),
        logit_bias=tuple(sampling.logit_bias.items()),
        n=given("n"),
    )


# Events, to protos.


def response(event: GenerationEvent) -> pb.GenerateResponse:
    match event:
        case GenerationStarted():
            return pb.GenerateResponse(
                started=pb.Started(
                    request_id=event.request_id,
                    model=event.model,
                    seed=event.seed,
                    prompt_token_ids=event.prompt_ids,
                )
            )
        case TextDelta():
            return pb.GenerateResponse(delta=_delta(event))
        case StateChanged():
            return pb.GenerateResponse(resume_state=_resume_state_to_proto(event))
        case GenerationFinished():
            return pb.GenerateResponse(finished=_finished(event))


def _delta(event: TextDelta) -> pb.Delta:
    return pb.Delta(
        output_index=event.output,
        token_ids=[token.token_id for token in event.tokens],
        text=event.text,
        logprobs=[_logprobs(token) for token in event.tokens if token.logprob is not None],
    )


def _logprobs(token: SampledToken) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=i, logprob=p) for i, p in token.top_logprobs]
    return pb.TokenLogprobs(logprob=token.logprob, top=top)


def _resume_state_to_proto(event: StateChanged) -> pb.ResumeState:
    state = event.state
    return pb.ResumeState(
        output_index=event.output,
        prompt_fingerprint=state.prompt_fingerprint,
        output_fingerprint=state.output_fingerprint,
        inexact=not state.exact,
        crashes=state.crashes,
        crashed_at=state.crashed_at,
    )


def _finished(event: GenerationFinished) -> pb.Finished:
    return pb.Finished(
        outputs=[_output_end(finish) for finish in event.finishes],
        usage=pb.Usage(
            prompt_tokens=event.usage.prompt_tokens,
            completion_tokens=event.usage.completion_tokens,
            cached_tokens=event.usage.cached_tokens,
        ),
        exact=event.exact,
        attempts=event.attempts,
    )


def _output_end(finish: Finish) -> pb.OutputEnd:
    return pb.OutputEnd(
        finish_reason=_FINISH_REASONS[finish.reason], stop=finish.stop, stop_token_id=finish.stop_token_id
    )


def _model_info(status: ModelStatus) -> pb.ModelInfo:
    return pb.ModelInfo(
        model=status.model,
        vocab_size=status.vocab_size,
        max_model_len=status.max_model_len,
        eos_token_ids=status.eos_token_ids,
    )


def _server_info(status: RouterStatus) -> pb.ServerInfo:
    return pb.ServerInfo(
        version=status.version,
        model=status.model,
        grpc_address=status.grpc_address,
        session_address=status.session_address,
        running_requests=status.running_requests,
        pid=status.pid,
        workers=[_worker_status(worker) for worker in status.workers],
    )


def _worker_status(worker: WorkerStatus) -> pb.WorkerStatus:
    lost = worker.state is WorkerState.LOST
    return pb.WorkerStatus(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        role=worker.role.value,
        pid=worker.pid,
        host=worker.host,
        state=worker.state.value,
        queue=worker.queue,
        requests=worker.requests,
        blocks=None if lost else convert.blocks_to_proto(worker.blocks),
        fingerprint=worker.fingerprint,
    )


# Errors, to gRPC's.


def _cut(text: str) -> str:
    """A text as long as a status may be. Clients refuse a longer one, and texts may repeat what a client sent."""
    encoded = text.encode()
    return text if len(encoded) <= _MAX_ERROR_BYTES else encoded[:_MAX_ERROR_BYTES].decode(errors="ignore") + " ..."


async def _abort(context: grpc.aio.ServicerContext, error: PdserveError) -> None:
    """End the call with the error's status and details. Does not return."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=_cut(str(error)))
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=_cut(error.problem))
        status.details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, ResourceExhausted):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        status.details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    if error.code == "INTERNAL":
        _log.error("request failed", error=error)
    await context.abort_with_status(rpc_status.to_status(status))


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
