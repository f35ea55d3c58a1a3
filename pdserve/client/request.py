"""What a caller writes, turned into a GenerateRequest.

Only types are settled here; values are the server's to judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral  # numpy's integers too
from typing import Any, TypedDict, cast

from google.protobuf.descriptor import FieldDescriptor

from pdserve.errors import InvalidArgument
from pdserve.rpc import inference_pb2 as pb

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: f"must be between {-(2**31)} and {2**31 - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"must be between 0 and {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"must be between 0 and {2**64 - 1}",
}

Message = Mapping[str, str] | tuple[str, str]  # {"role": ..., "content": ...} or (role, content)
Prompt = str | Sequence[int] | Sequence[Message]  # text, token ids or a chat


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of generate and complete. What is left out or None, the server decides.

    `stop`: a string or several. `logprobs`: n >= 0 asks for each token's own logprob and the n most likely ones'.
    The rest is as pdserve/rpc/inference.proto says.
    """

    request_id: str | None
    model: str | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    logit_bias: Mapping[int, float] | None
    n: int | None


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Raises TypeError for an unknown option or a wrong type, InvalidArgument for a number the wire cannot carry."""
    if unknown := sorted(set(options) - set(GenerateOptions.__annotations__)):
        raise TypeError(f"unknown option: {', '.join(unknown)}")
    request = pb.GenerateRequest(request_id=options.get("request_id") or "", model=options.get("model") or "")
    _set_input(request, prompt)
    stop = options.get("stop")
    values: dict[str, Any] = {**options, "stop": [stop] if isinstance(stop, str) else stop}
    for name in pb.SamplingParams.DESCRIPTOR.fields_by_name:
        if values.get(name) is not None:
            request.sampling.MergeFrom(_sampling(name, values[name]))
    return request


def _sampling(name: str, value: Any) -> pb.SamplingParams:
    try:
        return pb.SamplingParams(**{name: value})
    except ValueError as error:
        allowed = _RANGES.get(pb.SamplingParams.DESCRIPTOR.fields_by_name[name].cpp_type, str(error))
        raise InvalidArgument(name, f"is {value!r}: {allowed}") from None


def _set_input(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.prompt = prompt
    elif all(isinstance(item, Integral) for item in prompt):
        try:
            request.prompt_token_ids.CopyFrom(pb.TokenIds(ids=cast("Sequence[int]", prompt)))
        except ValueError as error:
            raise InvalidArgument("prompt_token_ids", str(error)) from None
    else:
        messages = [_message(message) for message in cast("Sequence[Message]", prompt)]
        request.chat.CopyFrom(pb.Chat(messages=messages))


def _message(message: Message) -> pb.ChatMessage:
    if isinstance(message, Mapping):
        if set(message) != {"role", "content"}:
            raise TypeError(f"a message has role and content, not {', '.join(sorted(message))}")
        return pb.ChatMessage(role=message["role"], content=message["content"])
    if not isinstance(message, tuple) or len(message) != 2:
        raise TypeError(f"a message is a mapping or a pair of role and content, not {message!r}")
    return pb.ChatMessage(role=message[0], content=message[1])
