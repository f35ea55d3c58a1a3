"""Token ids to text, as they come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence. One push after the other, from one thread.

    Over any cutting of the ids into pushes, the texts returned by `push` and `finish` joined together equal
    `tokenizer.decode(all ids)`. No character is ever split; special tokens have no text. Constant time a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.new_decoder()

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; returns the text that became final with them, often "" inside a character."""
        tokens = [self._tokenizer.token(token_id) for token_id in token_ids]
        return self._decoder.push([token for token in tokens if token is not None])

    def finish(self) -> str:
        """No more ids: returns what was held back, incomplete characters as U+FFFD. Call once."""
        return self._decoder.finish()
