"""The verdict: what passes, and that every kind of harm fails with its own reason."""

import re
from dataclasses import replace

import pytest

from drills.verdict import (
    Answer,
    Difference,
    Evidence,
    Exchange,
    Mark,
    Rules,
    Status,
    Wish,
    differences,
    judge,
    skipped,
)

ANSWER = Answer((5, 6, 7, 8), "five to eight", ("a", "b", "c", "d"), ("length", None, 3, 4))
GOOD = Exchange("r-1", Wish.COMPLETE, (ANSWER,), (ANSWER,), terminal=True, failed_over=True, stalls_s=(0.5,))
HIT = Mark(1.0, "kill", "decode-0", "mid-decode", hit=True, detected_s=0.1, recovered_s=7.0)
RULES = Rules(phases=("mid-decode",))


def verdict(*exchanges, marks=(HIT,), rules=RULES, leaked=0, problems=()):
    return judge("a-drill", Evidence(exchanges, marks, leaked, problems), rules, seed=3, seconds=1.26)


def with_tokens(*token_ids):
    return replace(GOOD, received=(replace(ANSWER, token_ids=token_ids),))


def test_equal_answers_a_hit_phase_and_a_failover_pass():
    passed = verdict(GOOD, replace(GOOD, request_id="r-2", failed_over=False, stalls_s=()))
    assert (passed.status, passed.reasons) == (Status.PASS, ())
    assert (passed.requests, passed.tokens, passed.failed_over, passed.seed) == (2, 8, 1, 3)
    assert passed.phase_hits == {"mid-decode": "1/1"}
    assert (passed.detection_ms, passed.recovery_ms, passed.stall_p50_ms) == (100.0, 7000.0, 500.0)


@pytest.mark.parametrize(
    ("received", "difference"),
    [
        ((5, 6, 7, 8), Difference()),
        ((5, 6), Difference(lost=2)),
        ((5, 6, 8), Difference(lost=1)),
        ((5, 6, 6, 7, 8), Difference(repeated=1)),
        ((5, 6, 5, 6, 7, 8), Difference(repeated=2)),
        ((5, 6, 9, 7, 8), Difference(changed=1)),
        ((5, 9, 7, 8), Difference(changed=1)),
        ((), Difference(lost=4)),
    ],
)
def test_tokens_are_told_apart_as_lost_repeated_and_changed(received, difference):
    assert differences((5, 6, 7, 8), received) == difference


@pytest.mark.parametrize(
    ("exchange", "reason"),
    [
        (with_tokens(5, 6, 7), "1 tokens were lost"),
        (with_tokens(5, 5, 6, 7, 8), "1 tokens were repeated"),
        (with_tokens(5, 6, 7, 9), "1 tokens were changed"),
        (replace(GOOD, terminal=False, error_code="DEADLINE_EXCEEDED"), "1 requests had no terminal event: r-1"),
        (replace(GOOD, error_code="INTERNAL", error="a bug"), r"1 requests ended with INTERNAL .* r-1 \(a bug\)"),
        (replace(GOOD, received=(replace(ANSWER, text="other"),)), "the text of 1 requests changed"),
        (replace(GOOD, received=(replace(ANSWER, logprobs=("a",)),)), "the logprobs of 1 requests changed"),
        (replace(GOOD, received=(replace(ANSWER, end="stop"),)), "the finish reason, stop or usage of 1 requests"),
        (replace(GOOD, exact=False), "1 requests were told that they are not exact"),
        (replace(GOOD, failed_over=False), "no request failed over"),
        (replace(GOOD, received=()), "4 tokens were lost"),
    ],
)
def test_harm_to_a_request_fails_with_its_reason(exchange, reason):
    failed = verdict(exchange)
    assert failed.status is Status.FAIL
    assert any(re.match(reason, each) for each in failed.reasons), failed.reasons


def test_an_empty_load_fails():
    assert verdict(marks=()).reasons[0].startswith("the load was empty")
    assert verdict(replace(GOOD, expected=(Answer(),), received=(Answer(),))).status is Status.FAIL


def test_a_phase_that_no_fault_hit_fails():
    missed = verdict(GOOD, marks=(replace(HIT, hit=False),))
    assert missed.reasons == ("no fault hit the phase 'mid-decode'",)
    assert missed.phase_hits == {"mid-decode": "0/1"}


def test_one_hit_among_misses_is_enough():
    passed = verdict(GOOD, marks=(replace(HIT, hit=False), HIT))
    assert (passed.status, passed.phase_hits) == (Status.PASS, {"mid-decode": "1/2"})


def test_leaked_blocks_fail():
    assert verdict(GOOD, leaked=7).reasons == ("7 blocks leaked: still leased when no request was left",)


def test_what_the_drill_itself_found_fails():
    assert verdict(GOOD, problems=("decode-1 did not come back",)).reasons == ("decode-1 did not come back",)


def test_a_cancelled_request_needs_only_a_right_beginning():
    cut = replace(GOOD, wish=Wish.CANCELLED, error_code="CANCELLED", received=(Answer((5, 6)),))
    assert verdict(cut).status is Status.PASS
    assert verdict(replace(cut, received=(Answer((5, 9)),))).changed == 1


def test_an_overload_needs_refused_and_served_requests():
    refused = replace(GOOD, wish=Wish.COMPLETE_OR_REFUSED, error_code="RESOURCE_EXHAUSTED", received=())
    served = replace(GOOD, wish=Wish.COMPLETE_OR_REFUSED)
    rules = Rules(failover=False, refusals=True)
    assert verdict(refused, served, rules=rules).status is Status.PASS
    assert verdict(served, rules=rules).reasons == ("no request was refused: it was no overload",)
    assert "every request was refused" in verdict(refused, rules=rules).reasons


def test_a_poisonous_request_must_be_given_up():
    convicted = replace(GOOD, wish=Wish.CONVICTED, error_code="INTERNAL", received=(Answer((5,)),))
    assert verdict(convicted).status is Status.PASS
    assert verdict(replace(GOOD, wish=Wish.CONVICTED)).status is Status.FAIL


def test_a_lost_output_of_several_is_lost():
    both = replace(GOOD, expected=(ANSWER, ANSWER))
    assert verdict(both).lost == 4


def test_a_skipped_drill_says_why():
    assert skipped("partition", "no rights").as_dict()["reasons"] == ("no rights",)
