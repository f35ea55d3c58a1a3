"""The receiver's table: what each event leads to in each state."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvtransfer.actions import Delivered, Failed, NeedBlocks, ReceiverAction, Send, SenderLost, TakenOver, Verify, Write
from kvtransfer.frames import Abort, Ack, Commit, Credit, Frame, Gone, Have, Layer, Nack, Open, Ping
from kvtransfer.receiver import (
    MAX_BAD_PAYLOADS,
    MAX_FRUITLESS_ROUNDS,
    MAX_REPAIR_ROUNDS,
    Expectation,
    Receiver,
    ReceiverState,
)
from kvtransfer.timing import Timing
from pdserve.config import TransferConfig
from pdserve.errors import (
    Cancelled,
    DataLoss,
    FailedPrecondition,
    PdserveError,
    ProtocolError,
    TransferError,
)
from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken

ID = b"t" * 16
LAYOUT = KVFormat(2, 1, 128, "float32")  # 1,024 bytes a token and layer
CONFIG = TransferConfig(window_bytes=16 * 1024, max_frame_bytes=4096)
TIMING = Timing(ttl_s=5.0, probe_s=0.5, deadline_s=60.0)
EXPECTED = Expectation(ID, 3, LAYOUT, b"model", b"h" * 16, 8, 20)
OFFER = Open(ID, 3, LAYOUT, b"model", b"h" * 16, 8, 20, 8, 4096)  # blocks [8, 16) and [16, 20)
TOKENS = (SampledToken(7),)
COMMIT = Commit(ID, 3, TOKENS, payload_bytes=2 * 2 * 8)
PONG = Send(Ping(ID, 3, reply=True, spent=0))
ACK = Send(Ack(ID, 3))
CANCELLED = Cancelled("the client went away")


def layer(number: int, start: int, stop: int, spent: int, epoch: int = 3) -> Layer:
    return Layer(ID, epoch, number, start, stop, spent * 1024, LAYOUT.payload_bytes(stop - start))


ALL_LAYERS = [layer(n, 4 * k, 4 * k + 4, spent=12 * n + 4 * (k - 1)) for n in range(2) for k in (2, 3, 4)]


def receiver() -> Receiver:
    return Receiver(EXPECTED, CONFIG, TIMING, now=0.0)


def receiving() -> Receiver:
    made = receiver()
    made.on_frame(OFFER, 0.0)
    made.blocks_leased(0.0)
    return made


def store(made: Receiver, frames: list[Layer]) -> list[ReceiverAction]:
    """Deliver frames and write what is asked for. Returns the answers."""
    answers: list[ReceiverAction] = []
    for frame in frames:
        for action in made.on_frame(frame, 0.0):
            answers += made.written(action.frame, 0.0) if isinstance(action, Write) else [action]
    return answers


def covered() -> Receiver:
    made = receiving()
    store(made, ALL_LAYERS)
    return made


def in_state(state: ReceiverState) -> Receiver:
    if state is ReceiverState.EXPECTED:
        return receiver()
    if state is ReceiverState.WAITING_BLOCKS:
        made = receiver()
        made.on_frame(OFFER, 0.0)
        return made
    if state is ReceiverState.RECEIVING:
        return receiving()
    made = covered()
    if state is ReceiverState.COMPLETE:
        made.on_frame(COMMIT, 0.0)
        made.verified([], 0.0)
    elif state is ReceiverState.SENDERLESS:
        made.on_frame(Gone(ID, 3), 0.0)
    elif state is ReceiverState.TAKEN_OVER:
        made.take_over(0.0)
    else:
        made.abort(CANCELLED, 0.0)
    return made


def loss(actions: list[ReceiverAction]) -> PdserveError:
    (lost,) = [action for action in actions if isinstance(action, SenderLost)]
    return lost.error


def failure(actions: list[ReceiverAction]) -> PdserveError:
    (failed,) = [action for action in actions if isinstance(action, Failed)]
    return failed.error


def aborts(actions: list[ReceiverAction]) -> list[Abort]:
    return [action.frame for action in actions if isinstance(action, Send) and isinstance(action.frame, Abort)]


def test_every_state_is_reached_by_the_events_that_name_it() -> None:
    for state in ReceiverState:
        assert in_state(state).state is state


def test_whole_transfer() -> None:
    made = receiver()
    assert made.on_frame(OFFER, 0.0) == [PONG, NeedBlocks()]
    assert made.blocks_leased(0.1) == [Send(Credit(ID, 3, 16 * 1024))]
    assert store(made, ALL_LAYERS) == [
        Send(Credit(ID, 3, 24 * 1024)),
        Send(Credit(ID, 3, 32 * 1024)),
        Send(Credit(ID, 3, 40 * 1024)),
    ]
    assert made.on_frame(COMMIT, 0.2) == [Verify()]
    assert made.verified([], 0.2) == [Delivered(TOKENS), ACK]
    assert made.state is ReceiverState.COMPLETE


@pytest.mark.parametrize(
    "change",
    [
        {"layout": replace(LAYOUT, kv_heads=2)},
        {"model": b"other"},
        {"prompt_hash": b"i" * 16},
        {"token_start": 0},
        {"token_stop": 21},
        {"max_frame_bytes": 4097},
        {"max_frame_bytes": 1023},
    ],
    ids=lambda change: next(iter(change)),
)
def test_offer_that_does_not_fit_fails_both_sides_naming_both_values(change: dict[str, object]) -> None:
    offer = replace(OFFER, **change)
    actions = receiver().on_frame(offer, 0.0)
    error = failure(actions)
    assert isinstance(error, FailedPrecondition)
    ((name, value),) = change.items()
    assert name in error.message
    assert repr(value) in error.message
    if name != "max_frame_bytes":
        assert repr(getattr(EXPECTED, name)) in error.message
    assert aborts(actions) == [Abort(ID, 3, "FAILED_PRECONDITION", error.message)]


def test_offer_whose_list_of_hashes_is_boundless_is_refused() -> None:
    stop = 2**32 - 1
    made = Receiver(replace(EXPECTED, token_stop=stop), CONFIG, TIMING, now=0.0)
    assert isinstance(failure(made.on_frame(replace(OFFER, token_stop=stop, block_tokens=1), 0.0)), FailedPrecondition)


_STATES = list(ReceiverState)
_LIVE = [ReceiverState.EXPECTED, ReceiverState.WAITING_BLOCKS, ReceiverState.RECEIVING]
_OLD_FRAMES: list[Frame] = [
    replace(OFFER, epoch=2),
    layer(0, 8, 10, spent=2, epoch=4),
    replace(COMMIT, epoch=2),
    Ping(ID, 4, reply=False, spent=0),
    Abort(ID, 2, "CANCELLED", "old"),
    Gone(ID, 2),
]


@pytest.mark.parametrize("state", _STATES)
@pytest.mark.parametrize("frame", _OLD_FRAMES, ids=lambda frame: type(frame).__name__)
def test_frames_of_another_epoch_change_nothing_and_hurt_only_their_sender(state: ReceiverState, frame: Frame) -> None:
    made = in_state(state)
    deadline = made.next_deadline()
    actions = made.on_frame(frame, 1.0)
    assert all(abort.epoch == frame.epoch for abort in aborts(actions))
    assert len(actions) == len(aborts(actions)) == int(isinstance(frame, Open | Commit | Ping))
    assert (made.state, made.refused, made.next_deadline()) == (state, 1, deadline)


@pytest.mark.parametrize("state", [ReceiverState.EXPECTED, ReceiverState.WAITING_BLOCKS])
@pytest.mark.parametrize("frame", [layer(0, 8, 10, spent=2), COMMIT], ids=["LAYER", "COMMIT"])
def test_kv_that_has_no_place_yet_is_refused(state: ReceiverState, frame: Frame) -> None:
    made = in_state(state)
    assert made.on_frame(frame, 0.0) == []
    assert (made.state, made.refused) == (state, 1)


@pytest.mark.parametrize("state", _STATES)
def test_an_answer_is_no_question(state: ReceiverState) -> None:
    made = in_state(state)
    assert made.on_frame(Ping(ID, 3, reply=True, spent=0), 0.0) == []
    assert made.refused == 1


def test_ping_is_answered_while_alive_and_brings_lost_credit() -> None:
    ping = Ping(ID, 3, reply=False, spent=0)
    assert receiver().on_frame(ping, 0.0) == [PONG]
    assert in_state(ReceiverState.WAITING_BLOCKS).on_frame(ping, 0.0) == [PONG]
    made = receiving()
    assert made.on_frame(ping, 0.0) == [PONG, Send(Credit(ID, 3, 16 * 1024))]
    lost = replace(ping, spent=16 * 1024)
    assert made.on_frame(lost, 0.0) == [PONG, Send(Credit(ID, 3, 32 * 1024))]


def test_offer_sent_again_is_answered_and_not_acted_on_again() -> None:
    assert in_state(ReceiverState.WAITING_BLOCKS).on_frame(OFFER, 0.0) == [PONG]
    assert receiving().on_frame(OFFER, 0.0) == [Send(Credit(ID, 3, 16 * 1024))]


def test_doubled_layer_is_not_written_again_and_mints_nothing() -> None:
    made = receiving()
    store(made, ALL_LAYERS[:2])
    granted = made.credit.granted
    assert made.on_frame(ALL_LAYERS[0], 0.0) == []
    assert made.on_frame(ALL_LAYERS[1], 0.0) == []
    assert made.credit.granted == granted


def test_layers_in_any_order_cover_everything() -> None:
    made = receiving()
    store(made, list(reversed(ALL_LAYERS[:4])))
    store(made, ALL_LAYERS[4:])
    assert made.on_frame(COMMIT, 0.0) == [Verify()]


def test_overlapping_layers_are_written() -> None:
    made = receiving()
    store(made, [layer(0, 8, 11, spent=3)])
    overlapping = layer(0, 10, 13, spent=6)
    assert made.on_frame(overlapping, 0.0) == [Write(overlapping)]


@pytest.mark.parametrize(
    "bad",
    [
        layer(2, 8, 10, 2),
        layer(0, 7, 10, 3),
        layer(0, 18, 21, 3),
        layer(0, 8, 13, 5),
        layer(0, 8, 10, 17),
        replace(layer(0, 8, 10, 2), payload_bytes=2047),
    ],
    ids=["layer", "start", "stop", "longer than a frame", "beyond the credit", "bytes"],
)
def test_layer_that_was_not_agreed_is_a_breach(bad: Layer) -> None:
    actions = receiving().on_frame(bad, 0.0)
    assert isinstance(loss(actions), ProtocolError)
    assert len(aborts(actions)) == 1


def test_ping_beyond_the_credit_is_a_breach() -> None:
    assert isinstance(loss(receiving().on_frame(Ping(ID, 3, reply=False, spent=10**9), 0.0)), ProtocolError)


def test_list_of_another_length_is_a_breach() -> None:
    assert isinstance(loss(covered().on_frame(replace(COMMIT, payload_bytes=24), 0.0)), ProtocolError)


def test_commit_before_everything_came_asks_for_what_is_missing() -> None:
    made = receiving()
    store(made, [ALL_LAYERS[0], ALL_LAYERS[2], *ALL_LAYERS[3:]])
    assert made.on_frame(COMMIT, 0.0) == [Send(Nack(ID, 3, ((0, 12, 16),)))]
    store(made, [layer(0, 12, 16, spent=28)])
    assert made.on_frame(COMMIT, 0.0) == [Verify()]


def test_stored_block_that_differs_is_asked_for_and_written_again() -> None:
    made = covered()
    made.on_frame(COMMIT, 0.0)
    assert made.verified([(1, 1), (0, 0)], 0.0) == [Send(Nack(ID, 3, ((0, 8, 16), (1, 16, 20))))]
    again = layer(1, 16, 20, spent=28)
    assert made.on_frame(again, 0.0) == [Write(again)]


def test_block_that_never_comes_right_is_data_loss() -> None:
    made = covered()
    for _ in range(MAX_REPAIR_ROUNDS):
        assert made.on_frame(COMMIT, 0.0) == [Verify()]
        made.verified([(0, 1)], 0.0)
        made.written(layer(0, 16, 20, spent=24), 0.0)
    made.on_frame(COMMIT, 0.0)
    actions = made.verified([(0, 1)], 0.0)
    assert isinstance(failure(actions), DataLoss)
    assert len(aborts(actions)) == 1


def test_what_is_not_kept_as_it_came_does_not_count_when_the_receiver_takes_over() -> None:
    made = receiving()
    for frame in ALL_LAYERS:
        made.written(frame, 0.0, kept=frame is not ALL_LAYERS[1])
    taken, *_ = made.take_over(0.0)
    assert taken == TakenOver(ALL_LAYERS[1].token_start)


def test_what_was_not_kept_counts_once_it_is_written_again() -> None:
    made = receiving()
    for frame in ALL_LAYERS:
        made.written(frame, 0.0, kept=frame is not ALL_LAYERS[1])
    made.written(ALL_LAYERS[1], 0.0)
    taken, *_ = made.take_over(0.0)
    assert taken == TakenOver(20)


def test_the_next_sender_is_asked_for_what_was_not_kept() -> None:
    made = covered()
    made.written(ALL_LAYERS[0], 0.0, kept=False)
    made.sender_lost(3, TransferError("gone"), 0.0)
    taken, *_ = made.take_over(0.0)
    assert taken == TakenOver(ALL_LAYERS[0].token_start)


def test_the_damage_that_is_one_too_many_has_still_overwritten_its_place() -> None:
    made = covered()
    for _ in range(MAX_BAD_PAYLOADS):
        made.bad_payload(layer(1, 16, 20, spent=28), 0.0)
    made.bad_payload(layer(1, 8, 12, spent=28), 0.0)
    taken, *_ = made.take_over(0.0)
    assert taken == TakenOver(8)


def test_damaged_layer_is_asked_for_again_and_its_credit_returns() -> None:
    made = receiving()
    bad = layer(0, 8, 12, spent=8)
    assert made.bad_payload(bad, 0.0) == [Send(Nack(ID, 3, ((0, 8, 12),))), Send(Credit(ID, 3, 24 * 1024))]


def test_what_lay_where_a_damaged_layer_was_written_is_missing_again() -> None:
    made = covered()
    (first, *_) = ALL_LAYERS
    assert made.on_frame(first, 0.0) == [], "all there already: nothing is written"
    made.bad_payload(first, 0.0)
    (nack,) = made.on_frame(COMMIT, 0.0)
    assert nack == Send(Nack(ID, 3, ((first.layer, first.token_start, first.token_stop),)))


def test_damaged_commit_is_asked_for_again() -> None:
    assert covered().bad_payload(COMMIT, 0.0) == [Send(Nack(ID, 3, ()))]


def test_nothing_but_damage_gives_up() -> None:
    made = receiving()
    bad = layer(0, 8, 12, spent=4)
    for _ in range(MAX_BAD_PAYLOADS):
        assert made.on_frame(bad, 0.0) == [Write(bad)]
        assert not any(isinstance(action, Failed) for action in made.bad_payload(bad, 0.0))
    assert isinstance(loss(made.bad_payload(bad, 0.0)), TransferError)


def test_resending_that_brings_nothing_gives_up_and_progress_counts_anew() -> None:
    made = receiving()
    for round_ in range(2):
        for _ in range(MAX_FRUITLESS_ROUNDS):
            (nack,) = made.on_frame(COMMIT, 0.0)
            assert isinstance(nack, Send)
        store(made, [ALL_LAYERS[round_]])
    for _ in range(MAX_FRUITLESS_ROUNDS):
        made.on_frame(COMMIT, 0.0)
    assert isinstance(loss(made.on_frame(COMMIT, 0.0)), TransferError)


@pytest.mark.parametrize("state", [state for state in _STATES if state is not ReceiverState.RECEIVING])
def test_damaged_payload_outside_receiving_is_refused(state: ReceiverState) -> None:
    made = in_state(state)
    assert made.bad_payload(layer(0, 8, 10, 2), 0.0) == []
    assert (made.state, made.refused) == (state, 1)


def test_complete_transfer_answers_probes_with_ack_and_nothing_else() -> None:
    made = in_state(ReceiverState.COMPLETE)
    for probe in (COMMIT, Ping(ID, 3, reply=False, spent=0), OFFER):
        assert made.on_frame(probe, 0.0) == [ACK]
    for late in (ALL_LAYERS[0], Abort(ID, 3, "CANCELLED", "late"), Gone(ID, 3)):
        assert made.on_frame(late, 0.0) == []
    assert made.state is ReceiverState.COMPLETE


def test_failed_transfer_answers_probes_with_its_error() -> None:
    made = in_state(ReceiverState.FAILED)
    for probe in (COMMIT, Ping(ID, 3, reply=False, spent=0), OFFER):
        assert made.on_frame(probe, 0.0) == [Send(Abort(ID, 3, "CANCELLED", "the client went away"))]
    for late in (ALL_LAYERS[0], Abort(ID, 3, "CANCELLED", "late"), Gone(ID, 3)):
        assert made.on_frame(late, 0.0) == []


@pytest.mark.parametrize("state", _LIVE)
def test_abort_in_every_state_ends_once_and_tells_the_sender(state: ReceiverState) -> None:
    made = in_state(state)
    actions = made.abort(CANCELLED, 0.0)
    assert failure(actions) is CANCELLED
    assert aborts(actions) == [Abort(ID, 3, "CANCELLED", "the client went away")]
    assert made.abort(CANCELLED, 0.0) == made.tick(100.0) == made.blocks_leased(0.0) == made.verified([], 0.0) == []
    assert made.written(ALL_LAYERS[0], 0.0) == []
    assert made.next_deadline() == math.inf


@pytest.mark.parametrize("state", _LIVE)
def test_an_end_of_the_sender_that_another_may_cure_leaves_it_without_one(state: ReceiverState) -> None:
    for frame in (
        Gone(ID, 3),
        Abort(ID, 3, "UNAVAILABLE", "shutting down"),
        Abort(ID, 3, "CANCELLED", "its session with the router is broken"),
    ):
        made = in_state(state)
        actions = made.on_frame(frame, 0.0)
        assert loss(actions).retryable
        assert made.state is ReceiverState.SENDERLESS
        assert aborts(actions) == []


@pytest.mark.parametrize("state", _LIVE)
def test_an_end_of_the_sender_that_no_other_would_cure_ends_every_state(state: ReceiverState) -> None:
    actions = in_state(state).on_frame(Abort(ID, 3, "FAILED_PRECONDITION", "another model"), 0.0)
    assert isinstance(failure(actions), FailedPrecondition)
    assert aborts(actions) == []


@pytest.mark.parametrize("state", _LIVE)
def test_time_in_which_this_side_did_not_listen_is_no_silence_of_the_sender(state: ReceiverState) -> None:
    made = in_state(state)
    made.excuse(9.0)
    assert made.next_deadline() == 14.0
    assert made.tick(13.9) == []
    made.on_frame(Ping(ID, 3, reply=False, spent=0), 13.9)
    assert made.next_deadline() == 18.9  # from there on nothing is excused
    made.excuse(1000.0)
    assert made.next_deadline() == 60.0
    assert "not done in 60 s" in failure(made.tick(60.0)).message


@pytest.mark.parametrize("state", _LIVE)
def test_silence_beyond_the_ttl_ends_every_state(state: ReceiverState) -> None:
    """First the sender's time, then the time in which somebody could have said how to go on."""
    made = in_state(state)
    assert made.next_deadline() == 5.0
    assert made.tick(4.9) == []
    error = loss(made.tick(5.0))
    assert isinstance(error, TransferError)
    assert str(state) in error.message
    assert made.tick(9.9) == []
    assert isinstance(failure(made.tick(10.0)), TransferError)


