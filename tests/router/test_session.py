"""A router's end of the Session stream, without a stream; above all, when a worker's end may have been a crash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.clock import ManualClock
from pdserve.errors import PdserveError
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.types import Finish, Load, ModelLimits, Owner, Role, SampledToken, Ticket, WorkerInfo
from router.session import SessionTerms, WorkerSession

INFO = WorkerInfo("decode-0", "decode-0-a", Role.DECODE, 1, "h", "ipc://x", "print", "m", ModelLimits(100, 99, 99))
TERMS = SessionTerms("router-a", "m", renew_interval_ms=250, timeout_ms=1_500)
OWNER = Owner("tests", "r", "router-a", 1)
MAX_UNSENT = 4
BROKE, LEFT = "its session broke", "the worker ended its session"


class Bed:
    """A session, its clock, and who is told what comes over it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.told: list[tuple[Any, ...]] = []
        self.woken = 0
        self.session = WorkerSession(TERMS, self, self.clock, self.wake, MAX_UNSENT)

    def wake(self) -> None:
        self.woken += 1

    def worker_joined(self, session: WorkerSession) -> None:
        self.told.append(("joined", session.info.incarnation))

    def worker_left(self, session: WorkerSession, reason: str, crashed: bool) -> None:
        self.told.append(("left", reason, crashed))

    def renewed(self, worker: str, load: Load) -> None:
        self.told.append(("renewed", worker, load))

    def ticket(self, worker: str, owner: Owner, ticket: Ticket) -> None:
        self.told.append(("ticket", worker, owner, ticket))

    def local_prefill(self, worker: str, owner: Owner, reason: str) -> None:
        self.told.append(("local_prefill", worker, owner, reason))

    def tokens(self, worker: str, owner: Owner, first_position: int, tokens: tuple[SampledToken, ...]) -> None:
        self.told.append(("tokens", worker, owner, first_position, tokens))

    def terminal(self, worker: str, owner: Owner, outcome: Finish | PdserveError | None, epoch: int) -> None:
        self.told.append(("terminal", worker, owner, outcome, epoch))

    def sent(self) -> list[str]:
        """What the stream takes now."""
        taken = []
        while (message := self.session.take()) is not None:
            taken.append(message.WhichOneof("message") or "")
        return taken

    def join(self, info: WorkerInfo = INFO) -> None:
        self.session.on_message(pb.WorkerMessage(hello=convert.worker_to_hello(info)))

    def end(self, crash_report: str | None) -> tuple[Any, ...]:
        self.session.ended(crash_report)
        return self.told[-1]


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_a_hello_is_answered_before_anything_else_is_asked(bed: Bed) -> None:
    bed.join()
    assert bed.told == [("joined", INFO.incarnation)]
    message = bed.session.take()
    assert message is not None
    assert (message.welcome.router, message.welcome.renew_interval_ms) == ("router-a", 250)


@pytest.mark.parametrize(
    ("first", "word"),
    [
        (pb.WorkerMessage(load=pb.Load()), "not hello"),
        (pb.WorkerMessage(hello=convert.worker_to_hello(replace(INFO, model="other"))), "'other'"),
        (pb.WorkerMessage(hello=pb.Hello(version=99)), "version 99"),
    ],
)
def test_who_makes_no_sense_is_refused_and_never_was_a_member(bed: Bed, first: pb.WorkerMessage, word: str) -> None:
    bed.session.on_message(first)
    assert bed.session.over
    assert word in bed.session.problem
    bed.session.ended(None)
    assert bed.told == []


def test_no_hello_within_five_seconds_is_refused(bed: Bed) -> None:
    bed.clock.advance(bed.session.next_deadline())
    bed.session.tick()
    assert bed.session.problem == "no hello in time"


def test_it_says_that_it_is_alive_at_its_interval(bed: Bed) -> None:
    bed.join()
    assert bed.sent() == ["welcome"]
    for _ in range(3):
        bed.clock.advance(0.25)
        bed.session.tick()
        assert bed.sent() == ["renew"]


def test_what_a_worker_reports_reaches_the_router_as_values(bed: Bed) -> None:
    bed.join()
    token = SampledToken(7, -0.5)
    batch = pb.OwnerTokens(
        owner=convert.owner_to_proto(OWNER), first_position=3, tokens=[convert.token_to_proto(token)]
    )
    bed.session.on_message(pb.WorkerMessage(tokens=pb.Tokens(batch=[batch])))
    bed.session.on_message(pb.WorkerMessage(terminal=convert.terminal_to_proto(OWNER, None, 3)))
    assert bed.told[1:] == [
        ("tokens", INFO.incarnation, OWNER, 3, (token,)),
        ("terminal", INFO.incarnation, OWNER, None, 3),
    ]


def test_what_must_not_come_ends_it_and_is_no_crash(bed: Bed) -> None:
    bed.join()
    bed.join()
    assert bed.session.over
    assert bed.end(None) == ("left", f"unexpected message hello from {INFO.incarnation}", False)


def test_a_worker_that_reads_too_slowly_loses_it(bed: Bed) -> None:
    bed.join()
    for _ in range(MAX_UNSENT):
        bed.session.send(pb.RouterMessage(renew=pb.Renew()))
    assert bed.session.over
    assert bed.end("") == ("left", BROKE, False)


def test_once_it_is_closed_nothing_that_comes_is_heard(bed: Bed) -> None:
    bed.join()
    woken = bed.woken
    bed.session.close()
    assert bed.woken > woken
    bed.session.on_message(pb.WorkerMessage(load=pb.Load()))
    assert bed.told == [("joined", INFO.incarnation)]
    assert bed.sent() == []


@pytest.mark.parametrize(
    ("goodbye", "crash_report", "reason", "crashed"),
    [
        (True, "", LEFT, False),
        (True, None, LEFT, False),
        (True, "Fatal Python error", f"{LEFT}: Fatal Python error", True),
        (False, "", BROKE, False),
        (False, None, BROKE, True),
        (False, "Fatal Python error", f"{BROKE}: Fatal Python error", True),
    ],
    ids=["left", "left-no-report", "left-crashed", "killed", "broke-no-report", "crashed"],
)
def test_a_worker_has_crashed_if_its_report_says_so_or_it_broke_off_and_nobody_can_tell(
    bed: Bed, goodbye: bool, crash_report: str | None, reason: str, crashed: bool
) -> None:
    bed.join()
    if goodbye:
        bed.session.on_message(pb.WorkerMessage(goodbye=pb.Goodbye()))
    assert bed.end(crash_report) == ("left", reason, crashed)
