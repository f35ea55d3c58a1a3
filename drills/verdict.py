"""Evidence in, verdict out. Pure: no cluster, no clock, no file.

    PASS     the load was not empty, every named phase was hit, requests failed over where the drill is about that,
             every answer is equal to its undisturbed one, every request has had its terminal event, every block is back
    FAIL     anything else, with each reason
    SKIPPED  the drill could not be held here, with the reason

Repeated, lost and changed tokens are counted on an alignment of both answers: a run of tokens more than there should be
is repeated if it copies its neighbours, else changed; a run that is missing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    SKIPPED = "SKIPPED"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client has of one output. `end`: finish reason, stop match and usage, as a value to compare."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[object, ...] = ()
    end: object = None


class Wish(StrEnum):
    """How a request should have ended."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    COMPLETE_OR_REFUSED = "complete or refused"
    CONVICTED = "convicted"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One disturbed request and its undisturbed answer. `error_code` is None where it ended regularly; `terminal` says
    whether the router ended it at all. Gaps are the waits between successive arrivals that a fault fell into."""

    request_id: str
    wish: Wish
    expected: tuple[Answer, ...]
    received: tuple[Answer, ...]
    terminal: bool
    error_code: str | None = None
    error: str = ""
    exact: bool = True
    failed_over: bool = False
    stalls_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A fault that was injected: what, where, at which phase, and whether the evidence shows that it hit that phase.
    `at_s` and the others are seconds; `detected_s` and `recovered_s` count from the fault, None: not seen."""

    at_s: float
    fault: str
    victim: str
    phase: str
    hit: bool
    detected_s: float | None = None
    recovered_s: float | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a drill leaves. `problems`: what the drill itself found wrong, in words. `watched`: what became of the
    memory, threads and files of processes that lived through it, by name."""

    exchanges: tuple[Exchange, ...] = ()
    marks: tuple[Mark, ...] = ()
    leaked_blocks: int = 0
    problems: tuple[str, ...] = ()
    watched: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rules:
    """What this drill must show beside equality."""

    failover: bool = True  # at least one request went on elsewhere
    phases: tuple[str, ...] = ()  # each must have been hit
    refusals: bool = False  # at least one request was refused, and at least one was not


@dataclass(frozen=True, slots=True)
class Difference:
    lost: int = 0
    repeated: int = 0
    changed: int = 0

    def __add__(self, other: Difference) -> Difference:
        return Difference(self.lost + other.lost, self.repeated + other.repeated, self.changed + other.changed)


@dataclass(frozen=True, slots=True)
class Verdict:
    drill: str
    status: Status
    reasons: tuple[str, ...] = ()
    requests: int = 0
    tokens: int = 0
    failed_over: int = 0
    lost: int = 0
    repeated: int = 0
    changed: int = 0
    without_terminal: int = 0
    leaked_blocks: int = 0
    phase_hits: dict[str, str] = field(default_factory=dict)  # phase -> "hits/faults"
    detection_ms: float | None = None  # the longest
    stall_p50_ms: float | None = None
    stall_p99_ms: float | None = None
    recovery_ms: float | None = None  # the longest
    watched: dict[str, str] = field(default_factory=dict)  # process -> its footprint, from and to
    seed: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(drill: str, evidence: Evidence, rules: Rules, seed: int = 0, seconds: float = 0.0) -> Verdict:
    """The verdict on a drill that was held."""
    differences = [_of_exchange(exchange) for exchange in evidence.exchanges]
    total = sum(differences, Difference())
    stalls = sorted(stall for exchange in evidence.exchanges for stall in exchange.stalls_s)
    reasons = [*_about_load(evidence, rules), *_about_answers(evidence, total), *_about_state(evidence)]
    return Verdict(
        drill=drill,
        status=Status.FAIL if reasons else Status.PASS,
        reasons=tuple(reasons),
        requests=len(evidence.exchanges),
        tokens=sum(len(answer.token_ids) for exchange in evidence.exchanges for answer in exchange.received),
        failed_over=sum(exchange.failed_over for exchange in evidence.exchanges),
        lost=total.lost,
        repeated=total.repeated,
        changed=total.changed,
        without_terminal=sum(not exchange.terminal for exchange in evidence.exchanges),
        leaked_blocks=evidence.leaked_blocks,
        phase_hits=_phase_hits(evidence.marks),
        detection_ms=_longest_ms(mark.detected_s for mark in evidence.marks),
        stall_p50_ms=_percentile_ms(stalls, 0.50),
        stall_p99_ms=_percentile_ms(stalls, 0.99),
        recovery_ms=_longest_ms(mark.recovered_s for mark in evidence.marks),
        watched=evidence.watched,
        seed=seed,
        seconds=round(seconds, 1),
    )


def skipped(drill: str, reason: str) -> Verdict:
    return Verdict(drill=drill, status=Status.SKIPPED, reasons=(reason,))


def differences(expected: Sequence[int], received: Sequence[int]) -> Difference:
    """How an answer's tokens differ from the ones they should be."""
    if list(expected) == list(received):
        return Difference()
    lost = repeated = changed = 0
    for kind, a, b, c, d in SequenceMatcher(None, expected, received, autojunk=False).get_opcodes():
        missing, more = b - a, d - c
        if kind == "delete":
            lost += missing
        elif kind == "insert" and _copies_neighbours(received, c, d):
            repeated += more
        elif kind == "insert":
            changed += more
        elif kind == "replace":
            changed += max(missing, more)
    return Difference(lost, repeated, changed)


