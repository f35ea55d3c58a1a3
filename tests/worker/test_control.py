"""What a worker decides: who is told what, in which order, on whose turn, and when it may leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.events import Ended, EngineEvent, Leased, Tokens
from kvtransfer.actions import TakenOver
from pdserve.clock import ManualClock
from pdserve.errors import Cancelled, PdserveError, TransferError, Unavailable
from pdserve.rpc import cluster_pb2 as pb
from pdserve.types import Finish, FinishReason, Load, Owner, SampledToken, SamplingParams, Ticket
from support import commands
from support.controls import HandTurns, OneSession, TestedControl

OWNER = Owner("tests", "r", "router", 1)
TICKET = Ticket(b"t" * 16, 1, "ipc://here", 0, 5_000)
PARAMS = SamplingParams(max_tokens=4)
PROMPT = (1, 2, 3)
DONE = Finish(FinishReason.LENGTH)
LOAD = Load(running=3)


class Noted:
    """An engine, or a link, that only keeps what it is told: (verb, arguments). `refusal`: raised by what may raise."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.callbacks: dict[str, Callable[..., None]] = {}
        self.refusal: PdserveError | None = None

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return lambda *what: self.told.append((verb, *what))

    def open_sender(self, ticket: Ticket, owner: Owner, token_ids: Any, token_stop: int, on_end: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.callbacks["end"] = on_end
        self.told.append(("open_sender", ticket, tuple(token_ids), token_stop))

    def expect(self, owner: Owner, token_ids: Any, on_need_blocks: Any, on_end: Any, *, on_sender_lost: Any) -> Ticket:
        if self.refusal is not None:
            raise self.refusal
        self.callbacks |= {"need": on_need_blocks, "end": on_end, "lost": on_sender_lost}
        return TICKET

    def renew(self, transfer_id: bytes, on_epoch: Any) -> None:
        self.callbacks["epoch"] = on_epoch

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, *_ in self.told]


class NotedEngine(Noted):
    def expect(self, owner: Owner) -> None:  # type: ignore[override]
        self.told.append(("expect", owner))


class Bed:
    """A control, all that it acts through, and what came of it."""

    def __init__(self) -> None:
        self.engine, self.link, self.turns = NotedEngine(), Noted(), HandTurns()
        self.said: list[pb.WorkerMessage] = []
        self.left_behind: list[int] = []
        tested = TestedControl(
            self.engine,
            self.link,
            2,
            self.said.append,
            turns=self.turns,
            clock=ManualClock(),
            observer=self,
        )
        self.control, self.session, self.tell = tested.control, tested.session, tested.tell

    def left(self, owners_left: int) -> None:
        self.left_behind.append(owners_left)

    def hears_of(self, *events: EngineEvent) -> None:
        self.control.on_engine(events, LOAD)
        self.turns.take()

    def link_tells(self, what: str, *outcome: object) -> None:
        self.link.callbacks[what](*outcome)
        self.turns.take()

    @property
    def kinds(self) -> list[str]:
        return [message.WhichOneof("message") or "" for message in self.said]


@pytest.fixture
def bed() -> Bed:
    return Bed()


def owner(number: int, router: str = "router") -> Owner:
    return Owner("tests", f"r{number}", router, 1)


def local(number: int, router: str = "router") -> pb.RouterMessage:
    return commands.start_decode(owner(number, router), PROMPT, (), PARAMS, local_prefill=True)


# Turns.


def test_what_engine_and_link_tell_waits_for_the_controls_own_turn(bed: Bed) -> None:
    bed.tell(commands.start_decode(OWNER, PROMPT, (), PARAMS))
    bed.link.callbacks["need"]()
    bed.control.on_engine((), LOAD)
    assert "submit" not in bed.engine.verbs
    assert bed.control.load.running == 0
    bed.turns.take()
    assert bed.engine.verbs == ["expect", "submit"]
    assert bed.control.load == LOAD


# Reports.


