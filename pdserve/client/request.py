"""What a caller writes, turned into a GenerateRequest.

Only types are settled here, and that text is Unicode; values are the server's to judge. What can be read only once, as
a generator, is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral  # numpy's integers too
from typing import Any, TypedDict, cast

from google.protobuf.descriptor import FieldDescriptor

from pdserve.errors import InvalidArgument
from pdserve.rpc import inference_pb2 as pb
from pdserve.text import check_unicode

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: f"must be between {-(2**31)} and {2**31 - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"must be between 0 and {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"must be between 0 and {2**64 - 1}",
}

Message = Mapping[str, str] | tuple[str, str]  # {"role": ..., "content": ...} or (role, content)
Prompt = str | Iterable[int] | Iterable[Message]  # text, token ids or a chat


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
    """Raises TypeError for an unknown option or a wrong type, InvalidArgument for what the wire cannot carry: a number
    out of range, text that is not Unicode."""
    if unknown := sorted(set(options) - set(GenerateOptions.__annotations__)):
        raise TypeError(f"unknown option: {', '.join(unknown)}")
    request = pb.GenerateRequest()
    for name in ("request_id", "model"):
        if options.get(name):
            setattr(request, name, _text(name, cast("str", options.get(name))))
    _set_input(request, prompt)
    values: dict[str, Any] = {**options, "stop": _stop_strings(options.get("stop"))}
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


def _stop_strings(stop: str | Sequence[str] | None) -> list[str] | None:
    if stop is None:
        return None
    strings = [stop] if isinstance(stop, str) else stop
    return [_text("stop", each, f"stop[{index}]") for index, each in enumerate(strings)]


def _set_input(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.prompt = _text("prompt", prompt)
        return
    if isinstance(prompt, bytes | bytearray):
        raise TypeError("a prompt is text, token ids or messages, not bytes")
    items = list(prompt)
    if all(isinstance(item, Integral) for item in items):
        try:
            request.prompt_token_ids.CopyFrom(pb.TokenIds(ids=cast("list[int]", items)))
        except ValueError as error:
            raise InvalidArgument("prompt_token_ids", str(error)) from None
    else:
        messages = [_message(index, message) for index, message in enumerate(cast("list[Message]", items))]
        request.chat.CopyFrom(pb.Chat(messages=messages))


def _message(index: int, message: Message) -> pb.ChatMessage:
    if isinstance(message, Mapping):
        if set(message) != {"role", "content"}:
            raise TypeError(f"a message has role and content, not {', '.join(sorted(message))}")
        role, content = message["role"], message["content"]
    elif isinstance(message, tuple) and len(message) == 2:
        role, content = message
    else:
        raise TypeError(f"a message is a mapping or a pair of role and content, not {message!r}")
    where = f"messages[{index}]"
    return pb.ChatMessage(role=_text("chat", role, f"{where}.role"), content=_text("chat", content, f"{where}.content"))


def _text(field: str, value: str, part: str = "") -> str:
    """`value`, which goes into that part of a field."""
    if not isinstance(value, str):
        raise TypeError(f"{part or field} is text, not {type(value).__name__}")
    check_unicode(field, value, part)
    return value


def abort_request(request_id: str) -> pb.AbortRequest:
    """Raises InvalidArgument for an id that is not Unicode."""
    return pb.AbortRequest(request_id=_text("request_id", request_id))


def drain_request(worker_id: str, cancel: bool) -> pb.DrainWorkerRequest:
    """Raises InvalidArgument for an id that is not Unicode."""
    return pb.DrainWorkerRequest(worker_id=_text("worker_id", worker_id), cancel=cancel)