@pytest.mark.parametrize("state", _LIVE)
def test_news_of_the_senders_loss_count_for_their_epoch_only(state: ReceiverState) -> None:
    made = in_state(state)
    assert made.sender_lost(2, TransferError("old news"), 0.0) == []
    assert made.state is state
    assert loss(made.sender_lost(3, TransferError("its worker was lost"), 0.0)).message == "its worker was lost"
    assert made.sender_lost(3, TransferError("again"), 0.0) != [SenderLost(TransferError("again"))]


def without_sender(*frames: Layer) -> Receiver:
    """A receiver that got these frames, then lost its sender, and expects the next one."""
    made = receiving()
    store(made, list(frames))
    made.on_frame(Gone(ID, 3), 0.0)
    assert made.renew(1.0) == []
    return made


def test_the_next_sender_is_lost_if_it_stays_queued_while_blocks_wait_for_it() -> None:
    """It may be queued behind prompts whose receivers wait for these blocks."""
    made = without_sender(ALL_LAYERS[0])
    for now in (2.0, 4.0, 5.9):
        made.on_frame(Ping(ID, 4, reply=False, spent=0), now)
        assert made.tick(now) == []
    assert made.next_deadline() == 6.0
    assert "still queued" in loss(made.tick(6.0)).message
    made.renew(6.0)
    made.excuse(1.0)  # this side did not listen
    assert made.tick(11.9) == []
    made.on_frame(replace(OFFER, epoch=5), 11.9)
    assert made.state is ReceiverState.RECEIVING
    assert made.next_deadline() == 16.9