def test_the_tokens_of_a_step_leave_in_one_message_for_each_router_and_ends_behind_them(bed: Bed) -> None:
    elsewhere: list[pb.WorkerMessage] = []
    bed.control.session_opened(OneSession(elsewhere.append, "other"))
    for message in (local(1), local(2), local(3, "other")):
        bed.tell(message)
    token = (SampledToken(7),)
    bed.hears_of(
        Tokens(owner(1), 0, token),
        Ended(owner(1), DONE),
        Tokens(owner(2), 0, token),
        Tokens(owner(3, "other"), 0, token),
    )
    assert bed.kinds == ["tokens", "terminal"]
    assert [item.owner.request_id for item in bed.said[0].tokens.batch] == ["r1", "r2"]
    (message,) = elsewhere
    assert [item.owner.request_id for item in message.tokens.batch] == ["r3"]


def test_a_router_that_has_gone_is_told_nothing_more(bed: Bed) -> None:
    bed.tell(local(1))
    bed.control.session_ended(bed.session)
    bed.hears_of(Ended(owner(1), Cancelled("its router is lost")))
    assert bed.said == []


def test_the_end_of_a_session_aborts_all_that_is_its_routers_and_nothing_else(bed: Bed) -> None:
    bed.tell(local(1))
    bed.tell(local(2, "other"))
    bed.control.session_ended(bed.session)
    assert [what[1] for what in bed.engine.told if what[0] == "abort"] == [owner(1)]


def test_the_late_end_of_a_session_that_was_replaced_takes_the_new_one_nothing(bed: Bed) -> None:
    said: list[pb.WorkerMessage] = []
    bed.control.session_opened(OneSession(said.append))
    bed.control.session_ended(bed.session)
    bed.tell(local(1))
    bed.hears_of(Ended(owner(1), DONE))
    assert len(said) == 1


# Between engine and link.


def test_a_prompt_for_another_worker_goes_by_link_and_engine_to_the_routers_word(bed: Bed) -> None:
    bed.tell(commands.start_prefill(OWNER, PROMPT, (4,), PARAMS, TICKET))
    assert bed.link.told == [("open_sender", TICKET, (*PROMPT, 4), 4)]
    assert bed.engine.verbs == ["submit"]
    bed.hears_of(Tokens(OWNER, 1, (SampledToken(7),)))
    assert bed.link.verbs == ["open_sender", "commit"]
    bed.link_tells("end", None)
    assert bed.engine.verbs == ["submit", "unpin"]
    bed.hears_of(Ended(OWNER, None))
    assert bed.kinds == ["terminal"]
    assert not bed.said[0].terminal.error_code


def test_a_delivery_goes_by_ticket_blocks_and_tokens(bed: Bed) -> None:
    bed.tell(commands.start_decode(OWNER, PROMPT, (), PARAMS))
    assert bed.kinds == ["ticket"]
    bed.link_tells("need")
    kv: Any = object()
    bed.hears_of(Leased(OWNER, kv))
    assert bed.link.told == [("blocks_leased", TICKET.transfer_id, kv)]
    bed.link_tells("end", (SampledToken(7),))
    assert bed.engine.verbs == ["expect", "submit", "deliver"]


def test_a_lost_sender_leads_down_the_ladder_to_the_rest_computed_here(bed: Bed) -> None:
    bed.tell(commands.start_decode(OWNER, PROMPT, (), PARAMS))
    bed.link_tells("need")
    bed.tell(commands.sender_lost(OWNER, 1, TransferError("gone")))
    assert bed.link.verbs == ["sender_lost"]
    bed.link_tells("lost", TransferError("gone"))
    bed.link_tells("epoch", 2)
    assert [message.ticket.epoch for message in bed.said] == [1, 2]
    bed.tell(commands.prefill_locally(OWNER))
    bed.link_tells("end", TakenOver(2))
    assert bed.kinds == ["ticket", "ticket", "local_prefill"]
    assert bed.engine.told[-1] == ("take_over", OWNER, 2)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_link_that_takes_no_more_is_the_attempts_end_at_once(bed: Bed, role: str) -> None:
    bed.link.refusal = Unavailable("the KV link is not running")
    if role == "prefill":
        bed.tell(commands.start_prefill(OWNER, PROMPT, (), PARAMS, TICKET))
    else:
        bed.tell(commands.start_decode(OWNER, PROMPT, (), PARAMS))
    assert bed.kinds == ["terminal"]
    assert bed.said[0].terminal.error_code == "UNAVAILABLE"
    assert "submit" not in bed.engine.verbs
    assert bed.control.owners == []


