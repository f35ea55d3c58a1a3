"""The prefill role, by its events and actions alone."""

from __future__ import annotations

import pytest

from engine.commands import AbortSequence, SubmitSequence, UnpinSequence
from engine.events import Aborting, Ended, Leased, Preempted, Tokens
from engine.sequence import SequenceKV
from pdserve.errors import Cancelled, InvalidArgument, ResourceExhausted, TransferError, Unavailable
from pdserve.reports import AttemptEnded
from pdserve.types import Owner, SampledToken, SamplingParams, Ticket
from prefill_worker.actions import AbortSend, CommitSend, OpenSend
from prefill_worker.role import PrefillRole

OWNER = Owner("tests", "r", "router", 1)
TICKET = Ticket(b"t" * 16, 1, "ipc://there", 0, 5_000)
PARAMS = SamplingParams(max_tokens=4)
PROMPT, OUTPUT = (1, 2, 3), (4, 5)
TOKENS = (SampledToken(7),)
SILENT = TransferError("the receiver was silent")


class Outlet:
    """Somewhere for KV to go."""

    def __init__(self, owner: Owner, ticket: Ticket, token_count: int) -> None:
        self.made_for = (owner, ticket, token_count)

    def opened(self, kv: SequenceKV) -> None: ...

    def layer_ready(self, layer: int, start: int, stop: int) -> None: ...


@pytest.fixture
def role() -> PrefillRole:
    return PrefillRole(Outlet, max_queued=2)


def start(role: PrefillRole, owner: Owner = OWNER, ticket: Ticket = TICKET) -> None:
    """A prompt whose sender the link has opened, and which the engine has."""
    assert role.start(owner, PROMPT, OUTPUT, PARAMS, ticket) == [OpenSend(owner, ticket, PROMPT + OUTPUT)]
    (action,) = role.send_opened(owner)
    assert isinstance(action, SubmitSequence)


def other(number: int) -> Owner:
    return Owner("tests", f"r{number}", "router", 1)


def test_a_prompt_is_queued_at_the_link_first_and_then_at_the_engine(role: PrefillRole) -> None:
    role.start(OWNER, PROMPT, OUTPUT, PARAMS, TICKET)
    (action,) = role.send_opened(OWNER)
    assert isinstance(action, SubmitSequence)
    sequence = action.sequence
    assert (sequence.token_ids, sequence.prompt_count) == ([*PROMPT, *OUTPUT], len(PROMPT))
    assert sequence.stops_after_prefill
    assert isinstance(sequence.outlet, Outlet)
    assert sequence.outlet.made_for == (OWNER, TICKET, len(PROMPT + OUTPUT))


def test_the_first_token_is_committed_and_the_lease_outlives_the_computation(role: PrefillRole) -> None:
    start(role)
    assert role.on_engine(Tokens(OWNER, len(OUTPUT), TOKENS)) == [CommitSend(TICKET.transfer_id, TOKENS)]
    assert role.owners == [OWNER]
    assert role.send_ended(OWNER, TICKET.epoch, None) == [UnpinSequence(OWNER)]
    assert role.on_engine(Ended(OWNER, None)) == [AttemptEnded(OWNER, None, TICKET.epoch)]
    assert role.owners == []


def test_a_link_that_takes_no_more_ends_the_attempt_before_the_engine_hears_of_it(role: PrefillRole) -> None:
    role.start(OWNER, PROMPT, OUTPUT, PARAMS, TICKET)
    refused = Unavailable("the KV link is not running")
    assert role.send_refused(OWNER, refused) == [AttemptEnded(OWNER, refused, TICKET.epoch)]
    assert OWNER not in role


def test_a_failed_transfer_ends_the_sequence_and_is_the_reason_that_is_told(role: PrefillRole) -> None:
    """Also where it fails before the engine has looked at the prompt: its commands come in order."""
    start(role)
    assert role.send_ended(OWNER, TICKET.epoch, SILENT) == [AbortSequence(OWNER, SILENT), UnpinSequence(OWNER)]
    actions = role.on_engine(Ended(OWNER, SILENT))
    assert actions == [AbortSend(TICKET.transfer_id, SILENT), AttemptEnded(OWNER, SILENT, TICKET.epoch)]


def test_a_transfer_that_fails_after_the_computation_is_no_success(role: PrefillRole) -> None:
    start(role)
    role.on_engine(Tokens(OWNER, 0, TOKENS))
    role.send_ended(OWNER, TICKET.epoch, SILENT)
    assert role.on_engine(Ended(OWNER, None))[-1] == AttemptEnded(OWNER, SILENT, TICKET.epoch)


def test_an_abort_reaches_engine_and_link_whatever_the_state(role: PrefillRole) -> None:
    start(role)
    of_engine, of_link = role.abort(OWNER)
    assert isinstance(of_engine, AbortSequence)
    assert isinstance(of_link, AbortSend)
    assert isinstance(of_engine.error, Cancelled)
    assert of_link.error is of_engine.error
    assert OWNER in role, "its end is told when its blocks are back"


def test_an_engine_that_aborts_a_pinned_sequence_ends_its_transfer(role: PrefillRole) -> None:
    start(role)
    error = Cancelled("gone")
    assert role.on_engine(Aborting(OWNER, error)) == [AbortSend(TICKET.transfer_id, error)]


def test_a_prompt_that_never_ran_takes_its_queued_sender_with_it(role: PrefillRole) -> None:
    start(role)
    misfit = InvalidArgument("prompt", "has 9 tokens")
    actions = role.on_engine(Ended(OWNER, misfit))
    assert actions == [AbortSend(TICKET.transfer_id, misfit), AttemptEnded(OWNER, misfit, TICKET.epoch)]


def test_no_more_prompts_than_the_queue_takes(role: PrefillRole) -> None:
    start(role, other(1))
    start(role, other(2))
    (refused,) = role.start(OWNER, PROMPT, OUTPUT, PARAMS, TICKET)
    assert isinstance(refused, AttemptEnded)
    assert isinstance(refused.outcome, ResourceExhausted)
    assert OWNER not in role


def test_a_later_epoch_is_refused_while_the_earlier_one_has_not_ended(role: PrefillRole) -> None:
    start(role)
    second = Ticket(TICKET.transfer_id, 2, TICKET.endpoint, 0, 5_000)
    (refused,) = role.start(OWNER, PROMPT, OUTPUT, PARAMS, second)
    assert isinstance(refused, AttemptEnded)
    assert isinstance(refused.outcome, TransferError)
    assert refused.epoch == 2
    assert role.owners == [OWNER]


def test_the_late_end_of_an_earlier_epochs_transfer_does_nothing_to_the_next_one(role: PrefillRole) -> None:
    start(role)
    role.on_engine(Ended(OWNER, Cancelled("while it was queued")))
    start(role, ticket=Ticket(TICKET.transfer_id, 2, TICKET.endpoint, 0, 5_000))
    assert role.send_ended(OWNER, 1, SILENT) == []
    assert role.send_ended(OWNER, 2, None) == [UnpinSequence(OWNER)]


def test_what_comes_for_nobody_is_left_out(role: PrefillRole) -> None:
    assert role.abort(OWNER) == []
    assert role.send_ended(OWNER, 1, None) == []
    assert role.on_engine(Ended(OWNER, None)) == []


def test_a_sequence_whose_kv_leaves_is_neither_received_nor_preempted(role: PrefillRole) -> None:
    start(role)
    for event in (Preempted(OWNER), Leased(OWNER, None)):  # type: ignore[arg-type]
        with pytest.raises(AssertionError):
            role.on_engine(event)