def test_the_next_sender_may_stay_queued_while_no_blocks_wait_for_it() -> None:
    made = receiver()
    made.on_frame(OFFER, 0.0)
    made.on_frame(Gone(ID, 3), 0.0)
    made.renew(1.0)
    for now in range(2, 20, 2):
        made.on_frame(Ping(ID, 4, reply=False, spent=0), float(now))
        assert made.tick(float(now)) == []
    made.blocks_leased(19.0)
    made.on_frame(Ping(ID, 4, reply=False, spent=0), 23.0)
    assert made.next_deadline() == 24.0
    assert "still queued" in loss(made.tick(24.0)).message


def test_the_next_sender_is_told_what_there_is_and_blocks_are_not_asked_for_again() -> None:
    made = without_sender(*ALL_LAYERS[:4])
    assert (made.state, made.epoch) == (ReceiverState.EXPECTED, 4)
    have = Have(ID, 4, ((0, 8, 20), (1, 8, 12)))
    actions = made.on_frame(replace(OFFER, epoch=4), 1.0)
    assert actions == [Send(Ping(ID, 4, reply=True, spent=0)), Send(have), Send(Credit(ID, 4, 16 * 1024))]
    rest = [layer(1, 12, 16, spent=4, epoch=4), layer(1, 16, 20, spent=8, epoch=4)]
    store(made, rest)
    assert made.on_frame(replace(COMMIT, epoch=4), 1.0) == [Verify()]
    assert made.verified([], 1.0) == [Delivered(TOKENS), Send(Ack(ID, 4))]


