"""What the gRPC front converts: requests from protos, events to protos."""

from __future__ import annotations

import pytest

from pdserve.errors import InvalidArgument
from pdserve.rpc import inference_pb2 as pb
from pdserve.types import Finish, FinishReason, SampledToken, Usage
from router.actions import ResumeState, StateChanged
from router.frontend import params, prompt, response, resume_point
from router.generation import (
    ChatPrompt,
    GenerationEvent,
    GenerationFinished,
    GenerationStarted,
    TextDelta,
    TextPrompt,
    TokenPrompt,
)
from router.text import ChatMessage
from router.validation import GenerateParams


def test_each_kind_of_prompt_is_one_of_generations() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert prompt(pb.GenerateRequest(prompt="hi")) == TextPrompt("hi")
    assert prompt(pb.GenerateRequest(chat=chat)) == ChatPrompt((ChatMessage("user", "hi"),))
    tokens = prompt(pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1, 2])))
    assert isinstance(tokens, TokenPrompt)
    assert list(tokens.token_ids) == [1, 2]
    with pytest.raises(InvalidArgument, match="prompt: is missing"):
        prompt(pb.GenerateRequest())


def test_what_is_set_arrives_and_what_is_not_stays_open() -> None:
    sampling = pb.SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.25,
        seed=2**64 - 1,
        max_tokens=5,
        stop=["a"],
        stop_token_ids=[1],
        ignore_eos=True,
        logprobs=0,
        presence_penalty=0.0,
        frequency_penalty=1.0,
        repetition_penalty=1.5,
        min_tokens=0,
        logit_bias={3: -1.0},
        n=2,
    )
    assert params(pb.GenerateRequest(request_id="r", model="m", sampling=sampling)) == GenerateParams(
        "r", "m", 0.0, 0.5, 0, 0.25, 2**64 - 1, 5, ("a",), (1,), True, 0, 0.0, 1.0, 1.5, 0, ((3, -1.0),), 2
    )
    assert params(pb.GenerateRequest(request_id="r")) == GenerateParams("r")
    assert params(pb.GenerateRequest()).request_id, "it gets one"


def test_a_resumed_request_brings_what_the_client_was_told() -> None:
    assert resume_point(pb.GenerateRequest()) is None
    state = ResumeState("p", "o", exact=False, crashes=2, crashed_at=5)
    told = response(StateChanged("r", 1, state)).resume_state
    resume = pb.Resume(outputs=[pb.TokenIds(ids=[1, 2]), pb.TokenIds()], states=[told])
    point = resume_point(pb.GenerateRequest(resume=resume))
    assert point is not None
    assert point.received_ids == ((1, 2), ())
    assert point.states == {1: state}
    request = pb.GenerateRequest()
    request.resume.SetInParent()  # the client has nothing yet
    assert resume_point(request) is not None


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            GenerationStarted("r", "m", 9, (7, 8)),
            pb.GenerateResponse(started=pb.Started(request_id="r", model="m", seed=9, prompt_token_ids=[7, 8])),
        ),
        (
            TextDelta(1, "ab", (SampledToken(3), SampledToken(4, -0.5, ((4, -0.5), (5, -1.0))))),
            pb.GenerateResponse(
                delta=pb.Delta(
                    output_index=1,
                    token_ids=[3, 4],
                    text="ab",
                    logprobs=[
                        pb.TokenLogprobs(
                            logprob=-0.5,
                            top=[pb.TopLogprob(token_id=4, logprob=-0.5), pb.TopLogprob(token_id=5, logprob=-1.0)],
                        )
                    ],
                )
            ),
        ),
        (
            GenerationFinished(
                (
                    Finish(FinishReason.LENGTH),
                    Finish(FinishReason.STOP, stop_token_id=0),
                    Finish(FinishReason.STOP, stop="x"),
                ),
                Usage(2, 3),
                exact=False,
                attempts=2,
            ),
            pb.GenerateResponse(
                finished=pb.Finished(
                    outputs=[
                        pb.OutputEnd(finish_reason=pb.FINISH_REASON_LENGTH),
                        pb.OutputEnd(finish_reason=pb.FINISH_REASON_STOP, stop_token_id=0),
                        pb.OutputEnd(finish_reason=pb.FINISH_REASON_STOP, stop="x"),
                    ],
                    usage=pb.Usage(prompt_tokens=2, completion_tokens=3),
                    exact=False,
                    attempts=2,
                )
            ),
        ),
    ],
)
def test_each_event_is_one_response(event: GenerationEvent, expected: pb.GenerateResponse) -> None:
    assert response(event) == expected
