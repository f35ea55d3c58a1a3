"""Sender and receiver as state machines: whatever comes in whatever order, their promises hold."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.actions import (
    Delivered,
    Failed,
    Finished,
    NeedBlocks,
    ReceiverAction,
    Send,
    SendCommit,
    SenderAction,
    SenderLost,
    SendLayer,
    TakenOver,
    Verify,
    Write,
)
from kvtransfer.frames import Abort, Ack, Commit, Credit, Frame, Gone, Have, Layer, Nack, Open, Ping
from kvtransfer.integrity import block_count, block_range, list_bytes
from kvtransfer.receiver import Expectation, Receiver, ReceiverState
from kvtransfer.sender import Sender, SenderState
from kvtransfer.timing import Timing
from pdserve.config import TransferConfig
from pdserve.errors import Cancelled, InternalError, TransferError
from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken
from support.length import times

ID = b"t" * 16
LAYOUT = KVFormat(2, 1, 4, "float32")  # 32 bytes a token and layer
ROW = LAYOUT.payload_bytes(1)
START, STOP, BLOCK = 3, 20, 4
FRAME_BYTES = 5 * ROW
TIMING = Timing(ttl_s=5.0, probe_s=0.5, deadline_s=40.0)
TOKENS = (SampledToken(7),)
GIVE_UP = Cancelled("the client went away")
SETTINGS = settings(max_examples=times(100), stateful_step_count=40, deadline=None)

layers = st.integers(0, LAYOUT.layer_count - 1)
ranges = st.tuples(st.integers(START, STOP - 1), st.integers(1, STOP)).map(lambda p: (p[0], min(STOP, p[0] + p[1])))
some_ranges = st.lists(st.tuples(layers, ranges).map(lambda p: (p[0], *p[1])), max_size=4).map(tuple)
sometimes = st.sampled_from([False] * 3 + [True])
rarely = st.sampled_from([False] * 15 + [True])  # what ends a run is kept rare, so that runs get far
short_times = st.sampled_from([0.1, 0.1, 0.5, 0.5, 2.0])
Cell = tuple[int, int]  # layer, token


def offer(epoch: int) -> Open:
    return Open(ID, epoch, LAYOUT, b"model", b"h" * 16, START, STOP, BLOCK, FRAME_BYTES)


def cells(layer: int, start: int, stop: int) -> set[Cell]:
    return {(layer, token) for token in range(start, stop)}


ALL_CELLS = {cell for layer in range(LAYOUT.layer_count) for cell in cells(layer, START, STOP)}


class SenderMachine(RuleBasedStateMachine):
    """A sender whose prefill, receiver and clock do as they like."""

    @initialize()
    def set_up(self) -> None:
        self.now = 0.0
        self.sender = Sender(offer(3), TIMING, self.now)
        self.ready: set[Cell] = set()
        self.may_go: Counter[Cell] = Counter()  # how often a cell may still be sent
        self.sent: set[Cell] = set()
        self.held: set[Cell] = set()
        self.granted = 0
        self.committed = False
        self.outcomes: list[SenderAction] = []

    def take(self, actions: list[SenderAction]) -> None:
        for action in actions:
            if isinstance(action, Finished | Failed):
                self.outcomes.append(action)
            elif isinstance(action, SendLayer):
                self.take_layer(action.frame)
            elif isinstance(action, SendCommit):
                assert not self.outcomes, "COMMIT after the end"
                assert self.committed
                assert self.ready - self.sent <= self.held, "COMMIT before all was sent"

    def take_layer(self, frame: Layer) -> None:
        assert not self.outcomes, "a LAYER after the end"
        assert frame.payload_bytes == LAYOUT.payload_bytes(frame.token_stop - frame.token_start) <= FRAME_BYTES
        assert frame.spent <= self.granted, "sent beyond the credit"
        for cell in cells(frame.layer, frame.token_start, frame.token_stop):
            assert cell in self.ready, "sent before it was computed"
            self.may_go[cell] -= 1
            assert self.may_go[cell] >= 0, "sent again without being asked"
            self.sent.add(cell)

    @rule(layer=layers, part=ranges)
    def a_layer_is_computed(self, layer: int, part: tuple[int, int]) -> None:
        for cell in cells(layer, *part) - self.ready:
            self.may_go[cell] += 1
        self.ready |= cells(layer, *part)
        self.take(self.sender.layer_ready(layer, *part, self.now))

    @precondition(lambda self: self.sender.state is not SenderState.FAILED)
    @rule()
    def the_rest_is_computed_and_a_token_sampled(self) -> None:
        for layer in range(LAYOUT.layer_count):
            self.a_layer_is_computed(layer, (START, STOP))
        self.committed = True
        self.take(self.sender.commit(TOKENS, self.now))

    @rule()
    def its_turn_comes(self) -> None:
        self.take(self.sender.start(self.now))

    @rule(total=st.integers(0, 3 * len(ALL_CELLS) * ROW))
    def credit_comes(self, total: int) -> None:
        if self.sender.state in (SenderState.OPENING, SenderState.STREAMING, SenderState.COMMITTED):
            self.granted = max(self.granted, total)
        self.take(self.sender.on_frame(Credit(ID, 3, total), self.now))

    @rule(parts=some_ranges)
    def something_is_asked_for_again(self, parts: tuple[tuple[int, int, int], ...]) -> None:
        if self.sender.state in (SenderState.STREAMING, SenderState.COMMITTED):
            for part in parts:
                self.held -= cells(*part)
                for cell in cells(*part) & self.sent:
                    self.may_go[cell] = 1
        self.take(self.sender.on_frame(Nack(ID, 3, parts), self.now))

    @rule(parts=some_ranges)
    def something_is_held_already(self, parts: tuple[tuple[int, int, int], ...]) -> None:
        before = self.sender.credit.spent
        self.take(self.sender.on_frame(Have(ID, 3, parts), self.now))
        if before == 0 and self.sender.state in (SenderState.OPENING, SenderState.STREAMING):
            self.held |= {cell for part in parts for cell in cells(*part)}
            self.sent |= self.held & self.ready  # a NACK brings them
            self.may_go.update({cell: 1 - self.may_go[cell] for cell in self.held})

    @rule(
        frame=st.sampled_from(
            [
                Ping(ID, 3, reply=True, spent=0),
                Ping(ID, 3, reply=False, spent=0),
                Gone(ID, 3),
                Open(ID, 3, LAYOUT, b"m", b"h" * 16, 0, 1, 1, ROW),
                Credit(ID, 2, 10**9),
                Nack(ID, 4, ((0, START, STOP),)),
                Ack(ID, 2),
            ]
        )
    )
    def something_else_comes(self, frame: Frame) -> None:
        self.take(self.sender.on_frame(frame, self.now))

    @rule()
    def the_receiver_grants_all(self) -> None:
        self.its_turn_comes()
        self.credit_comes(self.granted + 3 * len(ALL_CELLS) * ROW)

    @precondition(lambda self: self.sender.state is SenderState.COMMITTED)
    @rule()
    def the_receiver_has_all(self) -> None:
        self.take(self.sender.on_frame(Ack(ID, 3), self.now))

    @rule(
        really=rarely,
        frame=st.sampled_from([Ack(ID, 3), Abort(ID, 3, "CANCELLED", "stop"), Nack(ID, 3, ((9, START, STOP),))]),
    )
    def the_receiver_ends_it(self, really: bool, frame: Frame) -> None:
        if really:
            self.take(self.sender.on_frame(frame, self.now))

    @rule(really=rarely)
    def it_is_aborted(self, really: bool) -> None:
        if really:
            self.take(self.sender.abort(GIVE_UP, self.now))

    @rule(seconds=short_times, long=rarely)
    def time_passes(self, seconds: float, long: bool) -> None:
        self.now += 6.0 if long else seconds
        self.take(self.sender.tick(self.now))

    @rule(seconds=short_times)
    def this_side_is_away(self, seconds: float) -> None:
        self.now += seconds
        self.sender.excuse(seconds)
        ended = self.sender.ended
        self.take(self.sender.tick(self.now))
        assert self.sender.ended == ended or self.now >= TIMING.deadline_s, "ended by a silence nobody listened to"

    @invariant()
    def it_ends_once_and_in_time(self) -> None:
        if not hasattr(self, "sender"):
            return
        assert len(self.outcomes) == self.sender.ended
        assert self.sender.credit.spent <= self.sender.credit.granted == self.granted
        assert (self.sender.next_deadline() == math.inf) == self.sender.ended
        if self.sender.state is SenderState.DONE:
            assert self.committed
        if not self.sender.ended:
            assert self.now < TIMING.deadline_s


class ReceiverMachine(RuleBasedStateMachine):
    """A receiver whose senders, one an epoch, are honest, and whose network and engine do as they like."""

    @initialize(window=st.sampled_from([5, 9, 40]))
    def set_up(self, window: int) -> None:
        self.now = 0.0
        expected = Expectation(ID, 3, LAYOUT, b"model", b"h" * 16, START, STOP)
        self.window = window * ROW
        config = TransferConfig(window_bytes=self.window, max_frame_bytes=FRAME_BYTES)
        self.receiver = Receiver(expected, config, TIMING, self.now)
        self.flying: list[Frame] = [offer(3)]
        self.stored: set[Cell] = set()
        self.granted = self.spent = 0  # of this epoch
        self.needs = self.losses = 0
        self.leased = self.renewing = self.damaged = False
        self.outcomes: list[ReceiverAction] = []

    def take(self, actions: list[ReceiverAction]) -> None:
        for action in actions:
            if isinstance(action, Delivered | TakenOver | Failed):
                self.end(action)
            elif isinstance(action, SenderLost):
                self.losses += 1
                self.renewing = True
            elif isinstance(action, NeedBlocks):
                self.needs += 1
            elif isinstance(action, Write):
                self.write(action.frame)
            elif isinstance(action, Send) and isinstance(action.frame, Credit):
                assert self.leased, "credit without blocks"
                self.granted = max(self.granted, action.frame.total)

    def end(self, action: ReceiverAction) -> None:
        self.outcomes.append(action)
        if isinstance(action, Delivered):
            assert self.stored == ALL_CELLS, "delivered before it was whole"
        if isinstance(action, TakenOver):
            whole = [t for t in range(START, STOP) if all((n, t) in self.stored for n in range(LAYOUT.layer_count))]
            run = next((t for i, t in enumerate(range(START, STOP)) if i >= len(whole) or whole[i] != t), STOP)
            assert action.token_stop == run

    def write(self, frame: Layer) -> None:
        assert self.leased, "written without blocks"
        assert not self.outcomes, "written after the end"
        assert frame.epoch == self.receiver.epoch
        written = cells(frame.layer, frame.token_start, frame.token_stop)
        if self.damaged:
            self.stored -= written
            self.take(self.receiver.bad_payload(frame, self.now))
        else:
            self.stored |= written
            self.take(self.receiver.written(frame, self.now))

    @rule(layer=layers, part=ranges)
    def a_layer_is_sent(self, layer: int, part: tuple[int, int]) -> None:
        start, stop = part[0], min(part[1], part[0] + FRAME_BYTES // ROW)
        byte_count = LAYOUT.payload_bytes(stop - start)
        if self.spent + byte_count <= self.granted:
            self.spent += byte_count
            self.flying.append(Layer(ID, self.receiver.epoch, layer, start, stop, self.spent, byte_count))

    @rule()
    def a_commit_is_sent(self) -> None:
        self.flying.append(Commit(ID, self.receiver.epoch, TOKENS, list_bytes(offer(3))))

    @rule(data=st.data())
    def the_sender_gets_on(self, data: st.DataObject) -> None:
        """It opens, sends what is missing as far as its credit goes, and commits if that was all."""
        self.arrives(offer(self.receiver.epoch), data)
        self.blocks_are_leased()
        for layer, token in sorted(ALL_CELLS - self.stored):
            if self.spent + ROW <= self.granted:
                self.spent += ROW
                self.arrives(Layer(ID, self.receiver.epoch, layer, token, token + 1, self.spent, ROW), data)
        if self.stored == ALL_CELLS:
            self.arrives(Commit(ID, self.receiver.epoch, TOKENS, list_bytes(offer(3))), data)

    @rule(kind=st.sampled_from(["open", "ping"]), worse=st.sampled_from(["gone", "abort", "bug"]), really=rarely)
    def something_else_is_sent(self, kind: str, worse: str, really: bool) -> None:
        epoch = self.receiver.epoch
        frames: dict[str, Frame] = {
            "open": offer(epoch),
            "ping": Ping(ID, epoch, reply=False, spent=self.spent),
            "gone": Gone(ID, epoch),
            "abort": Abort(ID, epoch, "INTERNAL", "the prefill worker broke"),
            "bug": Layer(ID, epoch, 7, 0, 99, 10**9, 5),
        }
        self.flying.append(frames[worse if really else kind])

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), lost=st.booleans())
    def a_frame_arrives_late_doubled_or_never(self, data: st.DataObject, lost: bool) -> None:
        place = data.draw(st.integers(0, len(self.flying) - 1))
        frame = self.flying.pop(place) if lost else self.flying[place]
        self.arrives(frame, data)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def the_next_frames_arrive_in_order(self, data: st.DataObject) -> None:
        arriving, self.flying = self.flying, []
        for frame in arriving:
            self.arrives(frame, data)

    def arrives(self, frame: Frame, data: st.DataObject) -> None:
        actions = self.receiver.on_frame(frame, self.now)
        self.take(actions)
        if any(isinstance(action, Verify) for action in actions):
            all_blocks = [(n, b) for n in range(LAYOUT.layer_count) for b in range(block_count(offer(3)))]
            wrong = data.draw(st.lists(st.sampled_from(all_blocks), max_size=2, unique=True))
            for layer, block in wrong:
                self.stored -= cells(layer, *block_range(offer(3), block))
            self.take(self.receiver.verified(wrong, self.now))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def a_payload_arrives_damaged(self, data: st.DataObject) -> None:
        frame = data.draw(st.sampled_from(self.flying))
        if isinstance(frame, Commit):
            self.take(self.receiver.bad_payload(frame, self.now))
        elif isinstance(frame, Layer):
            self.damaged = True
            self.take(self.receiver.on_frame(frame, self.now))
            self.damaged = False

    @rule(
        away=st.sampled_from([-1, 1]),
        what=st.sampled_from(["layer", "commit", "open", "gone", "abort", "ping"]),
        layer=layers,
    )
    def a_frame_of_another_epoch_changes_nothing(self, away: int, what: str, layer: int) -> None:
        epoch = self.receiver.epoch + away
        frames: dict[str, Frame] = {
            "layer": Layer(ID, epoch, layer, START, START + 1, ROW, ROW),
            "commit": Commit(ID, epoch, TOKENS, list_bytes(offer(3))),
            "open": offer(epoch),
            "gone": Gone(ID, epoch),
            "abort": Abort(ID, epoch, "FAILED_PRECONDITION", "another model"),
            "ping": Ping(ID, epoch, reply=False, spent=0),
        }
        before = self.receiver.state, self.receiver.credit.consumed, self.receiver.next_deadline()
        actions = self.receiver.on_frame(frames[what], self.now)
        assert all(isinstance(action, Send) and isinstance(action.frame, Abort) for action in actions)
        assert (self.receiver.state, self.receiver.credit.consumed, self.receiver.next_deadline()) == before

    @rule()
    def blocks_are_leased(self) -> None:
        self.leased = self.leased or (self.needs > 0 and not self.receiver.ended)
        self.take(self.receiver.blocks_leased(self.now))

    @rule()
    def another_sender_is_found(self) -> None:
        if not self.renewing:
            return
        self.renewing = False
        before = self.receiver.epoch
        self.take(self.receiver.renew(self.now))
        if self.receiver.epoch > before:
            self.granted = self.spent = 0
            self.flying.append(offer(self.receiver.epoch))

    @rule(really=rarely)
    def the_router_says_the_sender_is_lost(self, really: bool) -> None:
        epoch = self.receiver.epoch if really else self.receiver.epoch - 1
        self.take(self.receiver.sender_lost(epoch, TransferError("it was killed"), self.now))

    @rule(really=sometimes)
    def the_sender_is_lost_and_another_one_opens(self, really: bool) -> None:
        """Frames of the lost one may still be on their way."""
        if really:
            self.the_router_says_the_sender_is_lost(True)
            self.another_sender_is_found()
            self.take(self.receiver.on_frame(offer(self.receiver.epoch), self.now))

    @rule(really=rarely)
    def the_rest_is_computed_here(self, really: bool) -> None:
        if really:
            self.take(self.receiver.take_over(self.now))

    @rule(really=rarely)
    def it_is_aborted(self, really: bool) -> None:
        if really:
            self.take(self.receiver.abort(GIVE_UP, self.now))

    @rule(seconds=short_times, long=rarely)
    def time_passes(self, seconds: float, long: bool) -> None:
        self.now += 6.0 if long else seconds
        self.take(self.receiver.tick(self.now))

    @rule(seconds=short_times)
    def this_side_is_away(self, seconds: float) -> None:
        self.now += seconds
        self.receiver.excuse(seconds)
        state = self.receiver.state
        self.take(self.receiver.tick(self.now))
        assert self.receiver.state == state or self.now >= TIMING.deadline_s, "ended by a silence nobody listened to"

    @invariant()
    def it_ends_once_and_in_time(self) -> None:
        if not hasattr(self, "receiver"):
            return
        receiver = self.receiver
        assert len(self.outcomes) == receiver.ended
        assert self.needs <= 1
        assert receiver.credit.granted <= receiver.credit.consumed + self.window
        assert (receiver.next_deadline() == math.inf) == receiver.ended
        for outcome in self.outcomes:
            assert not (isinstance(outcome, Failed) and isinstance(outcome.error, InternalError))
        if receiver.state is ReceiverState.SENDERLESS:
            assert self.losses > 0
        if not receiver.ended:
            assert self.now < TIMING.deadline_s


def _case(machine: type[RuleBasedStateMachine]) -> Any:
    case = machine.TestCase
    case.settings = SETTINGS
    return case


TestSender = _case(SenderMachine)
TestReceiver = _case(ReceiverMachine)
