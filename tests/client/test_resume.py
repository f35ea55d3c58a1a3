"""The resume machine, event by event: what a stream does when its router is lost, and what it tells the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.client.resume import (
    CONNECT_TIMEOUT_S,
    LOOK_PAUSE_S,
    MAX_LOSSES,
    MAX_RETRY_PAUSE_S,
    RESUME_TIMEOUT_S,
    AskRouter,
    ConnectionLost,
    Deliver,
    Done,
    Fail,
    OpenCall,
    Receive,
    ResumeMachine,
    Routers,
    RouterSearch,
    StreamAction,
    Wait,
    resumption,
    retry_pause_s,
)
from pdserve.client.stream import StreamFold
from pdserve.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    PdserveError,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
)
from pdserve.rpc import inference_pb2 as pb

STARTED = pb.GenerateResponse(started=pb.Started(request_id="r", model="m", seed=7, prompt_token_ids=[5, 6]))
FINISHED = pb.GenerateResponse(
    finished=pb.Finished(outputs=[pb.OutputEnd(finish_reason=pb.FINISH_REASON_LENGTH)], attempts=1)
)
LOST = ConnectionLost("Socket closed")
FULL = ResourceExhausted("queue is full", 2.0)


def delta(text: str, *token_ids: int, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=token_ids, **fields))


class Shell:
    """Does what the machine says, over routers that serve as `serving` says; waiting takes its time, all else none.
    `texts` are what the caller got, `opened` the calls, `asked` the routers asked whether they serve."""

    def __init__(
        self, count: int = 1, timeout_s: float | None = None, serving: Callable[[int, float], bool] = lambda *_: True
    ) -> None:
        self.now = 100.0
        self.routers = Routers(count)
        self.machine = ResumeMachine(pb.GenerateRequest(prompt="hi"), self.routers, self.now, timeout_s)
        self.serving = serving
        self.ask_s = 0.0  # how long an answer takes
        self.texts: list[str] = []
        self.opened: list[OpenCall] = []
        self.asked: list[int] = []
        self.action = self.go_on(self.machine.start())

    def go_on(self, action: StreamAction) -> StreamAction:
        """Until the call has to bring something, or it is over."""
        while not isinstance(action, Receive | Fail | Done):
            match action:
                case OpenCall():
                    self.opened.append(action)
                    action = self.machine.on_opened()
                case AskRouter(router):
                    self.asked.append(router)
                    self.now += min(self.ask_s, action.timeout_s)
                    action = self.machine.on_health(self.serving(router, self.now), self.now)
                case Wait(seconds):
                    assert 0 < seconds <= LOOK_PAUSE_S
                    self.now += seconds
                    action = self.machine.on_time(self.now)
                case Deliver(piece):
                    self.texts.append(piece.text)
                    action = Receive()
        self.action = action
        return action

    def message(self, *messages: pb.GenerateResponse) -> StreamAction:
        for message in messages:
            assert self.action == Receive()
            self.go_on(self.machine.on_message(message, self.now))
        return self.action

    def end(self) -> StreamAction:
        return self.go_on(self.machine.on_end())

    def fail(self, error: PdserveError = LOST) -> StreamAction:
        assert self.action == Receive()
        return self.go_on(self.machine.on_failure(error, self.now))


def failed(action: StreamAction) -> PdserveError:
    assert isinstance(action, Fail)
    return action.error


class TestUndisturbed:
    def test_deltas_are_delivered_and_the_end_is_done(self) -> None:
        shell = Shell(timeout_s=60.0)
        assert shell.message(STARTED, delta("Hel", 1), delta("lo", 2, 3), FINISHED) == Receive()
        assert shell.end() == Done()
        assert shell.texts == ["Hel", "lo"]
        assert shell.machine.result is not None
        assert (shell.machine.result.text, shell.machine.result.resumptions) == ("Hello", 0)
        (call,) = shell.opened
        assert (call.router, call.timeout_s, call.request.HasField("resume")) == (0, 60.0, False)
        assert call.request.request_id, "with an id of its own it can be asked for again"

    @pytest.mark.parametrize("messages", [[], [STARTED], [STARTED, delta("a", 1)]])
    def test_an_end_without_a_result_is_an_error(self, messages: list[pb.GenerateResponse]) -> None:
        shell = Shell()
        shell.message(*messages)
        assert isinstance(failed(shell.end()), ProtocolError)

    @pytest.mark.parametrize(
        "messages", [[delta("a", 1)], [FINISHED], [STARTED, STARTED], [STARTED, FINISHED, delta("a", 1)]]
    )
    def test_a_message_out_of_order_is_an_error(self, messages: list[pb.GenerateResponse]) -> None:
        shell = Shell()
        assert isinstance(failed(shell.message(*messages)), ProtocolError)

    def test_how_the_call_ends_after_the_result_does_not_matter(self) -> None:
        shell = Shell()
        shell.message(STARTED, FINISHED)
        assert shell.fail() == Done()


class TestLoss:
    def test_a_stream_goes_on_at_the_next_router_with_what_it_has(self) -> None:
        shell = Shell(count=3)
        shell.message(STARTED, delta("Hel", 1))
        assert shell.fail() == Receive()
        again = shell.opened[1]
        assert (again.router, shell.routers.current) == (1, 1)
        assert [list(output.ids) for output in again.request.resume.outputs] == [[1]]
        shell.message(STARTED, delta("lo", 2), FINISHED)
        assert shell.end() == Done()
        assert shell.texts == ["Hel", "lo"]
        assert shell.machine.result is not None
        assert shell.machine.result.resumptions == 1

    def test_routers_are_asked_in_turn_with_a_pause_until_one_serves(self) -> None:
        shell = Shell(count=3, serving=lambda router, now: router == 0)
        shell.message(STARTED)
        assert shell.fail() == Receive()
        assert shell.asked == [1, 2, 0]
        assert shell.now == pytest.approx(100.0 + 2 * LOOK_PAUSE_S)
        assert shell.opened[1].router == 0

    def test_one_router_alone_may_be_back_soon(self) -> None:
        shell = Shell(serving=lambda router, now: now > 110.0)
        shell.message(STARTED)
        assert shell.fail() == Receive()
        assert set(shell.asked) == {0}

    def test_a_stream_that_finds_nobody_ends_with_what_broke_it_off(self) -> None:
        shell = Shell(serving=lambda *_: False)
        shell.message(STARTED)
        assert failed(shell.fail()) is LOST
        assert RESUME_TIMEOUT_S <= shell.now - 100.0 <= RESUME_TIMEOUT_S + LOOK_PAUSE_S

    @pytest.mark.parametrize(("count", "look_s"), [(1, 0.0), (3, 2 * CONNECT_TIMEOUT_S)])
    def test_a_request_that_nobody_has_answered_is_offered_to_the_others_for_a_moment(
        self, count: int, look_s: float
    ) -> None:
        shell = Shell(count, serving=lambda *_: False)
        assert failed(shell.fail()) is LOST
        assert look_s <= shell.now - 100.0 <= look_s + LOOK_PAUSE_S
        shell = Shell(count=2)
        assert shell.fail() == Receive()
        assert shell.opened[1].request.HasField("resume"), "the lost router may have begun with it"
        shell.message(STARTED, FINISHED)
        shell.end()
        assert shell.machine.result is not None
        assert shell.machine.result.resumptions == 0

    def test_a_router_is_waited_for_as_long_as_a_connection_may_take(self) -> None:
        search = RouterSearch(Routers(2), until_s=10.0)
        assert search.next(0.0) == AskRouter(1, CONNECT_TIMEOUT_S)
        assert not search.answered(False)
        assert search.next(9.5) == Wait(LOOK_PAUSE_S)
        assert search.next(9.75) == AskRouter(0, 0.25)
        assert not search.answered(False)
        assert search.next(10.0) == Wait(LOOK_PAUSE_S)
        assert search.next(10.0) is None

    @pytest.mark.parametrize(
        "error",
        [
            InvalidArgument("top_p", "is 2"),
            AlreadyExists("in flight"),
            FailedPrecondition("refused"),
            NotFound("none"),
            InternalError("a bug"),
            DeadlineExceeded("over"),
            Cancelled("aborted by another client"),
        ],
    )
    def test_what_a_router_says_is_not_asked_for_again(self, error: PdserveError) -> None:
        shell = Shell(count=2)
        shell.message(STARTED, delta("a", 1))
        assert failed(shell.fail(error)) is error
        assert len(shell.opened) == 1

    @pytest.mark.parametrize(("count", "goes_on"), [(1, False), (2, True)])
    def test_a_router_that_drains_is_left_for_another_one(self, count: int, goes_on: bool) -> None:
        refusal = Unavailable("this router is shutting down; ask another one")
        shell = Shell(count)
        shell.fail(refusal)
        assert (shell.action == Receive()) is goes_on
        assert len(shell.opened) == 1 + goes_on

    def test_a_stream_gives_up_when_it_has_broken_off_too_often(self) -> None:
        shell = Shell(count=2)
        for _ in range(MAX_LOSSES):
            shell.message(STARTED)
            assert shell.fail() == Receive()
        shell.message(STARTED)
        assert failed(shell.fail()) is LOST
        assert len(shell.opened) == MAX_LOSSES + 1

    def test_text_sent_again_is_not_delivered_again(self) -> None:
        shell = Shell()
        shell.message(STARTED, delta("ab", 1, 2), delta("c"))
        shell.fail()
        shell.message(STARTED, delta("c"), FINISHED)
        assert shell.end() == Done()
        assert shell.texts == ["ab", "c"]


class TestFull:
    def test_a_first_call_that_is_refused_is_the_callers_to_know(self) -> None:
        shell = Shell(count=2)
        assert failed(shell.fail(FULL)) is FULL
        assert len(shell.opened) == 1

    def test_a_stream_that_runs_is_not_resumed_because_a_worker_is_full(self) -> None:
        shell = Shell(count=2)
        shell.message(STARTED)
        assert failed(shell.fail(FULL)) is FULL

    def test_a_full_router_is_asked_again_after_the_pause_it_asks_for(self) -> None:
        shell = Shell()
        shell.message(STARTED, delta("a", 1))
        shell.fail()
        assert shell.fail(FULL) == Receive()
        assert shell.now == pytest.approx(100.0 + FULL.retry_after_s)
        assert shell.fail(FULL) == Receive()
        shell.message(STARTED, FINISHED)
        shell.end()
        assert shell.machine.result is not None
        assert shell.machine.result.resumptions == 1, "asked of several until one takes it over"

    def test_a_router_that_stays_full_ends_the_stream_when_the_looks_time_is_over(self) -> None:
        shell = Shell()
        shell.message(STARTED)
        shell.fail()
        while shell.action == Receive():
            shell.fail(FULL)
        assert failed(shell.action) is FULL
        assert shell.now == pytest.approx(100.0 + RESUME_TIMEOUT_S)

    def test_a_refusal_is_no_loss(self) -> None:
        shell = Shell()
        shell.message(STARTED)
        shell.fail()
        for _ in range(MAX_LOSSES + 1):
            assert shell.fail(ResourceExhausted("full", 0.0)) == Receive()

    @pytest.mark.parametrize(
        ("asked_s", "pause_s"), [(0.0, LOOK_PAUSE_S), (0.5, 0.5), (MAX_RETRY_PAUSE_S * 2, MAX_RETRY_PAUSE_S)]
    )
    def test_a_full_router_is_left_alone_as_long_as_it_asks_within_reason(self, asked_s: float, pause_s: float) -> None:
        assert retry_pause_s(ResourceExhausted("full", asked_s)) == pause_s


class TestTime:
    def test_a_later_call_gets_what_is_left(self) -> None:
        shell = Shell(timeout_s=10.0, serving=lambda router, now: now >= 104.0)
        shell.message(STARTED)
        shell.fail()
        assert shell.opened[1].timeout_s == pytest.approx(6.0, abs=LOOK_PAUSE_S)

    def test_a_stream_without_a_limit_has_none_later(self) -> None:
        shell = Shell()
        shell.message(STARTED)
        shell.fail()
        assert [call.timeout_s for call in shell.opened] == [None, None]

    def test_a_deadline_that_passes_while_a_router_answers_ends_the_stream(self) -> None:
        shell = Shell(timeout_s=0.5)
        shell.ask_s = 2.0
        shell.message(STARTED)
        assert isinstance(failed(shell.fail()), DeadlineExceeded)
        assert len(shell.opened) == 1

    def test_nobody_is_looked_for_after_the_deadline(self) -> None:
        shell = Shell(timeout_s=5.0, serving=lambda *_: False)
        shell.message(STARTED)
        assert failed(shell.fail()) is LOST
        assert shell.now == pytest.approx(105.0, abs=LOOK_PAUSE_S)


class TestEnd:
    """The caller cancels, or closes the client."""

    @pytest.fixture(params=["cancelled", "closed"])
    def end(self, request: pytest.FixtureRequest) -> Callable[[Shell], None]:
        def cancel(shell: Shell) -> None:
            shell.machine.cancel()

        def close(shell: Shell) -> None:
            shell.routers.closed = True

        return cancel if request.param == "cancelled" else close

    def test_while_it_receives(self, end: Callable[[Shell], None]) -> None:
        shell = Shell(count=2)
        shell.message(STARTED)
        end(shell)
        assert isinstance(failed(shell.fail()), Cancelled), "whatever the call broke off with"
        assert len(shell.opened) == 1

    @pytest.mark.parametrize("serves", [True, False])
    def test_while_it_looks(self, end: Callable[[Shell], None], serves: bool) -> None:
        def ending(router: int, now: float) -> bool:
            end(shell)
            return serves

        shell = Shell(serving=ending)
        shell.message(STARTED)
        assert isinstance(failed(shell.fail()), Cancelled)
        assert (len(shell.opened), len(shell.asked)) == (1, 1)

    def test_while_it_waits_for_a_full_router(self, end: Callable[[Shell], None]) -> None:
        shell = Shell()
        shell.message(STARTED)
        shell.fail()
        action = shell.machine.on_failure(FULL, shell.now)
        assert action == Wait(LOOK_PAUSE_S)
        end(shell)
        assert isinstance(failed(shell.machine.on_time(shell.now + LOOK_PAUSE_S)), Cancelled)

    def test_while_the_next_call_is_made(self, end: Callable[[Shell], None]) -> None:
        shell = Shell()
        shell.message(STARTED)
        action = shell.machine.on_failure(LOST, shell.now)
        assert isinstance(action, AskRouter)
        assert isinstance(shell.machine.on_health(True, shell.now), OpenCall)
        end(shell)
        assert isinstance(failed(shell.machine.on_opened()), Cancelled)

    def test_after_the_result_it_changes_nothing(self, end: Callable[[Shell], None]) -> None:
        shell = Shell()
        shell.message(STARTED, FINISHED)
        end(shell)
        assert shell.machine.on_cancelled() == Done()
        assert shell.fail() == Done()


def test_streams_of_one_client_share_the_router_that_one_of_them_found() -> None:
    routers = Routers(2)
    first, second = (ResumeMachine(pb.GenerateRequest(), routers, 0.0, None) for _ in range(2))
    assert first.start().router == 0
    first.on_failure(LOST, 0.0)
    first.on_health(True, 0.0)
    assert second.start().router == 1


def test_the_next_router_is_told_the_latest_resume_state_of_each_output() -> None:
    fold = StreamFold(0.0)
    before = pb.ResumeState(prompt_fingerprint="a", output_fingerprint="b")
    after = pb.ResumeState(prompt_fingerprint="a", output_fingerprint="b", crashes=1, crashed_at=2)
    other = pb.ResumeState(output_index=1, inexact=True)
    fold.accept(STARTED, 0.0)
    for state in (before, other, after):
        fold.accept(pb.GenerateResponse(resume_state=state), 0.0)
    fold.accept(delta("", 5, 6), 0.0)
    again = resumption(pb.GenerateRequest(request_id="r", prompt="hi"), fold)
    assert list(again.resume.states) == [after, other]
    assert [list(output.ids) for output in again.resume.outputs] == [[5, 6]]
    assert (again.request_id, again.model, again.sampling.seed) == ("r", "m", 7)
    assert again.WhichOneof("input") == "prompt_token_ids"
    assert list(again.prompt_token_ids.ids) == [5, 6]


def test_text_held_back_to_an_outputs_end_is_taken_once_for_each_output() -> None:
    fold = StreamFold(0.0)

    def accept(**fields: Any) -> bool:
        return fold.accept(pb.GenerateResponse(delta=pb.Delta(**fields)), 0.0) is not None

    fold.accept(STARTED, 0.0)
    assert accept(token_ids=[5], text="a")
    assert accept(text="b")
    fold.resume()
    fold.accept(STARTED, 0.0)
    assert not accept(text="b")
    assert accept(output_index=1, token_ids=[5])
    assert accept(output_index=1, text="b")
