"""The sender's table: what each event leads to in each state."""

from __future__ import annotations

import math

import pytest

from kvtransfer.actions import Failed, Finished, Send, SendCommit, SenderAction, SendLayer
from kvtransfer.frames import Abort, Ack, Credit, Frame, Gone, Nack, Open, Ping
from kvtransfer.sender import Sender, SenderState
from kvtransfer.timing import Timing
from pdserve.errors import (
    Cancelled,
    FailedPrecondition,
    InternalError,
    PdserveError,
    ProtocolError,
    TransferError,
)
from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken

ID = b"t" * 16
LAYOUT = KVFormat(2, 1, 4, "float32")  # 32 bytes a token and layer
OFFER = Open(ID, 3, LAYOUT, b"model", b"h" * 16, 10, 50, 8, 640)  # 20 tokens a frame
TIMING = Timing(ttl_s=5.0, probe_s=0.5, deadline_s=60.0)
TOKENS = (SampledToken(7),)
ALL_BYTES = 2 * LAYOUT.payload_bytes(40)
CANCELLED = Cancelled("the client went away")


def sender(offer: Open = OFFER) -> Sender:
    return Sender(offer, TIMING, now=0.0)


def streaming(credit: int = ALL_BYTES) -> Sender:
    made = sender()
    made.start(0.0)
    made.on_frame(Credit(ID, 3, credit), 0.0)
    return made


def committed() -> Sender:
    made = streaming()
    make_ready(made)
    made.commit(TOKENS, 0.0)
    return made


def in_state(state: SenderState) -> Sender:
    if state is SenderState.QUEUED:
        return sender()
    if state is SenderState.OPENING:
        made = sender()
        made.start(0.0)
        return made
    if state is SenderState.STREAMING:
        return streaming()
    made = committed()
    if state is SenderState.DONE:
        made.on_frame(Ack(ID, 3), 0.0)
    if state is SenderState.FAILED:
        made.abort(CANCELLED, 0.0)
    return made


def make_ready(made: Sender) -> list[SenderAction]:
    return [action for layer in range(2) for action in made.layer_ready(layer, 0, 64, 0.0)]


def sent_ranges(actions: list[SenderAction]) -> list[tuple[int, int, int]]:
    frames = [action.frame for action in actions if isinstance(action, SendLayer)]
    return [(frame.layer, frame.token_start, frame.token_stop) for frame in frames]


def failure(actions: list[SenderAction]) -> PdserveError:
    (failed,) = [action for action in actions if isinstance(action, Failed)]
    return failed.error


def aborts(actions: list[SenderAction]) -> list[Frame]:
    return [action.frame for action in actions if isinstance(action, Send) and isinstance(action.frame, Abort)]


def test_every_state_is_reached_by_the_events_that_name_it() -> None:
    for state in SenderState:
        assert in_state(state).state is state


def test_whole_transfer() -> None:
    made = sender()
    assert made.start(0.0) == [Send(OFFER)]
    assert made.on_frame(Credit(ID, 3, ALL_BYTES), 0.1) == []
    assert sent_ranges(make_ready(made)) == [
        (0, 10, 24),
        (0, 24, 40),
        (0, 40, 50),
        (1, 10, 24),
        (1, 24, 40),
        (1, 40, 50),
    ]
    assert made.commit(TOKENS, 0.2) == [SendCommit(TOKENS)]
    assert made.on_frame(Ack(ID, 3), 0.3) == [Finished()]
    assert made.state is SenderState.DONE


def test_nothing_leaves_before_credit_and_then_in_order_of_readiness() -> None:
    made = sender()
    made.start(0.0)
    assert made.layer_ready(1, 10, 20, 0.0) == []
    assert made.layer_ready(0, 10, 20, 0.0) == []
    assert sent_ranges(made.on_frame(Credit(ID, 3, 10_000), 0.0)) == [(1, 10, 20), (0, 10, 20)]


