"""A worker's end of the Session stream, without a stream."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.clock import ManualClock
from pdserve.errors import ProtocolError
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.types import Load, ModelLimits, Role, WorkerInfo
from worker.session import RouterSession

INFO = WorkerInfo("decode-0", "decode-0-a", Role.DECODE, 1, "h", "ipc://x", "print", "m", ModelLimits(100, 99, 99))
WELCOME = pb.RouterMessage(
    welcome=pb.Welcome(version=convert.SESSION_VERSION, router="router-a", renew_interval_ms=250, timeout_ms=1_500)
)
RENEW = pb.RouterMessage(renew=pb.Renew())
MAX_UNSENT = 4


class Bed:
    """A session, its clock, and who is told what comes over it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.load = Load(queued=7)
        self.told: list[tuple[str, Any]] = []
        self.woken = 0
        self.session = RouterSession(INFO, self, self.clock, self.wake, MAX_UNSENT)

    def wake(self) -> None:
        self.woken += 1

    def session_opened(self, session: RouterSession) -> None:
        self.told.append(("opened", session.router))

    def session_ended(self, session: RouterSession) -> None:
        self.told.append(("ended", session.router))

    def on_message(self, session: RouterSession, message: pb.RouterMessage) -> None:
        self.told.append(("message", message.WhichOneof("message")))

    def sent(self) -> list[str]:
        """What the stream takes now."""
        taken = []
        while (message := self.session.take()) is not None:
            taken.append(message.WhichOneof("message") or "")
        return taken

    def open(self) -> None:
        self.session.on_message(WELCOME)
        assert self.sent() == ["hello", "load"]

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.session.tick()


@pytest.fixture
def bed() -> Bed:
    return Bed()


def report() -> pb.WorkerMessage:
    return pb.WorkerMessage(terminal=pb.Terminal())


def test_it_says_hello_first_and_its_load_as_soon_as_it_is_welcome(bed: Bed) -> None:
    assert bed.sent() == ["hello"]
    assert bed.told == []
    bed.session.on_message(WELCOME)
    assert bed.told == [("opened", "router-a")]
    message = bed.session.take()
    assert message is not None
    assert convert.load_from_proto(message.load) == bed.load


def test_it_tells_its_load_at_the_routers_interval(bed: Bed) -> None:
    bed.open()
    for _ in range(3):
        assert bed.session.next_deadline() == pytest.approx(bed.clock.now() + 0.25)
        bed.pass_time(0.125)
        assert bed.sent() == []
        bed.pass_time(0.125)
        assert bed.sent() == ["load"]
        bed.session.on_message(RENEW)


def test_what_a_router_asks_is_passed_on_and_what_is_reported_leaves_in_order(bed: Bed) -> None:
    bed.open()
    bed.session.on_message(pb.RouterMessage(abort=pb.Abort()))
    assert bed.told[-1] == ("message", "abort")
    woken = bed.woken
    bed.session.send(report())
    bed.session.send(pb.WorkerMessage(tokens=pb.Tokens()))
    assert bed.woken == woken + 2
    assert bed.sent() == ["terminal", "tokens"]


def test_no_welcome_within_five_seconds_ends_it_and_nobody_hears_of_it(bed: Bed) -> None:
    bed.pass_time(4.9)
    assert not bed.session.over
    bed.pass_time(0.2)
    assert bed.session.over
    bed.session.ended()
    assert bed.told == []


def test_a_router_that_does_not_begin_with_a_welcome_is_left(bed: Bed) -> None:
    bed.session.on_message(RENEW)
    assert bed.session.over


def test_a_message_that_makes_no_sense_ends_the_session_and_no_more(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(session: RouterSession, message: pb.RouterMessage) -> None:
        raise ProtocolError("strange")

    bed.open()
    monkeypatch.setattr(bed, "on_message", refuse)
    bed.session.on_message(RENEW)
    assert bed.session.over


def test_silence_for_the_routers_timeout_ends_it(bed: Bed) -> None:
    bed.open()
    bed.pass_time(1.4)
    bed.session.on_message(RENEW)
    bed.pass_time(1.4)
    assert not bed.session.over
    bed.pass_time(0.2)
    assert bed.session.over
    assert bed.told == [("opened", "router-a"), ("message", "renew")], "until its stream has ended"
    bed.session.ended()
    assert bed.told[-1] == ("ended", "router-a")


def test_what_comes_when_it_is_over_is_not_heard_and_nothing_more_leaves(bed: Bed) -> None:
    bed.open()
    bed.pass_time(2.0)
    bed.session.on_message(pb.RouterMessage(abort=pb.Abort()))
    bed.session.send(report())
    assert bed.told == [("opened", "router-a")]
    assert bed.sent() == []


def test_a_router_that_reads_too_slowly_loses_it(bed: Bed) -> None:
    bed.open()
    for _ in range(MAX_UNSENT):
        bed.session.send(report())
    assert not bed.session.over
    bed.session.send(report())
    assert bed.session.over


def test_it_leaves_in_order_when_all_is_said(bed: Bed) -> None:
    bed.open()
    bed.session.send(report())
    bed.session.finish()
    bed.session.send(report())
    bed.session.on_message(pb.RouterMessage(abort=pb.Abort()))
    assert not bed.session.said_all
    assert bed.sent() == ["terminal", "goodbye"]
    assert bed.session.said_all
    bed.pass_time(0.9)
    assert not bed.session.over
    bed.pass_time(0.2)
    assert bed.session.over, "a router that does not read is waited for one second"


def test_one_that_is_not_open_has_nothing_to_say_goodbye_for(bed: Bed) -> None:
    bed.session.finish()
    assert bed.session.over
