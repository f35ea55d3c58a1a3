"""Token ids to text, as they come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from router.text.decoders import StreamDecoder


class TokenText(Protocol):
    """What is needed of a tokenizer to turn its ids into text."""

    def token(self, token_id: int) -> str | None:
        """None: it has no text."""
        ...

    def new_decoder(self) -> StreamDecoder: ...


class Detokenizer:
    """The text of one sequence. One push after the other, from one thread.

    Over any cutting of the ids into pushes, the texts returned by `push` and `finish` joined together equal
    `tokenizer.decode(all ids)`. No character is ever split; special tokens have no text. Constant time a token.
    """

    def __init__(self, tokenizer: TokenText) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.new_decoder()

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; returns the text that became final with them, often "" inside a character."""
        tokens = [self._tokenizer.token(token_id) for token_id in token_ids]
        return self._decoder.push([token for token in tokens if token is not None])

    def finish(self) -> str:
        """No more ids: returns what was held back, incomplete characters as U+FFFD. Call once."""
        return self._decoder.finish()