def test_no_worker_is_both_ends_of_an_attempt(bed: Bed) -> None:
    bed.tell(commands.start_decode(OWNER, PROMPT, (), PARAMS))
    bed.tell(commands.start_prefill(OWNER, PROMPT, (), PARAMS, TICKET))
    assert bed.kinds == ["ticket", "terminal"]
    assert bed.control.owners == [OWNER]


# Draining and leaving.


def noted() -> pb.RouterMessage:
    return pb.RouterMessage(drain_noted=pb.DrainNoted())


def drain(cancel: bool) -> pb.RouterMessage:
    return pb.RouterMessage(drain=pb.Drain(cancel=cancel))


def test_a_drain_is_told_with_the_load_and_can_be_taken_back(bed: Bed) -> None:
    bed.tell(drain(cancel=False))
    assert bed.control.load.draining
    bed.tell(drain(cancel=True))
    assert not bed.control.load.draining


def test_it_leaves_when_every_router_knows_and_nothing_is_left(bed: Bed) -> None:
    bed.control.session_opened(OneSession(lambda message: None, "other"))
    bed.tell(local(1))
    bed.control.leave(5.0)
    bed.tell(noted())
    bed.hears_of(Ended(owner(1), DONE))
    assert bed.left_behind == [], "the other router may still send something"
    bed.control.on_message(OneSession(lambda message: None, "other"), noted())
    assert bed.left_behind == [0]


def test_a_router_that_is_lost_meanwhile_is_not_waited_for(bed: Bed) -> None:
    bed.control.leave(5.0)
    assert bed.left_behind == []
    bed.control.session_ended(bed.session)
    assert bed.left_behind == [0]


def test_routers_that_say_nothing_are_waited_for_two_seconds_and_requests_until_the_end(bed: Bed) -> None:
    bed.tell(local(1))
    bed.control.leave(5.0)
    (first_s, routers_are_late), (second_s, time_is_over) = bed.turns.timers
    assert (first_s, second_s) == (2.0, 5.0)
    routers_are_late()
    assert bed.left_behind == []
    time_is_over()
    assert bed.left_behind == [1]
    bed.hears_of(Ended(owner(1), DONE))
    assert bed.left_behind == [1], "it is told once"


def test_without_requests_it_waits_for_no_longer_than_the_routers_may_take(bed: Bed) -> None:
    bed.control.leave(5.0)
    bed.turns.timers[0][1]()
    assert bed.left_behind == [0]


def test_who_leaves_does_not_serve_again(bed: Bed) -> None:
    bed.tell(local(1))
    bed.control.leave(5.0)
    bed.tell(drain(cancel=True))
    assert bed.control.load.draining


def test_who_has_left_does_not_serve_again_either(bed: Bed) -> None:
    bed.control.leave(5.0)
    bed.tell(noted())
    assert bed.left_behind == [0]
    bed.tell(drain(cancel=True))
    bed.control.leave(5.0)
    assert bed.control.load.draining
    for _, call in bed.turns.timers:
        call()
    assert bed.left_behind == [0]


def test_being_told_twice_to_leave_changes_nothing(bed: Bed) -> None:
    bed.control.leave(5.0)
    bed.control.leave(1.0)
    bed.tell(noted())
    assert bed.left_behind == [0]
