"""The picture: what a row shows, and that the page stands alone."""

from drills.timeline import Panel, Row, draw, page
from drills.verdict import Evidence, Mark, Rules, judge

CALM = Row("calm", 0.0, 10.0, tuple((0.5 + second, 3) for second in range(10)))
STALLED = Row("stalled", 0.0, 10.0, ((1.0, 3), (2.0, 3), (7.5, 9), (8.0, 3)), failed_over=True)
FAILED = Row("failed", 2.0, 4.0, (), failed=True)
MARK = Mark(2.5, "kill", "decode-0", "mid-decode", hit=True)
PANEL = Panel("mid-decode", (CALM, STALLED, FAILED), (MARK,))


def test_a_stall_is_a_gap_under_its_fault():
    title, calm, stalled, failed, scale = draw([PANEL], width=78)
    at = title.index("▼")
    assert title.startswith("mid-decode")
    assert stalled.startswith("↷ stalled")
    assert stalled[at + 2] == "─"
    assert stalled[at - 2 : at + 20].count("─") > 20 > calm[at - 2 : at + 20].count("─")
    assert stalled.endswith("✓")
    assert failed.strip().endswith("✗")
    assert scale.endswith("10.0 s")


def test_waiting_for_the_first_token_looks_different_from_a_stall():
    late = Row("late", 0.0, 4.0, ((2.0, 1), (4.0, 1)))
    line = draw([Panel("", (late,), ())], width=68)[1]
    before, after = line.split("█", 1)
    assert "·" in before
    assert "─" not in before
    assert "─" in after


def test_more_tokens_make_a_higher_bar():
    row = Row("row", 0.0, 3.0, ((0.1, 1), (1.5, 9), (2.9, 1)))
    line = draw([Panel("", (row,), ())], width=58)[1]
    assert "▃" in line
    assert "█" in line


def test_no_line_is_wider_than_the_terminal():
    long = Row("a-name-that-is-much-longer-than-its-place", 0.0, 1.0, ((0.5, 1),))
    assert all(len(line) <= 80 for line in draw([PANEL, Panel("x" * 90, (long,), (MARK,))], width=80))


def test_a_round_without_requests_is_drawn_too():
    assert len(draw([Panel("nothing", (), ())])) == 2


def test_the_page_says_phases_in_words_and_writes_no_mark_over_another():
    marks = tuple(Mark(at_s, "crash", "decode-0", "first crash", hit=True) for at_s in (2.6, 2.5, 9.0))
    document = page([judge("poison", Evidence(marks=marks), Rules())], [[Panel("poisoned", (CALM,), marks)]])
    assert "first crash 3/3" in document
    assert document.count("<line") == 3
    assert document.count(">crash</text>") == 2


def test_the_page_holds_verdict_and_picture_and_nothing_from_elsewhere():
    verdict = judge("kill-<b>", Evidence(problems=("a < b",)), Rules(), seed=5)
    document = page([verdict], [[PANEL]])
    assert "kill-&lt;b&gt;" in document
    assert "a &lt; b" in document
    assert document.count("<svg") == 1
    assert "kill decode-0, mid-decode" in document
    assert "http" not in document.replace("http-equiv", "")