def test_frames_stop_at_the_credit_and_go_on_with_more() -> None:
    made = streaming(credit=LAYOUT.payload_bytes(30))
    assert sent_ranges(made.layer_ready(0, 10, 50, 0.0)) == [(0, 10, 24), (0, 24, 40)]
    assert made.on_frame(Credit(ID, 3, LAYOUT.payload_bytes(30)), 0.0) == []  # doubled
    assert made.on_frame(Credit(ID, 3, LAYOUT.payload_bytes(5)), 0.0) == []  # late
    assert sent_ranges(made.on_frame(Credit(ID, 3, LAYOUT.payload_bytes(40)), 0.0)) == [(0, 40, 50)]
    assert made.credit.spent == LAYOUT.payload_bytes(40)


def test_frames_say_what_was_spent() -> None:
    actions = make_ready(streaming())
    spent = [action.frame.spent for action in actions if isinstance(action, SendLayer)]
    assert spent == [LAYOUT.payload_bytes(count) for count in (14, 30, 40, 54, 70, 80)]


def test_frame_longer_than_one_block_ends_at_a_blocks_border() -> None:
    assert sent_ranges(streaming().layer_ready(0, 10, 31, 0.0)) == [(0, 10, 24), (0, 24, 31)]
    assert sent_ranges(streaming().layer_ready(0, 12, 32, 0.0)) == [(0, 12, 32)]


def test_block_larger_than_a_frame_is_cut() -> None:
    offer = Open(ID, 3, LAYOUT, b"model", b"h" * 16, 0, 50, 32, 96)  # 3 tokens a frame
    made = sender(offer)
    made.start(0.0)
    made.on_frame(Credit(ID, 3, 10_000), 0.0)
    assert sent_ranges(made.layer_ready(0, 0, 7, 0.0)) == [(0, 0, 3), (0, 3, 6), (0, 6, 7)]


def test_tokens_not_offered_are_left_out_and_repeated_ones_sent_once() -> None:
    made = streaming()
    assert sent_ranges(made.layer_ready(0, 0, 12, 0.0)) == [(0, 10, 12)]
    assert sent_ranges(made.layer_ready(0, 8, 14, 0.0)) == [(0, 12, 14)]
    assert made.layer_ready(0, 50, 60, 0.0) == []


def test_layer_ready_starts_a_queued_sender() -> None:
    assert sender().layer_ready(0, 10, 20, 0.0) == [Send(OFFER)]


def test_nothing_to_send_still_waits_for_the_receivers_blocks() -> None:
    offer = Open(ID, 3, LAYOUT, b"model", b"h" * 16, 50, 50, 8, 640)
    made = sender(offer)
    assert made.commit(TOKENS, 0.0) == [Send(offer)]
    assert made.on_frame(Credit(ID, 3, 100), 0.0) == [SendCommit(TOKENS)]


def test_nack_sends_the_missing_ranges_and_commit_again() -> None:
    made = committed()
    made.on_frame(Credit(ID, 3, 2 * ALL_BYTES), 0.0)
    actions = made.on_frame(Nack(ID, 3, ((1, 20, 30), (0, 10, 12))), 1.0)
    assert sent_ranges(actions) == [(1, 20, 30), (0, 10, 12)]
    assert all(action.resend for action in actions if isinstance(action, SendLayer))
    assert actions[-1] == SendCommit(TOKENS)


def test_nack_without_credit_waits_for_it() -> None:
    made = committed()
    assert made.on_frame(Nack(ID, 3, ((1, 20, 30),)), 1.0) == []
    assert made.state is SenderState.STREAMING
    actions = made.on_frame(Credit(ID, 3, 2 * ALL_BYTES), 1.0)
    assert sent_ranges(actions) == [(1, 20, 30)]
    assert actions[-1] == SendCommit(TOKENS)


def test_doubled_nack_is_not_queued_twice() -> None:
    made = committed()
    for _ in range(3):
        made.on_frame(Nack(ID, 3, ((1, 20, 30),)), 1.0)
    assert sent_ranges(made.on_frame(Credit(ID, 3, 2 * ALL_BYTES), 1.0)) == [(1, 20, 30)]


def test_nack_of_what_was_not_sent_yet_sends_nothing_early() -> None:
    made = streaming()
    made.layer_ready(0, 10, 20, 0.0)
    assert sent_ranges(made.on_frame(Nack(ID, 3, ((0, 10, 50), (1, 10, 50))), 0.0)) == [(0, 10, 20)]


