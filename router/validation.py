"""What a request must be to be served: every field is checked here, every default resolved here, nowhere later.

Pure: no gRPC, no tokenizer. Each refusal is an InvalidArgument that names the public field, the value and what is
allowed. The order is the cheap checks that need no tokens first (`check_prompt_text`, `check_chat`), then, on the
prompt's ids, `resolve_request`.

Fixed bounds, chosen so that no single request can occupy a router: see the constants.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.errors import InvalidArgument
from pdserve.text import check_unicode
from pdserve.types import ModelLimits, SamplingParams

MAX_REQUEST_ID_CHARS: Final = 128
MAX_TEXT_CHARS: Final = 4 * 1024 * 1024  # of a prompt, or of a chat's messages together
MAX_CHAT_MESSAGES: Final = 1024
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 128
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIASES: Final = 1024
MAX_OUTPUTS: Final = 64
MIN_REPETITION_PENALTY: Final = 0.01  # what is divided by less is soon infinite

# Below this a temperature counts as 0, as elsewhere in the ecosystem: it is greedy but for rounding.
GREEDY_TEMPERATURE: Final = 1e-5


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """A request's parameters as the client sent them. None: not set."""

    request_id: str
    model: str = ""  # empty: whatever is served
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int | None = None


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request that fits the model, nothing left to be decided."""

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    received_ids: tuple[tuple[int, ...], ...] = ((),)  # by output


def resolve_request(
    params: GenerateParams,
    prompt_ids: Sequence[int],
    limits: ModelLimits,
    served_model: str,
    *,
    prompt_field: str = "prompt",
    received_ids: Sequence[Sequence[int]] = (),
) -> ResolvedRequest:
    """Check everything and fill in every default, or raise InvalidArgument.

    `prompt_field` is the public field that the ids came from: prompt, prompt_token_ids or chat. `limits` are the
    smallest of the workers that may serve it. `received_ids`: what a resumed request's client has, by output. Equal
    arguments give an equal result, the seed included.
    """
    _check_request_id(params.request_id)
    check_unicode("model", params.model)
    if params.model not in ("", served_model):
        unknown = params.model[:MAX_REQUEST_ID_CHARS]
        raise InvalidArgument("model", f"{unknown!r} is not served here: leave it out or use {served_model!r}")
    room = _check_prompt(prompt_field, prompt_ids, limits)
    _check_stop(params.stop)
    _check_stop_token_ids(params.stop_token_ids, limits.vocab_size)
    max_tokens = _max_tokens(params.max_tokens, len(prompt_ids), room)
    sampling = SamplingParams(
        temperature=_temperature(params.temperature),
        top_p=_top_p(params.top_p),
        top_k=_top_k(params.top_k),
        min_p=_min_p(params.min_p),
        seed=_seed(params.seed, params.request_id),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(params.min_tokens, max_tokens),
        presence_penalty=_penalty("presence_penalty", params.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", params.frequency_penalty),
        repetition_penalty=_repetition_penalty(params.repetition_penalty),
        logit_bias=_logit_bias(params.logit_bias, limits.vocab_size),
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=_logprobs(params.logprobs),
    )
    received = _received(received_ids, _n(params.n), max_tokens, limits.vocab_size)
    return ResolvedRequest(params.request_id, served_model, tuple(prompt_ids), sampling, params.stop, received)


def check_prompt_text(text: str) -> None:
    """A prompt given as text: not empty, not too long, real Unicode. Whether it fits the model is seen in tokens."""
    if not text:
        raise InvalidArgument("prompt", "is empty")
    _check_length("prompt", len(text))
    check_unicode("prompt", text)


def check_chat(messages: Sequence[tuple[str, str]]) -> None:
    """A chat's (role, content) pairs: how many and how long. Which roles there are is the chat template's business."""
    if len(messages) > MAX_CHAT_MESSAGES:
        raise InvalidArgument("chat", f"has {len(messages)} messages: at most {MAX_CHAT_MESSAGES} are allowed")
    length = sum(len(role) + len(content) for role, content in messages)
    _check_length("chat", length)
    for index, (role, content) in enumerate(messages):
        check_unicode("chat", role, f"messages[{index}].role")
        check_unicode("chat", content, f"messages[{index}].content")


def derive_seed(request_id: str) -> int:
    """The seed, 64 bits, of a request that brings none: the same on every router, today and tomorrow."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big")


def _check_length(field: str, length: int) -> None:
    if length > MAX_TEXT_CHARS:
        raise InvalidArgument(field, f"has {length} characters: at most {MAX_TEXT_CHARS} are allowed")


def _check_request_id(request_id: str) -> None:
    if not request_id:
        raise InvalidArgument("request_id", "is empty")
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidArgument(
            "request_id", f"has {len(request_id)} characters: at most {MAX_REQUEST_ID_CHARS} are allowed"
        )
    check_unicode("request_id", request_id)
    if not request_id.isprintable():
        raise InvalidArgument("request_id", f"{request_id!r} has characters that are not printable")