def test_a_sender_with_other_bits_has_to_send_everything_again() -> None:
    made = without_sender(*ALL_LAYERS)
    made.on_frame(replace(OFFER, epoch=4), 1.0)
    assert made.on_frame(replace(COMMIT, epoch=4), 1.0) == [Verify()]
    (nack,) = made.verified([(0, 0), (0, 1), (1, 0), (1, 1)], 1.0)
    assert nack == Send(Nack(ID, 4, ((0, 8, 20), (1, 8, 20))))


def test_frames_of_the_lost_sender_change_nothing() -> None:
    made = without_sender()
    made.on_frame(replace(OFFER, epoch=4), 1.0)
    assert made.on_frame(ALL_LAYERS[0], 1.0) == []
    assert aborts(made.on_frame(COMMIT, 1.0)) != []
    assert made.state is ReceiverState.RECEIVING


def test_blocks_that_come_while_there_is_no_sender_are_not_lost() -> None:
    made = receiver()
    made.on_frame(OFFER, 0.0)
    made.on_frame(Gone(ID, 3), 0.0)
    assert made.blocks_leased(0.5) == []
    made.renew(1.0)
    assert made.on_frame(replace(OFFER, epoch=4), 1.0)[-1] == Send(Credit(ID, 4, 16 * 1024))


