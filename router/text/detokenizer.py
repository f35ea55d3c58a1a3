"""Token ids to text, as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from router.text.decoders import StreamDecoder


class TokenText(Protocol):
    """What is needed of a tokenizer to turn its ids into text."""

    def token(self, token_id: int) -> str | None:
        """None: it has no text."""
        ...

    def new_decoder(self) -> StreamDecoder: ...


class Detokenizer:
    """The text of one output. One push after the other, from one thread.

    Over any cutting of the ids into pushes, the texts returned by `push` and `finish` joined together equal
    `decode(prompt + output)[len(decode(prompt)):]` of the tokenizer (but for very long runs of byte tokens, see
    SentencePieceDecoder). So a leading space is there unless the output begins the text. A prompt of ids may end inside
    a character: that counts as the U+FFFD it decodes to, also where the output completes it. No character is ever
    split; special tokens have no text. Constant time a token, and a prompt of any length costs the same.
    """

    def __init__(self, tokenizer: TokenText, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.new_decoder()
        texts = map(tokenizer.token, reversed(prompt_ids))
        self._prompt_chars = self._decoder.follow(text for text in texts if text is not None)  # yet to be left out

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; returns the text that became final with them, often "" inside a character."""
        tokens = [self._tokenizer.token(token_id) for token_id in token_ids]
        return self._beyond_prompt(self._decoder.push([token for token in tokens if token is not None]))

    def finish(self) -> str:
        """No more ids: returns what was held back, incomplete characters as U+FFFD. Call once."""
        return self._beyond_prompt(self._decoder.finish())

    def _beyond_prompt(self, text: str) -> str:
        left_out = min(self._prompt_chars, len(text))
        self._prompt_chars -= left_out
        return text[left_out:]
