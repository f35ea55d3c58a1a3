"""Every field of a request: its default, its borders, and a refusal that names field, value and range."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidArgument
from pdserve.types import ModelLimits, SamplingParams
from router import validation
from router.validation import GenerateParams, ResolvedRequest, check_chat, check_prompt_text, resolve_request

LIMITS = ModelLimits(vocab_size=100, max_model_len=32, pool_tokens=1000)
PROMPT = (1, 2, 3)


def resolve(prompt: tuple[int, ...] = PROMPT, limits: ModelLimits = LIMITS, **fields: Any) -> ResolvedRequest:
    params = GenerateParams(**{"request_id": "r1", **fields})
    return resolve_request(params, prompt, limits, "tiny")


def test_defaults_are_resolved() -> None:
    assert resolve() == ResolvedRequest(
        request_id="r1",
        model="tiny",
        prompt_ids=PROMPT,
        sampling=SamplingParams(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=validation.derive_seed("r1"),
            max_tokens=29,
            stop_token_ids=(),
            ignore_eos=False,
            logprobs=None,
        ),
        stop=(),
    )


def test_what_the_client_set_is_kept() -> None:
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 2**64 - 1,
        "max_tokens": 29,
        "stop_token_ids": (0, 99),
        "ignore_eos": True,
        "logprobs": 20,
    }
    resolved = resolve(model="tiny", stop=("a", "b" * 256), **fields)
    assert resolved.sampling == SamplingParams(**fields)
    assert resolved.stop == ("a", "b" * 256)


REFUSED = [
    ({"temperature": -0.1}, r"temperature: is -0\.1: must be finite and at least 0"),
    ({"temperature": math.nan}, r"temperature: is nan"),
    ({"temperature": math.inf}, r"temperature: is inf"),
    ({"top_p": 0.0}, r"top_p: is 0\.0: must be in \(0, 1\]"),
    ({"top_p": 1.01}, r"top_p: is 1\.01"),
    ({"top_p": math.nan}, r"top_p: is nan"),
    ({"top_k": -1}, r"top_k: is -1: must be at least 0"),
    ({"min_p": -0.01}, r"min_p: is -0\.01: must be in \[0, 1\]"),
    ({"min_p": 1.01}, r"min_p: is 1\.01"),
    ({"min_p": math.nan}, r"min_p: is nan"),
    ({"seed": -1}, r"seed: is -1: must be in \[0, 2\^64\)"),
    ({"seed": 2**64}, r"seed: is 18446744073709551616"),
    ({"max_tokens": 0}, r"max_tokens: is 0: must be at least 1"),
    ({"max_tokens": 30}, r"max_tokens: is 30: the prompt's 3 tokens leave room for at most 29"),
    ({"stop": ("a", "")}, r"stop: stop\[1\] is empty"),
    ({"stop": ("a",) * 17}, r"stop: has 17 strings: at most 16"),
    ({"stop": ("a" * 257,)}, r"stop: stop\[0\] has 257 characters: at most 256"),
    ({"stop_token_ids": (5, 100)}, r"stop_token_ids: stop_token_ids\[1\] is 100: must be in \[0, 99\]"),
    ({"stop_token_ids": (-1,)}, r"stop_token_ids: stop_token_ids\[0\] is -1"),
    ({"stop_token_ids": (1,) * 129}, r"stop_token_ids: has 129 ids: at most 128"),
    ({"logprobs": -1}, r"logprobs: is -1: must be in \[0, 20\]"),
    ({"logprobs": 21}, r"logprobs: is 21"),
    ({"model": "other"}, r"model: 'other' is not served here: leave it out or use 'tiny'"),
    ({"model": "x" * 100_000}, r"model: 'x{128}' is not served here"),
    ({"request_id": ""}, r"request_id: is empty"),
    ({"request_id": "x" * 129}, r"request_id: has 129 characters: at most 128"),
    ({"request_id": "a\nb"}, r"request_id: 'a\\nb' has characters that are not printable"),
    ({"request_id": "a\u202eb"}, r"request_id: .* not printable"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_value_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}") as caught:
        resolve(**fields)
    assert caught.value.field == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"top_p": 5e-324},
        {"top_k": 2**31 - 1},
        {"min_p": 1.0},
        {"seed": 0},
        {"max_tokens": 1},
        {"logprobs": 0},
        {"stop": ("a",) * 16},
        {"stop_token_ids": (99,) * 128},
        {"request_id": "ü" * 128},
    ],
)
def test_border_value_is_allowed(fields: dict[str, Any]) -> None:
    resolved = resolve(**fields)
    (name, value), *_ = fields.items()
    assert value in (getattr(resolved, name, None), getattr(resolved.sampling, name, None))


def test_temperature_too_small_to_matter_is_greedy() -> None:
    assert resolve(temperature=9e-6).sampling.temperature == 0.0
    assert resolve(temperature=1e-5).sampling.temperature == 1e-5


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt: has no tokens"),
        ((1,) * 32, r"prompt: has 32 tokens: at most 31 are allowed, as the model's length is 32 tokens"),
        ((1, 2, 100), r"prompt: token 2 is 100: must be in \[0, 99\]"),
        ((1, -1), r"prompt: token 1 is -1"),
    ],
)
def test_prompt_that_cannot_be_served_is_refused(prompt: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        resolve(prompt)


def test_refusal_of_the_prompt_names_the_field_it_came_in() -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve_request(GenerateParams("r1"), [100], LIMITS, "tiny", prompt_field="prompt_token_ids")
    assert caught.value.field == "prompt_token_ids"


def test_longest_prompt_leaves_room_for_one_token() -> None:
    assert resolve((1,) * 31).sampling.max_tokens == 1


def test_pool_smaller_than_the_models_length_is_the_border() -> None:
    limits = replace(LIMITS, pool_tokens=10)
    assert resolve((1,) * 9, limits).sampling.max_tokens == 1
    with pytest.raises(InvalidArgument, match="prompt: has 10 tokens: at most 9 are allowed, as the KV cache holds 10"):
        resolve((1,) * 10, limits)
    with pytest.raises(InvalidArgument, match="max_tokens: is 8: the prompt's 3 tokens leave room for at most 7"):
        resolve(limits=limits, max_tokens=8)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.none() | st.integers(-2, 60))
def test_what_is_accepted_always_fits_model_and_pool(
    prompt_tokens: int, max_model_len: int, pool_tokens: int, max_tokens: int | None
) -> None:
    limits = ModelLimits(100, max_model_len, pool_tokens)
    fits = prompt_tokens + (1 if max_tokens is None else max_tokens) <= min(max_model_len, pool_tokens)
    try:
        resolved = resolve((1,) * prompt_tokens, limits, max_tokens=max_tokens)
    except InvalidArgument:
        assert not fits or (max_tokens is not None and max_tokens < 1)
    else:
        assert fits
        assert 1 <= resolved.sampling.max_tokens <= min(max_model_len, pool_tokens) - prompt_tokens


def test_seed_without_one_is_the_same_for_ever() -> None:
    """A router of tomorrow must continue what one of today began: the number is part of the interface."""
    assert validation.derive_seed("r1") == 9501902574499511600
    assert validation.derive_seed("r2") != validation.derive_seed("r1")
    assert 0 <= validation.derive_seed("ü") < 2**64


def test_prompt_text_is_bounded() -> None:
    check_prompt_text("x" * validation.MAX_TEXT_CHARS)
    with pytest.raises(InvalidArgument, match=r"^prompt: has 4194305 characters: at most 4194304 are allowed"):
        check_prompt_text("x" * (validation.MAX_TEXT_CHARS + 1))
    with pytest.raises(InvalidArgument, match=r"^prompt: is empty"):
        check_prompt_text("")


def test_lone_surrogate_is_refused_and_its_place_named() -> None:
    with pytest.raises(InvalidArgument, match=r"^prompt: is not valid Unicode: a lone surrogate at character 2$"):
        check_prompt_text("ab\ud800")
    for message, part in [(("user", "x\udc00"), "content"), (("\udfff", "x"), "role")]:
        with pytest.raises(InvalidArgument, match=rf"^chat: messages\[1\]\.{part} is not valid Unicode: a lone"):
            check_chat([("user", "fine 🙂"), message])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": "r\ud800"}, "request_id: is not valid Unicode"),
        ({"model": "\ud83d"}, "model: is not valid Unicode"),
        ({"stop": ("fine", "a\udc00b")}, r"stop: stop\[1\] is not valid Unicode: a lone surrogate at character 1"),
    ],
)
def test_lone_surrogate_in_any_other_text_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        resolve(**fields)


def test_chat_is_bounded_as_a_whole() -> None:
    half = validation.MAX_TEXT_CHARS // 2
    check_chat([("user", "x" * (half - 4)), ("user", "x" * (half - 4))])
    with pytest.raises(InvalidArgument, match=r"^chat: has 4194305 characters"):
        check_chat([("user", "x" * (half - 4)), ("user", "x" * (half - 3))])
    check_chat([("user", "")] * 1024)
    with pytest.raises(InvalidArgument, match=r"^chat: has 1025 messages: at most 1024"):
        check_chat([("user", "")] * 1025)
