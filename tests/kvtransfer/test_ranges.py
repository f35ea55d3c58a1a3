"""RangeSet against a plain set of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.ranges import RangeSet

_SIZE = 24
_RANGES = st.tuples(st.integers(0, _SIZE), st.integers(0, _SIZE))
_STEPS = st.lists(st.tuples(st.sampled_from(["add", "discard"]), _RANGES), max_size=20)


@given(_STEPS, _RANGES)
def test_behaves_like_a_set_of_positions(steps: list[tuple[str, tuple[int, int]]], query: tuple[int, int]) -> None:
    ranges, model = RangeSet(), set[int]()
    for name, (start, stop) in steps:
        if name == "add":
            ranges.add(start, stop)
            model |= set(range(start, stop))
        else:
            ranges.discard(start, stop)
            model -= set(range(start, stop))
    asked = set(range(*query))
    assert positions(list(ranges)) == model
    assert len(ranges) == len(model)
    assert ranges.covers(*query) == (asked <= model)
    assert positions(ranges.within(*query)) == asked & model
    assert positions(ranges.missing(*query)) == asked - model
    assert positions(ranges.overlaps(*query)) >= asked & model
    assert_disjoint_and_apart(list(ranges))
    assert_disjoint_and_apart(ranges.missing(*query))


def test_neighbours_merge() -> None:
    ranges = RangeSet()
    ranges.add(0, 5)
    ranges.add(10, 15)
    ranges.add(5, 10)
    assert list(ranges) == [(0, 15)]


def positions(pieces: list[tuple[int, int]]) -> set[int]:
    return {position for start, stop in pieces for position in range(start, stop)}


def assert_disjoint_and_apart(pieces: list[tuple[int, int]]) -> None:
    assert all(start < stop for start, stop in pieces)
    assert all(before[1] < after[0] for before, after in pairwise(pieces))