def _check_prompt(field: str, prompt_ids: Sequence[int], limits: ModelLimits) -> int:
    """Returns how many tokens the output may have: at least 1."""
    if not prompt_ids:
        raise InvalidArgument(field, "has no tokens")
    room = min(limits.max_model_len, limits.pool_tokens) - len(prompt_ids)
    if room < 1:
        longest = min(limits.max_model_len, limits.pool_tokens) - 1
        reason = (
            f"the model's length is {limits.max_model_len} tokens"
            if limits.max_model_len <= limits.pool_tokens
            else f"the KV cache holds {limits.pool_tokens} tokens"
        )
        raise InvalidArgument(field, f"has {len(prompt_ids)} tokens: at most {longest} are allowed, as {reason}")
    if min(prompt_ids) < 0 or max(prompt_ids) >= limits.vocab_size:
        index, token_id = next((i, t) for i, t in enumerate(prompt_ids) if not 0 <= t < limits.vocab_size)
        raise InvalidArgument(
            field, f"token {index} is {token_id}: must be in [0, {limits.vocab_size - 1}], the vocabulary"
        )
    return room


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidArgument("stop", f"has {len(stop)} strings: at most {MAX_STOP_STRINGS} are allowed")
    for index, text in enumerate(stop):
        if not text:
            raise InvalidArgument("stop", f"stop[{index}] is empty: nothing would be generated")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidArgument(
                "stop", f"stop[{index}] has {len(text)} characters: at most {MAX_STOP_CHARS} are allowed"
            )
        check_unicode("stop", text, f"stop[{index}]")


def _check_stop_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument("stop_token_ids", f"has {len(token_ids)} ids: at most {MAX_STOP_TOKEN_IDS} are allowed")
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(
                "stop_token_ids",
                f"stop_token_ids[{index}] is {token_id}: must be in [0, {vocab_size - 1}], the vocabulary",
            )


# The comparisons are written so that NaN fails them.


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    if not (value >= 0.0 and math.isfinite(value)):
        raise InvalidArgument("temperature", f"is {value}: must be finite and at least 0, where 0 is greedy")
    return value if value >= GREEDY_TEMPERATURE else 0.0


def _top_p(value: float | None) -> float:
    if value is None:
        return 1.0
    if not 0.0 < value <= 1.0:
        raise InvalidArgument("top_p", f"is {value}: must be in (0, 1], where 1 is off")
    return value


def _top_k(value: int | None) -> int:
    if value is None:
        return 0
    if value < 0:
        raise InvalidArgument("top_k", f"is {value}: must be at least 0, where 0 is off")
    return value


def _min_p(value: float | None) -> float:
    if value is None:
        return 0.0
    if not 0.0 <= value <= 1.0:
        raise InvalidArgument("min_p", f"is {value}: must be in [0, 1], where 0 is off")
    return value


def _seed(value: int | None, request_id: str) -> int:
    if value is None:
        return derive_seed(request_id)
    if not 0 <= value < 2**64:
        raise InvalidArgument("seed", f"is {value}: must be in [0, 2^64)")
    return value


def _max_tokens(value: int | None, prompt_tokens: int, room: int) -> int:
    if value is None:
        return room
    if value < 1:
        raise InvalidArgument("max_tokens", f"is {value}: must be at least 1")
    if value > room:
        raise InvalidArgument(
            "max_tokens", f"is {value}: the prompt's {prompt_tokens} tokens leave room for at most {room}"
        )
    return value


def _n(value: int | None) -> int:
    n = 1 if value is None else value
    if not 1 <= n <= MAX_OUTPUTS:
        raise InvalidArgument("n", f"is {n}: must be between 1 and {MAX_OUTPUTS}")
    return n


def _received(
    outputs: Sequence[Sequence[int]], n: int, max_tokens: int, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """What was received of each of the n outputs."""
    if len(outputs) > n:
        raise InvalidArgument("resume", f"has {len(outputs)} outputs: this request has {n}")
    for token_ids in outputs:
        if len(token_ids) > max_tokens:
            raise InvalidArgument(
                "resume", f"has {len(token_ids)} tokens: at most {max_tokens}, max_tokens, can be received"
            )
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                raise InvalidArgument(
                    "resume", f"token {index} is {token_id}: must be in [0, {vocab_size - 1}], the vocabulary"
                )
    return tuple(tuple(outputs[index]) if index < len(outputs) else () for index in range(n))


def _min_tokens(value: int | None, max_tokens: int) -> int:
    if value is None:
        return 0
    if not 0 <= value <= max_tokens:
        raise InvalidArgument("min_tokens", f"is {value}: must be in [0, {max_tokens}], max_tokens")
    return value


def _penalty(field: str, value: float | None) -> float:
    if value is None:
        return 0.0
    if not -2.0 <= value <= 2.0:
        raise InvalidArgument(field, f"is {value}: must be in [-2, 2], where 0 is off")
    return value


def _repetition_penalty(value: float | None) -> float:
    if value is None:
        return 1.0
    if not MIN_REPETITION_PENALTY <= value <= 2.0:
        allowed = f"[{MIN_REPETITION_PENALTY:g}, 2]"
        raise InvalidArgument("repetition_penalty", f"is {value}: must be in {allowed}, where 1 is off")
    return value


def _logit_bias(biases: tuple[tuple[int, float], ...], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """In the order of token ids, so that equal requests are equal."""
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidArgument("logit_bias", f"has {len(biases)} tokens: at most {MAX_LOGIT_BIASES} are allowed")
    for token_id, bias in biases:
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument("logit_bias", f"token {token_id}: must be in [0, {vocab_size - 1}], the vocabulary")
        if not -100.0 <= bias <= 100.0:
            raise InvalidArgument("logit_bias", f"of token {token_id} is {bias}: must be in [-100, 100]")
    return tuple(sorted(biases))


def _logprobs(value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidArgument("logprobs", f"is {value}: must be in [0, {MAX_LOGPROBS}]")
    return value
