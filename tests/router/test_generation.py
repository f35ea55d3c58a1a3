"""From a request's events to its text: what a front of any protocol is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import AlreadyExists, InvalidArgument, PdserveError, Unavailable
from pdserve.types import Finish, FinishReason, ModelLimits, SampledToken, SamplingParams, Usage
from router.actions import Accept, End, Request, ResumeState, StateChanged, StreamEvent
from router.generation import (
    ChatPrompt,
    Generation,
    GenerationEvent,
    GenerationFinished,
    GenerationService,
    GenerationStarted,
    PromptInput,
    ResumePoint,
    TextDelta,
    TextPrompt,
    TokenPrompt,
    request_of,
)
from router.text import ChatMessage, Tokenizer
from router.validation import GenerateParams, ResolvedRequest
from support import small_tokenizers

LENGTH = Finish(FinishReason.LENGTH)
SPECIAL = 0


class Letters:
    """A tokenizer with a letter a token: 1 is a."""

    def token(self, token_id: int) -> str | None:
        return None if token_id == SPECIAL else chr(ord("a") + token_id - 1)

    def new_decoder(self) -> Letters:
        return self

    def follow(self, prompt: Iterator[str]) -> int:
        return 0

    def push(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def finish(self) -> str:
        return ""


class World:
    """A generation, and what it told the router."""

    def __init__(self, *received_ids: tuple[int, ...], stop: tuple[str, ...] = (), **sampling: Any) -> None:
        params = SamplingParams(seed=9, **sampling)
        self.request = ResolvedRequest("r", "m", (7, 8), params, stop, received_ids or ((),))
        self.finished: list[tuple[int, Finish]] = []
        self.generation = Generation(self.request, Letters(), lambda *told: self.finished.append(told))
        self.started = self.generation.start()

    def accept(self, *token_ids: int, output: int = 0) -> list[GenerationEvent]:
        return self.generation.take(Accept("r", output, tuple(SampledToken(i, -0.5) for i in token_ids)))

    def end(self, outcome: Finish | PdserveError, output: int = 0, **fields: Any) -> list[GenerationEvent]:
        values = {"attempts": 1, "exact": True, **fields}
        return self.generation.take(End("r", output, outcome, **values))


def test_a_generation_starts_with_what_the_request_was_made_into() -> None:
    assert World().started == GenerationStarted("r", "m", 9, (7, 8))


def test_tokens_become_text_and_the_last_end_the_result() -> None:
    world = World((), ())
    assert world.accept(1, 2) == [TextDelta(0, "ab", (SampledToken(1), SampledToken(2)))]
    assert world.accept(3, output=1) == [TextDelta(1, "c", (SampledToken(3),))]
    assert world.end(LENGTH, attempts=3) == []
    stop = Finish(FinishReason.STOP, stop_token_id=3)
    finished = GenerationFinished((LENGTH, stop), Usage(2, 3), exact=False, attempts=3)
    assert world.end(stop, output=1, exact=False) == [finished]


def test_logprobs_are_passed_on_only_where_they_were_asked_for() -> None:
    (delta,) = World(logprobs=0).accept(1)
    assert delta == TextDelta(0, "a", (SampledToken(1, -0.5),))


def test_a_resume_state_is_passed_on_as_it_is() -> None:
    changed = StateChanged("r", 0, ResumeState("p", "o"))
    assert World().generation.take(changed) == [changed]


def test_the_error_of_one_output_ends_the_request() -> None:
    error = Unavailable("nobody is left")
    with pytest.raises(Unavailable) as caught:
        World((), ()).end(error, output=1)
    assert caught.value is error


class TestStopStrings:
    def test_text_that_may_begin_one_is_held_back_until_it_does_not(self) -> None:
        world = World(stop=("bcd",))
        assert [delta.text for delta in world.accept(1, 2) if isinstance(delta, TextDelta)] == ["a"]
        (rest, finished) = world.end(LENGTH)
        assert rest == TextDelta(0, "b")
        assert isinstance(finished, GenerationFinished)
        assert finished.finishes == (LENGTH,)
        assert world.finished == []

    def test_the_output_ends_there_at_once_and_what_comes_after_is_dropped(self) -> None:
        world, stop = World(stop=("bc",)), Finish(FinishReason.STOP, stop="bc")
        assert world.accept(1, 2, 3, 4) == [TextDelta(0, "a", (SampledToken(1), SampledToken(2), SampledToken(3)))]
        assert world.finished == [(0, stop)]
        assert world.accept(5) == []
        assert world.end(stop) == [GenerationFinished((stop,), Usage(2, 3), True, 1)]

    def test_it_counts_also_where_the_workers_own_end_came_with_it(self) -> None:
        world = World(stop=("bc",))
        world.accept(2, 3)
        (finished,) = world.end(LENGTH)
        assert isinstance(finished, GenerationFinished)
        assert finished.finishes == (Finish(FinishReason.STOP, stop="bc"),)

    def test_none_counts_within_the_least_number_of_tokens(self) -> None:
        world = World(stop=("a",), min_tokens=2)
        assert [delta.text for delta in world.accept(1, 1) if isinstance(delta, TextDelta)] == ["aa"]
        assert world.accept(1) == [TextDelta(0, "", (SampledToken(1),))]
        assert len(world.finished) == 1


class TestResumed:
    def test_it_goes_on_behind_the_text_that_has_come(self) -> None:
        world = World((1, 2), stop=("bc",))
        assert world.accept(3) == [TextDelta(0, "", (SampledToken(3),))], "b was held back, and completes here"
        assert world.finished == [(0, Finish(FinishReason.STOP, stop="bc"))]
        (finished,) = world.end(LENGTH)
        assert isinstance(finished, GenerationFinished)
        assert finished.usage == Usage(2, 3)

    def test_an_output_that_had_reached_its_stop_string_is_ended_at_once(self) -> None:
        world = World((1,), (2, 3), stop=("bc",))
        assert world.finished == [(1, Finish(FinishReason.STOP, stop="bc"))]

    def test_the_attempt_loop_is_told_the_states_that_are_known(self) -> None:
        request, state = World((1,), ()).request, ResumeState("p", "o", crashes=1)
        assert request_of(request, None).resume_states == ()
        assert request_of(request, ResumePoint(((1,),), {1: state})).resume_states == (ResumeState(), state)


class FakeRequest:
    """A request whose events are known beforehand."""

    def __init__(self, request: Request, events: list[StreamEvent]) -> None:
        self.request = request
        self.abandoned = False
        self._events = events

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        for event in self._events:
            yield event

    def finish(self, output: int, finish: Finish) -> None: ...

    def abandon(self) -> None:
        self.abandoned = True


class FakeRouter:
    model = "small"

    def __init__(self, *events: StreamEvent) -> None:
        self.requests: list[FakeRequest] = []
        self.resumed: list[bool] = []
        self.refusal: PdserveError | None = None
        self._events = list(events)

    async def limits(self) -> ModelLimits:
        return ModelLimits(vocab_size=10_000, max_model_len=100, pool_tokens=100)

    def submit(self, request: Request, resumed: bool) -> FakeRequest:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(FakeRequest(request, self._events))
        self.resumed.append(resumed)
        return self.requests[-1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.load(small_tokenizers.save(small_tokenizers.byte_level(), directory))


class TestService:
    """All that a front calls."""

    def run(
        self, router: FakeRouter, tokenizer: Tokenizer, prompt: PromptInput, resume: ResumePoint | None = None
    ) -> list[GenerationEvent]:
        async def serve() -> list[GenerationEvent]:
            service = GenerationService(router, tokenizer)
            generation = await service.start(prompt, GenerateParams("r", max_tokens=4), resume)
            try:
                return [event async for event in generation]
            finally:
                generation.close()

        return asyncio.run(serve())

    def test_a_text_is_tokenised_and_served(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("hi")
        router = FakeRouter(Accept("r", 0, tuple(SampledToken(i) for i in ids)), End("r", 0, LENGTH, 1, True))
        started, delta, finished = self.run(router, tokenizer, TextPrompt("hi"))
        assert isinstance(started, GenerationStarted)
        assert started.prompt_ids == router.requests[0].request.prompt_ids == tuple(ids)
        assert isinstance(delta, TextDelta)
        assert delta.text == "hi"
        assert isinstance(finished, GenerationFinished)
        assert router.requests[0].abandoned
        assert router.resumed == [False]

    def test_the_text_goes_on_that_of_the_prompt(self, tmp_path: Path) -> None:
        directory = small_tokenizers.save(small_tokenizers.sentencepiece(), tmp_path)
        tokenizer = Tokenizer.load(directory)
        ids = tokenizer.encode("the fox", add_special_tokens=False)
        router = FakeRouter(Accept("r", 0, tuple(SampledToken(i) for i in ids)), End("r", 0, LENGTH, 1, True))
        _, delta, _ = self.run(router, tokenizer, TextPrompt("the quick"))
        assert isinstance(delta, TextDelta)
        assert delta.text == " the fox"

    def test_a_resumed_request_says_so(self, tokenizer: Tokenizer) -> None:
        router = FakeRouter(End("r", 0, LENGTH, 1, True))
        self.run(router, tokenizer, TokenPrompt((1, 2)), ResumePoint(((3,),)))
        assert router.resumed == [True]
        assert router.requests[0].request.received_ids == ((3,),)
        assert router.requests[0].request.resumed

    @pytest.mark.parametrize(
        ("prompt", "field"),
        [
            (TextPrompt(""), "prompt"),
            (TokenPrompt(()), "prompt_token_ids"),
            (TokenPrompt((99_999,)), "prompt_token_ids"),
            (ChatPrompt((ChatMessage("user", "hi"),)), "chat"),  # this tokenizer has no template
        ],
    )
    def test_a_wrong_prompt_names_the_public_field(self, tokenizer: Tokenizer, prompt: PromptInput, field: str) -> None:
        with pytest.raises(InvalidArgument) as caught:
            self.run(FakeRouter(), tokenizer, prompt)
        assert caught.value.field == field

    def test_what_the_router_refuses_is_raised(self, tokenizer: Tokenizer) -> None:
        router = FakeRouter()
        router.refusal = AlreadyExists("in flight")
        with pytest.raises(AlreadyExists):
            self.run(router, tokenizer, TextPrompt("hi"))