def test_empty_nack_asks_for_commit_alone() -> None:
    assert committed().on_frame(Nack(ID, 3, ()), 0.0) == [SendCommit(TOKENS)]


@pytest.mark.parametrize("bad", [(2, 10, 20), (0, 9, 20), (0, 10, 51)])
def test_nack_of_what_was_not_offered_is_a_breach(bad: tuple[int, int, int]) -> None:
    actions = committed().on_frame(Nack(ID, 3, (bad,)), 0.0)
    assert isinstance(failure(actions), ProtocolError)
    assert len(aborts(actions)) == 1


def test_ack_before_commit_is_a_breach() -> None:
    assert isinstance(failure(streaming().on_frame(Ack(ID, 3), 0.0)), ProtocolError)


def test_ack_after_a_late_nack_still_ends_the_transfer() -> None:
    made = committed()
    made.on_frame(Nack(ID, 3, ((1, 20, 30),)), 0.0)
    assert made.on_frame(Ack(ID, 3), 0.0) == [Finished()]
    assert made.on_frame(Credit(ID, 3, 2 * ALL_BYTES), 0.0) == []


@pytest.mark.parametrize("state", list(SenderState))
@pytest.mark.parametrize(
    "frame",
    [
        Credit(ID, 2, 10**6),
        Ack(ID, 2),
        Nack(ID, 4, ((0, 10, 20),)),
        Abort(ID, 2, "CANCELLED", "old"),
        Ping(ID, 4, True, 0),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_frames_of_another_epoch_change_nothing(state: SenderState, frame: Frame) -> None:
    made = in_state(state)
    deadline = made.next_deadline()
    assert made.on_frame(frame, 1.0) == []
    assert made.state is state
    assert made.refused == 1
    assert made.next_deadline() == deadline


@pytest.mark.parametrize("state", [SenderState.QUEUED, SenderState.OPENING])
@pytest.mark.parametrize("frame", [Ack(ID, 3), Nack(ID, 3, ((0, 10, 20),))], ids=lambda frame: type(frame).__name__)
def test_frames_the_state_does_not_know_are_refused(state: SenderState, frame: Frame) -> None:
    made = in_state(state)
    assert made.on_frame(frame, 0.0) == []
    assert made.state is state
    assert made.refused == 1


@pytest.mark.parametrize("state", list(SenderState))
def test_a_question_for_the_receiver_is_refused(state: SenderState) -> None:
    made = in_state(state)
    assert made.on_frame(Ping(ID, 3, reply=False, spent=0), 0.0) == []
    assert made.refused == 1


_LIVE = [SenderState.QUEUED, SenderState.OPENING, SenderState.STREAMING, SenderState.COMMITTED]


@pytest.mark.parametrize("state", _LIVE)
def test_abort_in_every_state_ends_once_and_tells_the_receiver(state: SenderState) -> None:
    made = in_state(state)
    actions = made.abort(CANCELLED, 0.0)
    assert failure(actions) is CANCELLED
    assert aborts(actions) == [Abort(ID, 3, "CANCELLED", "the client went away")]
    assert made.abort(CANCELLED, 0.0) == made.tick(100.0) == make_ready(made) == made.commit(TOKENS, 0.0) == []
    assert made.next_deadline() == math.inf


@pytest.mark.parametrize("state", _LIVE)
def test_abort_of_the_receiver_ends_in_every_state(state: SenderState) -> None:
    actions = in_state(state).on_frame(Abort(ID, 3, "FAILED_PRECONDITION", "layout differs"), 0.0)
    assert isinstance(failure(actions), FailedPrecondition)
    assert aborts(actions) == []


@pytest.mark.parametrize("state", _LIVE)
def test_silence_beyond_the_ttl_ends_every_state(state: SenderState) -> None:
    made = in_state(state)
    assert not any(isinstance(action, Failed) for action in made.tick(4.9))
    error = failure(made.tick(5.0))
    assert isinstance(error, TransferError)
    assert str(state) in error.message


@pytest.mark.parametrize("state", _LIVE)
def test_time_in_which_this_side_did_not_listen_is_no_silence_of_the_receiver(state: SenderState) -> None:
    made = in_state(state)
    made.excuse(9.0)
    assert not any(isinstance(action, Failed) for action in made.tick(9.0))
    assert len(made.tick(9.5)) == 1, "not probed"
    assert not any(isinstance(action, Failed) for action in made.tick(13.9))
    made.on_frame(Ping(ID, 3, reply=True, spent=0), 13.9)  # from here on nothing is excused
    made.tick(18.8)
    assert "silent for 5 s" in failure(made.tick(18.9)).message


@pytest.mark.parametrize("state", _LIVE)
def test_deadline_ends_a_sender_that_did_not_listen(state: SenderState) -> None:
    made = in_state(state)
    made.excuse(1000.0)
    assert made.next_deadline() <= 60.0
    assert "not done in 60 s" in failure(made.tick(60.0)).message


@pytest.mark.parametrize("state", _LIVE)
def test_deadline_ends_every_state_however_alive_the_receiver_is(state: SenderState) -> None:
    made = in_state(state)
    for step in range(119):
        made.on_frame(Ping(ID, 3, reply=True, spent=0), step / 2)
        assert not made.ended
    assert isinstance(failure(made.tick(60.0)), TransferError)


def test_silence_is_probed_by_what_the_state_waits_for() -> None:
    assert sender().tick(0.5) == [Send(Ping(ID, 3, reply=False, spent=0))]
    assert in_state(SenderState.OPENING).tick(0.5) == [Send(OFFER)]
    made = streaming()
    make_ready(made)
    assert made.tick(0.5) == [Send(Ping(ID, 3, reply=False, spent=ALL_BYTES))]
    assert committed().tick(0.5) == [SendCommit(TOKENS)]


def test_one_probe_an_interval_and_none_while_the_receiver_talks() -> None:
    made = sender()
    assert made.next_deadline() == 0.5
    assert len(made.tick(0.5)) == 1
    assert made.tick(0.6) == []
    made.on_frame(Ping(ID, 3, reply=True, spent=0), 0.9)
    assert made.tick(1.3) == []
    assert len(made.tick(1.4)) == 1


def test_steady_sending_without_answers_is_probed_too() -> None:
    made = streaming()
    made.layer_ready(0, 10, 12, 0.45)
    assert made.tick(0.5) == [Send(Ping(ID, 3, reply=False, spent=LAYOUT.payload_bytes(2)))]


def test_failed_sender_says_that_the_transfer_is_gone() -> None:
    made = in_state(SenderState.FAILED)
    assert made.on_frame(Nack(ID, 3, ((0, 10, 20),)), 0.0) == [Send(Gone(ID, 3))]
    assert made.on_frame(Credit(ID, 3, 10), 0.0) == [Send(Gone(ID, 3))]
    assert made.on_frame(Ack(ID, 3), 0.0) == []


def test_finished_sender_answers_nothing() -> None:
    made = in_state(SenderState.DONE)
    for frame in (Nack(ID, 3, ((0, 10, 20),)), Credit(ID, 3, 10), Ack(ID, 3), Abort(ID, 3, "CANCELLED", "late")):
        assert made.on_frame(frame, 0.0) == []
    assert made.state is SenderState.DONE


def test_commit_before_all_layers_are_ready_is_a_bug_of_ours() -> None:
    made = streaming()
    made.layer_ready(0, 10, 50, 0.0)
    made.layer_ready(1, 10, 49, 0.0)
    error = failure(made.commit(TOKENS, 0.0))
    assert isinstance(error, InternalError)
    assert "[49, 50) of layer 1" in error.message


def test_unknown_layer_is_a_bug_of_ours() -> None:
    assert isinstance(failure(streaming().layer_ready(2, 10, 20, 0.0)), InternalError)


def test_token_that_does_not_fit_a_frame_is_refused_at_once() -> None:
    with pytest.raises(InternalError):
        sender(Open(ID, 3, LAYOUT, b"model", b"h" * 16, 10, 50, 8, 31))
