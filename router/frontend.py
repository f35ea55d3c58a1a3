"""The gRPC front: pdserve.v1.Inference. Protos in, protos out; text and ids meet here.

A Generate call: check and tokenise -> hand over to the router -> Started, then Deltas as tokens come, then Finished.
The client going away, in whatever state, ends the request. Errors become a gRPC status with details (the wrong field,
when to try again).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from pdserve import logs
from pdserve.errors import Cancelled, InvalidArgument, NotFound, PdserveError, ResourceExhausted
from pdserve.rpc import inference_pb2 as pb
from pdserve.rpc.inference_pb2_grpc import InferenceServicer
from pdserve.types import Finish, FinishReason, ModelLimits, SampledToken, Usage
from router.actions import Accept, End, Request, ResumeState, StateChanged, StreamEvent
from router.text import ChatMessage, Detokenizer, StopStrings, Tokenizer
from router.validation import GenerateParams, ResolvedRequest, check_chat, check_prompt_text, resolve_request

_log = logs.logger("front")

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class Events(Protocol):
    """What happens to one request: Accepts and StateChanged, then an End."""

    request_id: str

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...


class RouterCalls(Protocol):
    """What the front asks of the router."""

    model: str

    async def limits(self) -> ModelLimits: ...

    def submit(self, request: Request, resumed: bool) -> Events: ...

    def abandon(self, stream: Events) -> None: ...

    def drain_worker(self, worker_id: str, cancel: bool) -> None: ...

    def cancel(self, request_id: str, error: PdserveError | None = None) -> bool: ...

    def finish(self, stream: Events, output: int, finish: Finish) -> None: ...

    def model_info(self, limits: ModelLimits) -> pb.ModelInfo: ...

    def server_info(self) -> pb.ServerInfo: ...


class Output:
    """One output's text side: ids in, text out, up to a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...], min_tokens: int, with_logprobs: bool, index: int = 0
    ) -> None:
        """No stop string that begins within the first `min_tokens` tokens counts."""
        self.index = index
        self.end: End | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._with_logprobs = with_logprobs
        self.token_count = 0

    @property
    def stop(self) -> str | None:
        """The stop string that matched."""
        return self._stops.matched

    def push(self, tokens: Iterable[SampledToken]) -> pb.Delta:
        """The delta these tokens make. Tokens after the one that completed a stop string are dropped."""
        delta = pb.Delta(output_index=self.index)
        for token in tokens:
            text, matched = self._detokenizer.push([token.token_id]), None
            if self.token_count >= self._min_tokens:
                text, matched = self._stops.push(text)
            delta.text += text
            delta.token_ids.append(token.token_id)
            if self._with_logprobs and token.logprob is not None:
                delta.logprobs.append(_logprobs(token))
            self.token_count += 1
            if matched is not None:
                break
        return delta

    def replay(self, token_ids: Iterable[int]) -> None:
        """Stand where another router's output stood after these ids; their text went out there."""
        self.push(SampledToken(token_id) for token_id in token_ids)

    def finish(self) -> str:
        """The text that was held back and is final now."""
        text, _ = self._stops.push(self._detokenizer.finish())
        return text if self._stops.matched is not None else text + self._stops.finish()


