"""Growth is told after a process has settled, and only of a process that has lived on."""

import os
from dataclasses import replace

import pytest

from drills.footprint import Footprint, footprint, trends

START = Footprint(0.0, "decode-0", 7, 500 << 20, 20, 60)


def later(at_s, **changes):
    return replace(START, at_s=at_s, **changes)


def growth(samples):
    return [problem for trend in trends(samples) for problem in trend.growth()]


def test_what_stays_flat_after_two_minutes_has_not_grown():
    settled = {"rss_bytes": 900 << 20, "threads": 40, "files": 90}
    assert growth([START, later(130.0, **settled), later(600.0, **settled)]) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rss_bytes": 600 << 20}, "memory grew from 500 to 600 MiB"),
        ({"threads": 30}, "threads grew from 20 to 30"),
        ({"files": 80}, "open files grew from 60 to 80"),
    ],
)
def test_growth_is_named(change, words):
    assert growth([START, later(130.0), later(600.0, **change)]) == [f"decode-0: {words}"]


def test_a_trend_says_from_what_to_what():
    (trend,) = trends([START, later(130.0), later(600.0, rss_bytes=501 << 20, threads=21, files=59)])
    assert str(trend) == "500 to 501 MiB, 20 to 21 threads, 60 to 59 files in 470 s"


def test_a_process_that_was_replaced_is_not_compared_with_its_successor():
    assert growth([START, later(130.0), later(600.0, pid=8, threads=90)]) == []


def test_this_process_has_a_footprint_and_one_that_is_gone_has_none():
    mine = footprint(1.0, "me", os.getpid())
    assert mine.rss_bytes > 1 << 20
    assert mine.threads >= 1
    assert footprint(1.0, "nobody", 2**22 + 1) is None