def test_blocks_asked_for_by_a_lost_sender_are_waited_for() -> None:
    made = receiver()
    made.on_frame(OFFER, 0.0)
    made.on_frame(Gone(ID, 3), 0.0)
    made.renew(1.0)
    assert made.on_frame(replace(OFFER, epoch=4), 1.0) == [Send(Ping(ID, 4, reply=True, spent=0))]
    assert made.blocks_leased(2.0) == [Send(Credit(ID, 4, 16 * 1024))]


def test_a_sender_that_cuts_blocks_differently_is_refused() -> None:
    made = without_sender(ALL_LAYERS[0])
    assert isinstance(failure(made.on_frame(replace(OFFER, epoch=4, block_tokens=4), 1.0)), FailedPrecondition)


@pytest.mark.parametrize("state", [*_LIVE, ReceiverState.SENDERLESS])
def test_renewing_needs_a_lost_sender(state: ReceiverState) -> None:
    made = in_state(state)
    made.renew(1.0)
    assert made.epoch == (4 if state is ReceiverState.SENDERLESS else 3)


@pytest.mark.parametrize(
    ("frames", "token_stop"),
    [((), 8), (ALL_LAYERS[:1], 8), (ALL_LAYERS[:4], 12), ((ALL_LAYERS[0], ALL_LAYERS[4]), 8), (ALL_LAYERS, 20)],
)
def test_taking_over_keeps_what_every_layer_has(frames: tuple[Layer, ...], token_stop: int) -> None:
    made = receiving()
    store(made, list(frames))
    taken, farewell = made.take_over(0.0)
    assert taken == TakenOver(token_stop)
    assert aborts([farewell]) != []
    assert made.take_over(0.0) == made.tick(100.0) == made.on_frame(ALL_LAYERS[5], 0.0) == []
    assert aborts(made.on_frame(COMMIT, 0.0)) != []


@pytest.mark.parametrize("state", _LIVE)
def test_signs_of_life_renew_the_ticket_up_to_the_deadline(state: ReceiverState) -> None:
    made = in_state(state)
    for second in range(1, 60):
        made.on_frame(Ping(ID, 3, reply=False, spent=0), float(second))
        assert made.tick(second + 0.9) == []
    assert isinstance(failure(made.tick(60.0)), TransferError)


def test_blocks_leased_twice_or_too_early_grants_nothing() -> None:
    assert receiver().blocks_leased(0.0) == []
    assert receiving().blocks_leased(0.0) == []


def test_nothing_to_send_is_complete_with_an_empty_list() -> None:
    expected = replace(EXPECTED, token_start=20)
    made = Receiver(expected, CONFIG, TIMING, now=0.0)
    made.on_frame(replace(OFFER, token_start=20), 0.0)
    made.blocks_leased(0.0)
    assert made.on_frame(Commit(ID, 3, TOKENS, 0), 0.0) == [Verify()]
    assert made.verified([], 0.0) == [Delivered(TOKENS), ACK]
