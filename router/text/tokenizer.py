"""A checkpoint's tokenizer: text and chats to prompt ids.

Reads what the checkpoint's directory holds, with the ecosystem's meaning:

    tokenizer.json           the vocabulary and the pipeline; required
    tokenizer_config.json    names of special tokens, perhaps the chat template; may be absent
    chat_template.jinja      the chat template; goes before the one in tokenizer_config.json; may be absent

Which special tokens a prompt gets is tokenizer.json's word alone (its post-processor): add_bos_token and add_eos_token
in tokenizer_config.json describe tokenizers without that file.

It does not know the model: an id can lie outside the model's vocabulary, and a prompt can be too long for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, models

from pdserve.errors import ConfigError, InvalidArgument
from router.text.chat_template import ChatMessage, ChatTemplate
from router.text.decoders import StreamDecoder, stream_decoder

SPECIAL_TOKEN_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_ADDED_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """Does not change after it is loaded; its methods may run in any thread."""

    def __init__(self, pipeline: tokenizers.Tokenizer, chat_template: ChatTemplate | None) -> None:
        """Use `load`. `pipeline` belongs to the new tokenizer. Raises ConfigError if its decoder is unknown."""
        self._pipeline = pipeline
        self._chat_template = chat_template
        self._special_ids = frozenset(
            token_id for token_id, token in pipeline.get_added_tokens_decoder().items() if token.special
        )
        self.new_decoder: Callable[[], StreamDecoder] = stream_decoder(_decoder_spec(pipeline))

    @classmethod
    def load(cls, directory: Path, now: Callable[[], datetime] = datetime.now) -> Tokenizer:
        """Read a checkpoint's directory. `now` is the time that templates see. Raises ConfigError naming the file."""
        config_path = directory / "tokenizer_config.json"
        config = _read_object(config_path) if config_path.is_file() else {}
        pipeline = _load_pipeline(directory / "tokenizer.json")
        try:
            special_tokens = _special_tokens(config)
            _add_tokens(pipeline, config, special_tokens)
            source = _chat_template_source(directory, config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{config_path}: malformed: {error!r}") from error
        try:
            return cls(pipeline, None if source is None else ChatTemplate(source, special_tokens, now))
        except ConfigError as error:
            raise ConfigError(f"{directory}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the tokenizer knows, added ones included."""
        return self._pipeline.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written in it count as such, as in the ecosystem. `add_special_tokens`: put
        around it what the checkpoint says (often a bos token). Text of a megabyte takes about a second, without the
        interpreter's lock: that is why it is a batch of one."""
        (encoded,) = self._pipeline.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def render_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """The text of a chat's prompt. Raises InvalidArgument("chat", ...) if there is none."""
        if self._chat_template is None:
            raise InvalidArgument("chat", "the served model has no chat template: send a prompt instead")
        return self._chat_template.render(messages, add_generation_prompt)

    def apply_chat_template(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a chat's prompt. The template alone decides on special tokens."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of `token_ids`, special tokens left out. Unknown ids have no text."""
        return self._pipeline.decode(list(token_ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for a special token or an unknown id: they have no text."""
        return None if token_id in self._special_ids else self._pipeline.id_to_token(token_id)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None


def _load_pipeline(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path)
    try:
        pipeline = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path}: not a tokenizer: {error}") from error
    # A file may carry the settings of the training run; a prompt is never cut or padded.
    pipeline.no_truncation()
    pipeline.no_padding()
    return pipeline


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name to text of the special tokens that the config has."""
    found = {name: _token_text(config.get(name)) for name in SPECIAL_TOKEN_NAMES}
    return {name: text for name, text in found.items() if text}


def _token_text(value: Any) -> str | None:
    """The config writes a token as its text or as an object with its flags."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _add_tokens(pipeline: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Make known what only the config declares: added tokens, and special tokens that tokenizer.json has as plain
    ones."""
    declared = config.get("added_tokens_decoder") or {}
    known = {token.content for token in pipeline.get_added_tokens_decoder().values()}
    for _, value in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _token_text(value)
        if text and text not in known:
            pipeline.add_tokens([AddedToken(text, **{flag: bool(value.get(flag)) for flag in _ADDED_TOKEN_FLAGS})])
    specials = {token.content for token in pipeline.get_added_tokens_decoder().values() if token.special}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [*special_tokens.values(), *filter(None, map(_token_text, _values(extra)))]
    pipeline.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(named) if text not in specials]
    )


def _values(tokens: Any) -> Iterable[Any]:
    return tokens.values() if isinstance(tokens, dict) else tokens


def _chat_template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    if not (template is None or isinstance(template, str)):
        raise TypeError(f"chat_template is of type {type(template).__name__}")
    return template


def _decoder_spec(pipeline: tokenizers.Tokenizer) -> Any:
    """The decoder as tokenizer.json writes it today, whatever older form the file has. An empty pipeline carries it,
    so that the vocabulary is not written out for it."""
    if pipeline.decoder is None:
        return None
    shell = tokenizers.Tokenizer(models.BPE())
    shell.decoder = pipeline.decoder
    return json.loads(shell.to_str())["decoder"]
