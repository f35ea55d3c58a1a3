"""A checkpoint's tokenizer: text and chats to prompt ids, ids to text. `tokenizer_files` says what it is made of.

It does not know the model: an id can lie outside the model's vocabulary, and a prompt can be too long for it.

Ids equal those of transformers' AutoTokenizer for the same directory. `decode` equals its
`decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)`: special tokens have no text, and a space
before a comma is the model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from pdserve.errors import ConfigError, InvalidArgument
from router.text.chat_template import ChatMessage, ChatTemplate
from router.text.decoders import StreamDecoder, stream_decoder
from router.text.tokenizer_files import read_tokenizer_files


class Tokenizer:
    """Does not change after it is loaded; its methods may run in any thread."""

    def __init__(self, pipeline: tokenizers.Tokenizer, chat_template: ChatTemplate | None) -> None:
        """Use `load`. `pipeline` belongs to the new tokenizer. Raises ConfigError if its decoder is unknown."""
        self._pipeline = pipeline
        self._chat_template = chat_template
        self.new_decoder: Callable[[], StreamDecoder] = stream_decoder(_decoder_spec(pipeline))
        self._special_ids = _special_ids(pipeline)

    @classmethod
    def load(cls, directory: Path, now: Callable[[], datetime] = datetime.now) -> Tokenizer:
        """Read a checkpoint's directory. `now` is the time that templates see. Raises ConfigError naming the file."""
        files = read_tokenizer_files(directory)
        try:
            source = files.chat_template
            return cls(files.pipeline, None if source is None else ChatTemplate(source, files.special_tokens, now))
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


def _special_ids(pipeline: tokenizers.Tokenizer) -> frozenset[int]:
    """The ids that a decode skips. It is asked itself: a token declared twice may be special without saying so."""
    decoder, pipeline.decoder = pipeline.decoder, None
    ids = pipeline.get_added_tokens_decoder().keys()
    special = frozenset(token_id for token_id in ids if not pipeline.decode([token_id], skip_special_tokens=True))
    pipeline.decoder = decoder
    return special


def _decoder_spec(pipeline: tokenizers.Tokenizer) -> Any:
    """The decoder as tokenizer.json writes it today, whatever older form the file has. An empty pipeline carries it,
    so that the vocabulary is not written out for it."""
    if pipeline.decoder is None:
        return None
    shell = tokenizers.Tokenizer(models.BPE())
    shell.decoder = pipeline.decoder
    return json.loads(shell.to_str())["decoder"]
