"""The decode role, by its events and actions alone."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from decode_worker.actions import AbortReceive, ExpectKV, GiveUpSender, OpenBlocks, RenewTicket, WantNoMore
from decode_worker.ladder import Ladder, LadderLimits
from decode_worker.role import DecodeRole
from engine.commands import (
    AbortSequence,
    DeliverTokens,
    ExpectSequence,
    ForgetSequence,
    SubmitSequence,
    TakeOverSequence,
    UnpinSequence,
)
from engine.events import Aborting, Ended, Leased, Preempted, Tokens
from engine.sequence import KVSource, SequenceKV
from kvtransfer.actions import TakenOver
from pdserve.errors import Cancelled, InternalError, ResourceExhausted, TransferError, Unavailable
from pdserve.reports import AttemptEnded, PrefillsLocally, TicketIssued, TokensSampled
from pdserve.types import Finish, FinishReason, Owner, SampledToken, SamplingParams, Ticket

OWNER = Owner("tests", "r", "router", 1)
TICKET = Ticket(b"t" * 16, 1, "ipc://here", 0, 5_000)
ID = TICKET.transfer_id
PARAMS = SamplingParams(max_tokens=4)
PROMPT, OUTPUT = (1, 2, 3), (4, 5)
TOKENS = (SampledToken(7),)
SILENT = TransferError("the sender was silent")
DONE = Finish(FinishReason.LENGTH)


@pytest.fixture
def role() -> DecodeRole:
    return DecodeRole(Ladder(LadderLimits(budget=1, max_failures=2, cooldown_s=5.0)), max_queued=2)


def expect(role: DecodeRole, owner: Owner = OWNER) -> None:
    """An attempt whose ticket is issued."""
    actions = role.start(owner, PROMPT, OUTPUT, PARAMS, False, None)
    assert actions == [ExpectSequence(owner), ExpectKV(owner, PROMPT + OUTPUT)]
    assert role.ticket_issued(owner, TICKET) == [TicketIssued(owner, TICKET)]


def receive(role: DecodeRole) -> None:
    """An attempt whose sender is there, and whose blocks are leased."""
    expect(role)
    (action,) = role.blocks_needed(OWNER)
    assert isinstance(action, SubmitSequence)
    kv = cast(SequenceKV, object())
    assert role.on_engine(Leased(OWNER, kv)) == [OpenBlocks(ID, kv)]


def test_a_delivered_sequence_joins_the_batch_and_streams(role: DecodeRole) -> None:
    receive(role)
    assert role.receive_ended(OWNER, TOKENS) == [DeliverTokens(OWNER, TOKENS)]
    assert role.on_engine(Tokens(OWNER, 2, TOKENS)) == [TokensSampled(OWNER, 2, TOKENS)]
    assert role.on_engine(Ended(OWNER, DONE)) == [AttemptEnded(OWNER, DONE)]
    assert role.owners == []


def test_blocks_are_asked_for_only_when_the_sender_is_there(role: DecodeRole) -> None:
    expect(role)
    (action,) = role.blocks_needed(OWNER)
    assert isinstance(action, SubmitSequence)
    assert action.sequence.source is KVSource.DELIVERED


def test_with_local_prefill_nothing_is_expected(role: DecodeRole) -> None:
    leader = replace(OWNER, output=1)
    (action,) = role.start(OWNER, PROMPT, OUTPUT, PARAMS, True, leader)
    assert isinstance(action, SubmitSequence)
    assert (action.sequence.source, action.sequence.shares) == (KVSource.COMPUTED, leader)
    assert role.sender_lost(OWNER, 1, SILENT) == role.prefill_locally(OWNER) == []
    assert role.on_engine(Preempted(OWNER)) == [], "nothing of it came from another worker"


def test_a_link_that_takes_no_more_ends_the_attempt_and_who_waits_for_it_may_go_on(role: DecodeRole) -> None:
    role.start(OWNER, PROMPT, OUTPUT, PARAMS, False, None)
    refused = Unavailable("the KV link is not running")
    assert role.ticket_refused(OWNER, refused) == [ForgetSequence(OWNER), AttemptEnded(OWNER, refused)]
    assert OWNER not in role


def test_no_more_attempts_than_the_queue_takes(role: DecodeRole) -> None:
    for number in range(2):
        expect(role, replace(OWNER, output=number + 1))
    (refused,) = role.start(OWNER, PROMPT, OUTPUT, PARAMS, False, None)
    assert isinstance(refused, AttemptEnded)
    assert isinstance(refused.outcome, ResourceExhausted)
    assert OWNER not in role


def test_an_owner_that_is_started_twice_is_refused_the_second_time(role: DecodeRole) -> None:
    expect(role)
    (refused,) = role.start(OWNER, PROMPT, OUTPUT, PARAMS, True, None)
    assert isinstance(refused, AttemptEnded)
    assert isinstance(refused.outcome, InternalError)
    assert len(role.blocks_needed(OWNER)) == 1, "the first one goes on"


# The ladder.


def test_a_lost_sender_is_replaced_by_a_ticket_of_the_next_epoch(role: DecodeRole) -> None:
    receive(role)
    assert role.sender_lost(OWNER, 1, SILENT) == [GiveUpSender(ID, 1, SILENT)]
    assert role.sender_gone(OWNER, SILENT, now=1.0) == [RenewTicket(OWNER, ID)]
    assert role.epoch_opened(OWNER, 2) == [TicketIssued(OWNER, replace(TICKET, epoch=2))]


def test_the_last_rung_computes_the_rest_here(role: DecodeRole) -> None:
    receive(role)
    role.sender_gone(OWNER, SILENT, now=1.0)
    assert role.sender_gone(OWNER, SILENT, now=2.0) == [WantNoMore(ID)]
    assert role.receive_ended(OWNER, TakenOver(3)) == [
        PrefillsLocally(OWNER, str(SILENT)),
        TakeOverSequence(OWNER, 3),
    ]


def test_a_ticket_that_nobody_takes_is_computed_here_from_the_start(role: DecodeRole) -> None:
    expect(role)
    assert role.prefill_locally(OWNER) == [WantNoMore(ID)]
    told, submitted = role.receive_ended(OWNER, TakenOver(0))
    assert told == PrefillsLocally(OWNER, "no prefill worker is left")
    assert isinstance(submitted, SubmitSequence)
    assert submitted.sequence.source is KVSource.COMPUTED


def test_senders_that_are_lost_again_and_again_close_the_rung_for_all(role: DecodeRole) -> None:
    for number in range(2):
        owner = replace(OWNER, output=number)
        expect(role, owner)
        role.sender_gone(owner, SILENT, now=1.0)
        assert role.sender_gone(owner, SILENT, now=1.0) == [WantNoMore(ID)]
        role.receive_ended(owner, SILENT)
    expect(role)
    assert role.sender_gone(OWNER, SILENT, now=2.0) == [WantNoMore(ID)]


# Ends at awkward moments.


def test_an_abort_right_behind_the_order_to_compute_locally_holds(role: DecodeRole) -> None:
    expect(role)
    role.prefill_locally(OWNER)
    (aborted,) = role.abort(OWNER)
    assert isinstance(aborted, AbortReceive)
    forgotten, ended = role.receive_ended(OWNER, TakenOver(0))
    assert forgotten == ForgetSequence(OWNER)
    assert ended == AttemptEnded(OWNER, aborted.error)
    assert isinstance(aborted.error, Cancelled)


def test_an_abort_before_the_engine_knows_the_sequence_keeps_it_from_there(role: DecodeRole) -> None:
    expect(role)
    (aborted,) = role.abort(OWNER)
    assert role.blocks_needed(OWNER) == []
    assert isinstance(aborted, AbortReceive)
    ends = role.receive_ended(OWNER, aborted.error)
    assert ends == [ForgetSequence(OWNER), AttemptEnded(OWNER, aborted.error)]


def test_an_aborted_attempt_takes_no_rung(role: DecodeRole) -> None:
    expect(role)
    role.abort(OWNER)
    assert role.sender_gone(OWNER, SILENT, now=1.0) == []


def test_an_abort_of_a_sequence_that_the_engine_has_reaches_both_sides(role: DecodeRole) -> None:
    receive(role)
    of_link, of_engine = role.abort(OWNER)
    assert isinstance(of_link, AbortReceive)
    assert of_engine == AbortSequence(OWNER, of_link.error)
    assert role.on_engine(Aborting(OWNER, of_link.error)) == [of_link]
    assert role.receive_ended(OWNER, of_link.error) == [AbortSequence(OWNER, of_link.error), UnpinSequence(OWNER)]
    assert role.on_engine(Ended(OWNER, of_link.error))[-1] == AttemptEnded(OWNER, of_link.error)


def test_a_transfer_taken_over_after_the_abort_of_a_pinned_sequence_still_unpins_it(role: DecodeRole) -> None:
    receive(role)
    role.prefill_locally(OWNER)
    role.abort(OWNER)
    assert role.receive_ended(OWNER, TakenOver(2))[-1] == TakeOverSequence(OWNER, 2)


def test_a_failed_transfer_ends_what_the_engine_has_and_drops_what_it_has_not(role: DecodeRole) -> None:
    receive(role)
    assert role.receive_ended(OWNER, SILENT) == [AbortSequence(OWNER, SILENT), UnpinSequence(OWNER)]
    other = replace(OWNER, output=1)
    expect(role, other)
    assert role.receive_ended(other, SILENT) == [ForgetSequence(other), AttemptEnded(other, SILENT)]


def test_an_engine_that_refuses_a_sequence_ends_its_transfer(role: DecodeRole) -> None:
    expect(role)
    role.blocks_needed(OWNER)
    error = InternalError("a step failed")
    assert role.on_engine(Ended(OWNER, error)) == [AbortReceive(ID, error), AttemptEnded(OWNER, error)]
    assert role.receive_ended(OWNER, error) == [], "its transfer's end comes late"


def test_a_preempted_sequence_whose_prompt_was_delivered_is_told_of(role: DecodeRole) -> None:
    receive(role)
    role.receive_ended(OWNER, TOKENS)
    assert role.on_engine(Preempted(OWNER)) == [PrefillsLocally(OWNER, "preempted")]


def test_what_comes_for_nobody_is_left_out(role: DecodeRole) -> None:
    assert role.abort(OWNER) == role.blocks_needed(OWNER) == role.epoch_opened(OWNER, 2) == []
    assert role.sender_lost(OWNER, 1, SILENT) == role.sender_gone(OWNER, SILENT, 0.0) == []
    assert role.on_engine(Ended(OWNER, None)) == role.receive_ended(OWNER, SILENT) == []
