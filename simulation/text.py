"""The simulated model's text, and what a client must have in the end. The router's own code makes both.

A token is one of few letters, so that stop strings begin often and complete seldom, and text is held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.types import Finish, FinishReason
from router.generation import OutputText
from simulation.oracle import EOS, Script

_LETTERS = "abcde"


class Letters:
    """As a tokenizer for generation: one letter a token, none for a special one."""

    def token(self, token_id: int) -> str | None:
        return None if token_id == EOS else _LETTERS[token_id % len(_LETTERS)]

    def new_decoder(self) -> Letters:
        return self

    def follow(self, prompt: Iterator[str]) -> int:
        return 0

    def push(self, tokens: Iterable[str]) -> str:
        return "".join(tokens)

    def finish(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One output as its client must have it."""

    text: str
    token_count: int
    finish: Finish


def answer(script: Script, stops: Sequence[str]) -> Answer:
    """What an undisturbed stream brings, up to a stop string."""
    output = OutputText(Letters(), tuple(stops), script.params.min_tokens, False)
    text = ""
    for token in script.tokens:
        text += output.push([token]).text
        if output.stop is not None:
            return Answer(text, output.token_count, Finish(FinishReason.STOP, stop=output.stop))
    return Answer(text + output.flush(), output.token_count, script.finish)


def stops_within(script: Script, at: int) -> tuple[str, ...]:
    """Stop strings for a request: one that its text has around token `at`, and one that it only begins."""
    text = "".join(Letters().token(token.token_id) or "" for token in script.tokens)
    return text[max(0, at - 3) : at] or "a", text[at : at + 4] + "#"