class Frontend(InferenceServicer):
    """The servicer. Stateless but for the calls that are open."""

    def __init__(self, router: RouterCalls, tokenizer: Tokenizer) -> None:
        self._router = router
        self._tokenizer = tokenizer

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            resolved = await self._resolve(request)
            resumed = request.HasField("resume")
            events = self._router.submit(work_of(resolved, request), resumed)
        except PdserveError as error:
            await _abort(context, error)
        try:
            yield pb.GenerateResponse(started=_started(resolved))
            async for response in self._stream(resolved, events):
                yield response
        except PdserveError as error:
            await _abort(context, error)
        finally:
            self._router.abandon(events)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        if not self._router.cancel(request.request_id, Cancelled(f"request {request.request_id} was aborted")):
            await _abort(context, NotFound(f"request_id: {request.request_id!r} is not in flight at this router"))
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        try:
            return self._router.model_info(await self._router.limits())
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
        return self._router.server_info()

    async def _resolve(self, request: pb.GenerateRequest) -> ResolvedRequest:
        received_ids = [list(output.ids) for output in request.resume.outputs]
        field, prompt_ids = await asyncio.to_thread(self._prompt_ids, request)  # a long prompt takes a while
        params = _params(request.request_id or uuid.uuid4().hex, request.model, request.sampling)
        limits = await self._router.limits()
        return resolve_request(
            params, prompt_ids, limits, self._router.model, prompt_field=field, received_ids=received_ids
        )

    def _prompt_ids(self, request: pb.GenerateRequest) -> tuple[str, list[int]]:
        """The prompt as ids, and the field it came in."""
        match request.WhichOneof("input"):
            case "prompt":
                check_prompt_text(request.prompt)
                return "prompt", self._tokenizer.encode(request.prompt)
            case "prompt_token_ids":
                return "prompt_token_ids", list(request.prompt_token_ids.ids)
            case "chat":
                messages = [ChatMessage(message.role, message.content) for message in request.chat.messages]
                check_chat(messages)
                return "chat", self._tokenizer.apply_chat_template(messages)
        raise InvalidArgument("prompt", "is missing: set prompt, prompt_token_ids or chat")

    async def _stream(self, resolved: ResolvedRequest, events: Events) -> AsyncIterator[pb.GenerateResponse]:
        outputs = self._outputs(resolved)
        for output in outputs:
            self._finish_at_stop(events, output)
        async for event in events:
            output = outputs[event.output]
            if isinstance(event, StateChanged):
                yield pb.GenerateResponse(resume_state=_resume_state(event))
            elif isinstance(event, Accept) and output.stop is None:
                yield pb.GenerateResponse(delta=output.push(event.tokens))
                self._finish_at_stop(events, output)
            elif isinstance(event, End):
                if isinstance(event.outcome, PdserveError):
                    raise event.outcome
                output.end = event
                if output.stop is None and (rest := output.finish()):
                    yield pb.GenerateResponse(delta=pb.Delta(output_index=output.index, text=rest))
        yield pb.GenerateResponse(finished=_finished(resolved, outputs))

    def _outputs(self, resolved: ResolvedRequest) -> list[Output]:
        """The outputs where the client has them."""
        sampling, with_logprobs = resolved.sampling, resolved.sampling.logprobs is not None
        outputs = [
            Output(self._tokenizer, resolved.stop, sampling.min_tokens, with_logprobs, index)
            for index in range(len(resolved.received_ids))
        ]
        for output, token_ids in zip(outputs, resolved.received_ids, strict=True):
            output.replay(token_ids)
        return outputs

    def _finish_at_stop(self, events: Events, output: Output) -> None:
        if output.stop is not None:
            self._router.finish(events, output.index, Finish(FinishReason.STOP, stop=output.stop))


def work_of(resolved: ResolvedRequest, request: pb.GenerateRequest) -> Request:
    """What the attempt loop is asked for."""
    resume_states: tuple[ResumeState, ...] = ()
    if request.HasField("resume"):
        known = {message.output_index: message for message in request.resume.states}
        resume_states = tuple(_resume_state_of(known.get(index)) for index in range(len(resolved.received_ids)))
    return Request(
        resolved.request_id, resolved.prompt_ids, resolved.sampling, resolved.received_ids, resume_states=resume_states
    )


def _resume_state_of(message: pb.ResumeState | None) -> ResumeState:
    if message is None:
        return ResumeState()
    return ResumeState(
        message.prompt_fingerprint,
        message.output_fingerprint,
        not message.inexact,
        message.crashes,
        message.crashed_at,
    )


def _resume_state(event: StateChanged) -> pb.ResumeState:
    state = event.state
    return pb.ResumeState(
        output_index=event.output,
        prompt_fingerprint=state.prompt_fingerprint,
        output_fingerprint=state.output_fingerprint,
        inexact=not state.exact,
        crashes=state.crashes,
        crashed_at=state.crashed_at,
    )


def _params(request_id: str, model: str, sampling: pb.SamplingParams) -> GenerateParams:
    def given(field: str) -> float | int | None:
        return getattr(sampling, field) if sampling.HasField(field) else None

    return GenerateParams(
        request_id=request_id,
        model=model,
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


def _started(resolved: ResolvedRequest) -> pb.Started:
    return pb.Started(
        request_id=resolved.request_id,
        model=resolved.model,
        seed=resolved.sampling.seed,
        prompt_token_ids=resolved.prompt_ids,
    )


def _finished(resolved: ResolvedRequest, outputs: list[Output]) -> pb.Finished:
    usage = Usage(len(resolved.prompt_ids), sum(output.token_count for output in outputs))
    ends = [output.end for output in outputs if output.end is not None]
    return pb.Finished(
        outputs=[_output_end(output) for output in outputs],
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        exact=all(end.exact for end in ends),
        attempts=max(end.attempts for end in ends),
    )


def _output_end(output: Output) -> pb.OutputEnd:
    assert output.end is not None
    finish = output.end.outcome
    assert isinstance(finish, Finish)
    if output.stop is not None:  # also where the worker's own end and the text's came together
        finish = Finish(FinishReason.STOP, stop=output.stop)
    return pb.OutputEnd(
        finish_reason=_FINISH_REASONS[finish.reason], stop=finish.stop, stop_token_id=finish.stop_token_id
    )


def _logprobs(token: SampledToken) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=i, logprob=p) for i, p in token.top_logprobs]
    return pb.TokenLogprobs(logprob=token.logprob, top=top)


async def _abort(context: grpc.aio.ServicerContext, error: PdserveError) -> None:
    """End the call with the error's status and details. Does not return."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=str(error))
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.problem)
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
