"""A set of token positions, kept as disjoint half-open ranges. Knows nothing of what the tokens are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class RangeSet:
    """Disjoint, sorted, never touching ranges [start, stop). Empty ranges are accepted and change nothing."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        first = bisect_left(self._stops, start)  # ranges that touch [start, stop) merge with it
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def discard(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        kept = [
            piece
            for a, b in self.overlaps(start, stop)
            for piece in ((a, min(b, start)), (max(a, stop), b))
            if piece[0] < piece[1]
        ]
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        self._starts[first:last] = [a for a, _ in kept]
        self._stops[first:last] = [b for _, b in kept]

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of [start, stop) is in the set."""
        if start >= stop:
            return True
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and self._stops[index] >= stop

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are in the set, ascending."""
        return [(max(a, start), min(b, stop)) for a, b in self.overlaps(start, stop)]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are not in the set, ascending."""
        gaps = []
        position = start
        for a, b in self.within(start, stop):
            if position < a:
                gaps.append((position, a))
            position = b
        if position < stop:
            gaps.append((position, stop))
        return gaps

    def overlaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The set's ranges, whole, that share a position with [start, stop)."""
        if start >= stop:
            return []
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        return list(zip(self._starts[first:last], self._stops[first:last], strict=True))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __len__(self) -> int:
        """How many positions are in the set."""
        return sum(self._stops) - sum(self._starts)
