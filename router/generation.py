"""What a front serves, whatever protocol it speaks: a request goes in, its text comes out. No proto, no gRPC.

    prompt, parameters ──GenerationService.start──► checked, tokenised, taken by the router: GenerationStarted
    its attempts' events ──Generation.take──► TextDelta and StateChanged, then GenerationFinished

Text and ids meet here: detokenising, stop strings, usage, and where another router's stream goes on. `Generation` is
pure; the service around it waits for what has to be waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.types import Finish, FinishReason, ModelLimits, SampledToken, Usage
from router.actions import Accept, End, Request, ResumeState, StateChanged, StreamEvent
from router.text import ChatMessage, Detokenizer, StopStrings, Tokenizer, TokenText
from router.validation import GenerateParams, ResolvedRequest, check_chat, check_prompt_text, resolve_request

# What goes in.


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]


PromptInput = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What the client of a lost router has: the ids of each output, and the latest resume state of those that had one,
    by output."""

    received_ids: tuple[tuple[int, ...], ...] = ()
    states: Mapping[int, ResumeState] = field(default_factory=dict)


# What comes out, StateChanged besides.


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """What the request was made into: all that is needed to ask for the same again."""

    request_id: str
    model: str
    seed: int
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New tokens of an output, with logprobs where they were asked for. `text` may lag behind them."""

    output: int
    text: str
    tokens: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationFinished:
    """Every output has ended; `finishes` by output. `attempts`: of the output that took most."""

    finishes: tuple[Finish, ...]
    usage: Usage
    exact: bool
    attempts: int


GenerationEvent = GenerationStarted | TextDelta | StateChanged | GenerationFinished


class OutputText:
    """One output's text side: ids in, text out, up to a stop string."""

    def __init__(
        self,
        tokenizer: TokenText,
        stops: tuple[str, ...],
        min_tokens: int,
        with_logprobs: bool,
        index: int = 0,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """No stop string that begins within the first `min_tokens` tokens counts. The text goes on that of the
        prompt."""
        self.index = index
        self.end: End | None = None
        self.token_count = 0
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._with_logprobs = with_logprobs

    @property
    def stop(self) -> str | None:
        """The stop string that matched."""
        return self._stops.matched

    @property
    def finish(self) -> Finish:
        """How it ended. A stop string counts also where the worker's own end came together with it."""
        if self.stop is not None:
            return Finish(FinishReason.STOP, stop=self.stop)
        assert self.end is not None
        assert isinstance(self.end.outcome, Finish)
        return self.end.outcome

    def push(self, tokens: Iterable[SampledToken]) -> TextDelta:
        """The delta these tokens make. Tokens after the one that completed a stop string are dropped."""
        texts: list[str] = []
        taken: list[SampledToken] = []
        for token in tokens:
            text, matched = self._detokenizer.push([token.token_id]), None
            if self.token_count >= self._min_tokens:
                text, matched = self._stops.push(text)
            texts.append(text)
            taken.append(token if self._with_logprobs else SampledToken(token.token_id))
            self.token_count += 1
            if matched is not None:
                break
        return TextDelta(self.index, "".join(texts), tuple(taken))

    def replay(self, token_ids: Iterable[int]) -> None:
        """Stand where another router's output stood after these ids; their text went out there."""
        self.push(SampledToken(token_id) for token_id in token_ids)

    def flush(self) -> str:
        """The text that was held back and is final now."""
        text, _ = self._stops.push(self._detokenizer.finish())
        return text if self._stops.matched is not None else text + self._stops.finish()


class Generation:
    """One request's text, from its attempts' events. Pure."""

    def __init__(self, request: ResolvedRequest, tokenizer: TokenText, finish: Callable[[int, Finish], None]) -> None:
        """`finish` ends an output at the router, as a stop string matched in its text."""
        self._request = request
        self._finish = finish
        sampling, with_logprobs = request.sampling, request.sampling.logprobs is not None
        self._outputs = [
            OutputText(tokenizer, request.stop, sampling.min_tokens, with_logprobs, index, request.prompt_ids)
            for index in range(len(request.received_ids))
        ]

    def start(self) -> GenerationStarted:
        """Begin, where another router's stream broke off if it is a resumed one."""
        for output, token_ids in zip(self._outputs, self._request.received_ids, strict=True):
            output.replay(token_ids)
            self._finish_at_stop(output)
        request = self._request
        return GenerationStarted(request.request_id, request.model, request.sampling.seed, request.prompt_ids)

    def take(self, event: StreamEvent) -> list[GenerationEvent]:
        """What the client is told of the next event. Raises the error with which an output has ended."""
        output = self._outputs[event.output]
        if isinstance(event, StateChanged):
            return [event]
        if isinstance(event, Accept):
            return [] if output.stop is not None else self._accept(output, event)
        return self._end(output, event)

    def _accept(self, output: OutputText, event: Accept) -> list[GenerationEvent]:
        delta = output.push(event.tokens)
        self._finish_at_stop(output)
        return [delta]

    def _end(self, output: OutputText, end: End) -> list[GenerationEvent]:
        if isinstance(end.outcome, PdserveError):
            raise end.outcome
        output.end = end
        events: list[GenerationEvent] = []
        if output.stop is None and (rest := output.flush()):
            events.append(TextDelta(output.index, rest))
        if all(each.end is not None for each in self._outputs):
            events.append(self._finished())
        return events

    def _finish_at_stop(self, output: OutputText) -> None:
        if output.stop is not None:
            self._finish(output.index, output.finish)

    def _finished(self) -> GenerationFinished:
        ends = [output.end for output in self._outputs if output.end is not None]
        return GenerationFinished(
            finishes=tuple(output.finish for output in self._outputs),
            usage=Usage(len(self._request.prompt_ids), sum(output.token_count for output in self._outputs)),
            exact=all(end.exact for end in ends),
            attempts=max(end.attempts for end in ends),
        )


def request_of(resolved: ResolvedRequest, resume: ResumePoint | None) -> Request:
    """What the attempt loop is asked for."""
    states: tuple[ResumeState, ...] = ()
    if resume is not None:
        states = tuple(resume.states.get(index, ResumeState()) for index in range(len(resolved.received_ids)))
    return Request(
        resolved.request_id, resolved.prompt_ids, resolved.sampling, resolved.received_ids, resume_states=states
    )


class RunningRequest(Protocol):
    """One request at the router. Its events: Accept and StateChanged, then an End of each output."""

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...

    def finish(self, output: int, finish: Finish) -> None:
        """End an output regularly."""
        ...

    def abandon(self) -> None:
        """Nobody listens any more: end it if it has not ended."""
        ...


class AttemptLoop(Protocol):
    """What is asked of the router: to serve a request by attempts."""

    model: str

    async def limits(self) -> ModelLimits:
        """What a request must fit. Raises Unavailable."""
        ...

    def submit(self, request: Request, resumed: bool) -> RunningRequest:
        """Take a request over; a resumed one from whoever had it. Raises what it is refused with."""
        ...


class GenerationStream:
    """A generation that runs. To be iterated once, and closed in whatever state: that ends the request."""

    def __init__(self, request: RunningRequest, generation: Generation) -> None:
        self._request = request
        self._generation = generation

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        """Raises the error with which the request ends."""
        yield self._generation.start()
        async for event in self._request:
            for told in self._generation.take(event):
                yield told

    def close(self) -> None:
        self._request.abandon()


class GenerationService:
    """Starts generations: all that a front needs for them."""

    def __init__(self, router: AttemptLoop, tokenizer: Tokenizer) -> None:
        self._router = router
        self._tokenizer = tokenizer

    async def start(
        self, prompt: PromptInput, params: GenerateParams, resume: ResumePoint | None = None
    ) -> GenerationStream:
        """Check and tokenise a request, and have it served. `resume`: it goes on from there, and whoever had it is cut
        off. Raises InvalidArgument, and what the router refuses it with."""
        prompt_field, prompt_ids = await asyncio.to_thread(self._prompt_ids, prompt)  # a long prompt takes a while
        limits = await self._router.limits()
        received_ids = () if resume is None else resume.received_ids
        resolved = resolve_request(
            params, prompt_ids, limits, self._router.model, prompt_field=prompt_field, received_ids=received_ids
        )
        request = self._router.submit(request_of(resolved, resume), resume is not None)
        return GenerationStream(request, Generation(resolved, self._tokenizer, request.finish))

    def _prompt_ids(self, prompt: PromptInput) -> tuple[str, list[int]]:
        """The public field that the prompt came in, and its ids."""
        match prompt:
            case TextPrompt(text):
                check_prompt_text(text)
                return "prompt", self._tokenizer.encode(text)
            case TokenPrompt(token_ids):
                return "prompt_token_ids", list(token_ids)
            case ChatPrompt(messages):
                check_chat(messages)
                return "chat", self._tokenizer.apply_chat_template(messages)