def _copies_neighbours(tokens: Sequence[int], start: int, stop: int) -> bool:
    run, length = list(tokens[start:stop]), stop - start
    return list(tokens[max(0, start - length) : start]) == run or list(tokens[stop : stop + length]) == run


def _of_exchange(exchange: Exchange) -> Difference:
    """A cancelled or refused request may lack the rest, but what it has must be right."""
    partial = exchange.wish is Wish.CANCELLED or _refused(exchange) or exchange.wish is Wish.CONVICTED
    total = Difference()
    for index, expected in enumerate(exchange.expected):
        received = exchange.received[index].token_ids if index < len(exchange.received) else ()
        total += differences(expected.token_ids[: len(received)] if partial else expected.token_ids, received)
    return total


def _refused(exchange: Exchange) -> bool:
    return exchange.wish is Wish.COMPLETE_OR_REFUSED and exchange.error_code == "RESOURCE_EXHAUSTED"


def _about_load(evidence: Evidence, rules: Rules) -> list[str]:
    reasons = []
    if not any(answer.token_ids for exchange in evidence.exchanges for answer in exchange.received):
        reasons.append("the load was empty: no token was received")
    hit = {mark.phase for mark in evidence.marks if mark.hit}
    reasons += [f"no fault hit the phase {phase!r}" for phase in rules.phases if phase not in hit]
    if rules.failover and not any(exchange.failed_over for exchange in evidence.exchanges):
        reasons.append("no request failed over: the faults touched nobody")
    if rules.refusals:
        refused = sum(_refused(exchange) for exchange in evidence.exchanges)
        if not refused:
            reasons.append("no request was refused: it was no overload")
        elif refused == len(evidence.exchanges):
            reasons.append("every request was refused")
    return reasons


def _about_answers(evidence: Evidence, total: Difference) -> list[str]:
    reasons = [
        f"{count} tokens were {what}"
        for what, count in (("lost", total.lost), ("repeated", total.repeated), ("changed", total.changed))
        if count
    ]
    endless = [exchange for exchange in evidence.exchanges if not exchange.terminal]
    if endless:
        reasons.append(f"{len(endless)} requests had no terminal event: {_names(endless)}")
    for code, wrong in _wrong_ends(evidence).items():
        reasons.append(f"{len(wrong)} requests ended with {code} and should not: {_names(wrong)} ({wrong[0].error})")
    whole = [exchange for exchange in evidence.exchanges if exchange.terminal and exchange.error_code is None]
    for what, read in (("text", "text"), ("logprobs", "logprobs"), ("finish reason, stop or usage", "end")):
        differ = [
            exchange
            for exchange in whole
            if [getattr(each, read) for each in exchange.expected]
            != [getattr(each, read) for each in exchange.received]
        ]
        if differ:
            reasons.append(f"the {what} of {len(differ)} requests changed: {_names(differ)}")
    inexact = [exchange for exchange in whole if not exchange.exact]
    if inexact:
        reasons.append(f"{len(inexact)} requests were told that they are not exact: {_names(inexact)}")
    return reasons


def _wrong_ends(evidence: Evidence) -> dict[str, list[Exchange]]:
    wrong: dict[str, list[Exchange]] = {}
    for exchange in evidence.exchanges:
        if exchange.terminal and not _may_end_so(exchange):
            wrong.setdefault(exchange.error_code or "an answer", []).append(exchange)
    return wrong


def _may_end_so(exchange: Exchange) -> bool:
    match exchange.wish:
        case Wish.COMPLETE:
            return exchange.error_code is None
        case Wish.CANCELLED:
            return exchange.error_code in (None, "CANCELLED")
        case Wish.COMPLETE_OR_REFUSED:
            return exchange.error_code in (None, "RESOURCE_EXHAUSTED")
        case Wish.CONVICTED:
            return exchange.error_code in ("INTERNAL", "FAILED_PRECONDITION")


def _about_state(evidence: Evidence) -> list[str]:
    reasons = list(evidence.problems)
    if evidence.leaked_blocks:
        reasons.append(f"{evidence.leaked_blocks} blocks leaked: still leased when no request was left")
    return reasons


def _names(exchanges: Sequence[Exchange]) -> str:
    names = [exchange.request_id for exchange in exchanges[:3]]
    return ", ".join(names) + (" …" if len(exchanges) > 3 else "")


def _phase_hits(marks: Iterable[Mark]) -> dict[str, str]:
    counts: dict[str, list[int]] = {}
    for mark in marks:
        count = counts.setdefault(mark.phase, [0, 0])
        count[0] += mark.hit
        count[1] += 1
    return {phase: f"{hits}/{faults}" for phase, (hits, faults) in counts.items()}


def _longest_ms(seconds: Iterable[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return round(max(known) * 1e3, 1) if known else None


def _percentile_ms(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 1)
