"""What a router decides over its sessions: no attempt is forgotten, whichever side notices the end of one first."""

from __future__ import annotations

import pytest

from pdserve.clock import ManualClock
from pdserve.config import RouterConfig
from pdserve.errors import Unavailable
from pdserve.rpc import cluster_pb2 as pb
from pdserve.types import Finish, FinishReason, Load, ModelLimits, Role, SampledToken, SamplingParams, WorkerInfo
from router.actions import Accept, End, Request, StateChanged
from router.control import Control


class FakeSession:
    """Keeps what the router sends."""

    def __init__(self, name: str, start: int = 1) -> None:
        limits = ModelLimits(100, 1000, 1000)
        self.info = WorkerInfo(name, f"{name}#{start}", Role.DECODE, 1, "h", "ipc://", "same", "m", limits)
        self.sent: list[pb.RouterMessage] = []
        self.closed = False

    def send(self, message: pb.RouterMessage) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True

    def starts(self) -> list[pb.StartDecode]:
        return [message.start_decode for message in self.sent if message.HasField("start_decode")]


class FakeStream:
    """Keeps what the client would get."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.events: list[Accept | End] = []

    def put(self, event: Accept | End) -> bool:
        self.events.append(event)
        return isinstance(event, End)


class Nobody:
    """An observer that waits for nothing."""

    def members_changed(self) -> None: ...

    def all_ended(self) -> None: ...


def serve(control: Control) -> FakeStream:
    stream = FakeStream("r")
    control.submit(Request("r", (5, 6, 7), SamplingParams(max_tokens=4)), stream)
    return stream


def test_a_worker_that_comes_back_before_its_old_session_ends_gets_its_requests_again() -> None:
    control = Control("router", RouterConfig(), ManualClock(), Nobody())
    old, new = FakeSession("d"), FakeSession("d")
    control.worker_joined(old)
    serve(control)
    (first,) = old.starts()
    control.worker_joined(new)
    assert old.closed
    (again,) = new.starts()
    assert again.sequence.owner.attempt > first.sequence.owner.attempt
    control.worker_left(old, "its session broke")  # comes late, and is no news
    assert "d#1" in control.membership
    assert len(new.starts()) == 1


def test_a_restarted_worker_gets_the_requests_of_its_former_start() -> None:
    control = Control("router", RouterConfig(), ManualClock(), Nobody())
    old, new = FakeSession("d"), FakeSession("d", start=2)
    control.worker_joined(old)
    serve(control)
    control.worker_joined(new)
    assert old.closed
    assert len(new.starts()) == 1


def test_tokens_and_the_end_reach_the_stream_and_then_nothing_is_left() -> None:
    control = Control("router", RouterConfig(), ManualClock(), Nobody())
    session = FakeSession("d")
    control.worker_joined(session)
    stream = serve(control)
    owner = control.dispatch._requests["r", 0].attempt.owner
    control.tokens("d#1", owner, 0, (SampledToken(9), SampledToken(8)))
    control.finish(stream, 0, Finish(FinishReason.STOP, stop="x"))
    changed, accept, end = stream.events
    assert isinstance(changed, StateChanged)
    assert accept == Accept("r", 0, (SampledToken(9), SampledToken(8)))
    assert isinstance(end, End)
    assert len(control.dispatch) == 0
    assert not control.cancel("r")


def test_a_stop_string_found_in_an_abandoned_stream_does_not_end_the_next_request_of_its_id() -> None:
    control = Control("router", RouterConfig(), ManualClock(), Nobody())
    control.worker_joined(FakeSession("d"))
    old = serve(control)
    control.abandon(old)
    new = serve(control)
    control.finish(old, 0, Finish(FinishReason.STOP, stop="x"))
    assert new.events == []
    assert len(control.dispatch) == 1


def test_a_router_that_drains_takes_nothing_new_and_goes_on_with_what_it_has() -> None:
    control = Control("router", RouterConfig(), ManualClock(), Nobody())
    assert not control.serves, "nobody is there yet"
    control.worker_joined(FakeSession("d"))
    assert control.serves
    serve(control)
    control.drain()
    assert not control.serves
    with pytest.raises(Unavailable, match="shutting down"):
        control.submit(Request("s", (5,), SamplingParams()), FakeStream("s"))
    assert len(control.dispatch) == 1


def test_a_router_whose_workers_all_drain_does_not_serve() -> None:
    control = Control("router", RouterConfig(), ManualClock(), Nobody())
    control.worker_joined(FakeSession("d"))
    control.renewed("d#1", Load(draining=True))
    assert not control.serves
    control.renewed("d#1", Load())
    assert control.serves
