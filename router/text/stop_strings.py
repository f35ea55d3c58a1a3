"""Stop strings: ends a text where one of them completes, and never shows a part of it.

The match is the one that completes first; of several that complete at the same character, the longest, which is the
one that begins first. So the answer does not depend on how the text was cut into pushes, and never waits for a
longer stop string that may or may not come. The stop string is not part of the text.

Each stop string runs as a Knuth-Morris-Pratt automaton: constant work a character, and the states say how much of
the text could still be the beginning of a match and must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one sequence. One push after the other, from one thread."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings; none at all is fine."""
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, once one has."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece of text. Returns what of all text so far became final, and the match if there is one.

        After a match everything further is swallowed.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._automata:
            return text, None
        whole = self._held + text
        for index, char in enumerate(text):
            completed = [automaton.pattern for automaton in self._automata if automaton.step(char)]
            if completed:
                self._matched = max(completed, key=len)
                self._held = ""
                end = len(whole) - len(text) + index + 1
                return whole[: end - len(self._matched)], self._matched
        border = len(whole) - max(automaton.state for automaton in self._automata)
        self._held = whole[border:]
        return whole[:border], None

    def finish(self) -> str:
        """The text is over: what was held back is final after all. Empty after a match."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """`state` is the length of the longest prefix of `pattern` that the text so far ends with."""

    __slots__ = ("_borders", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._borders = _borders(pattern)

    def step(self, char: str) -> bool:
        """Take one character; true if it completes the pattern. Not to be stepped again after that."""
        state = self.state
        while state and self.pattern[state] != char:
            state = self._borders[state - 1]
        if self.pattern[state] == char:
            state += 1
        self.state = state
        return state == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
