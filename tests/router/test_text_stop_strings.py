"""Stop strings over the borders of pushes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text import StopStrings


def run(stops: list[str], pushes: list[str]) -> tuple[str, str | None]:
    stop_strings = StopStrings(stops)
    text = "".join(stop_strings.push(push)[0] for push in pushes)
    return text + stop_strings.finish(), stop_strings.matched


def first_completed(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition, spelled out: the shortest beginning of the text that ends in a stop string, cut before it."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[: end - len(stop)], stop
    return text, None


@st.composite
def texts_in_pieces(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.text("abA", max_size=4), max_size=12))


@given(st.lists(st.text("abA", min_size=1, max_size=5), max_size=4), texts_in_pieces())
def test_result_is_the_first_completed_stop_however_the_text_was_cut(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == first_completed(stops, "".join(pieces))


@given(st.lists(st.text("abA", min_size=1, max_size=5), min_size=1, max_size=4), texts_in_pieces())
def test_only_what_could_become_a_stop_string_is_withheld(stops: list[str], pieces: list[str]) -> None:
    stop_strings, emitted, text = StopStrings(stops), "", ""
    for piece in pieces:
        emitted += stop_strings.push(piece)[0]
        text += piece
        if stop_strings.matched is not None:
            return
        withheld = text[len(emitted) :]
        prefixes = {stop[:size] for stop in stops for size in range(len(stop))}
        assert withheld == max((prefix for prefix in prefixes if text.endswith(prefix)), key=len)


def test_stop_string_that_begins_in_one_token_and_ends_in_the_next_is_not_shown() -> None:
    stop_strings = StopStrings(["\n\nUser:"])
    assert stop_strings.push("Fine.\n") == ("Fine.", None)
    assert stop_strings.push("\nUser") == ("", None)
    assert stop_strings.push(": more") == ("", "\n\nUser:")
    assert stop_strings.finish() == ""


def test_false_beginning_of_a_stop_string_comes_out_with_the_next_text() -> None:
    stop_strings = StopStrings(["###"])
    assert stop_strings.push("a##") == ("a", None)
    assert stop_strings.push("b") == ("##b", None)


def test_beginning_of_a_stop_string_comes_out_at_the_end() -> None:
    stop_strings = StopStrings(["###"])
    assert stop_strings.push("a##") == ("a", None)
    assert stop_strings.finish() == "##"


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["ab", "abc"], "xabc", ("x", "ab")),  # completes first
        (["bc", "abc"], "xabc", ("x", "abc")),  # complete together: the longest
        (["abcd", "bc"], "xabcd", ("xa", "bc")),  # begins first, completes later
        (["aab"], "aaab", ("a", "aab")),  # overlaps its own beginning
        (["a", "a"], "ba", ("b", "a")),
    ],
)
def test_one_of_several_stop_strings_is_chosen(stops: list[str], text: str, expected: tuple[str, str]) -> None:
    assert run(stops, [text]) == expected
    assert run(stops, list(text)) == expected


def test_text_after_the_match_is_swallowed() -> None:
    stop_strings = StopStrings(["x"])
    assert stop_strings.push("ax") == ("a", "x")
    assert stop_strings.push("bx") == ("", "x")
    assert stop_strings.finish() == ""


def test_without_stop_strings_nothing_is_withheld() -> None:
    assert StopStrings([]).push("anything") == ("anything", None)


@given(st.lists(st.text("abA", min_size=1, max_size=4), max_size=3), texts_in_pieces(), st.data())
def test_fresh_instance_fed_with_the_past_goes_on_as_the_old_one(
    stops: list[str], pieces: list[str], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(pieces)))
    old, fresh = StopStrings(stops), StopStrings(stops)
    before = "".join(old.push(piece)[0] for piece in pieces[:cut])
    assert fresh.push("".join(pieces[:cut]))[0] == before
    assert [fresh.push(piece) for piece in pieces[cut:]] == [old.push(piece) for piece in pieces[cut:]]
    assert fresh.finish() == old.finish()
