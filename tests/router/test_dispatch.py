"""The attempt loop, event by event: what a client is told is told once, and nothing a worker holds is forgotten."""

from dataclasses import replace

import pytest

from pdserve.config import RouterConfig
from pdserve.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    ResourceExhausted,
    TransferError,
    Unavailable,
    Uncomputable,
)
from pdserve.types import (
    Finish,
    FinishReason,
    Load,
    ModelLimits,
    Role,
    SampledToken,
    SamplingParams,
    Ticket,
    WorkerInfo,
)
from router.actions import (
    AbortAttempt,
    Accept,
    DropSender,
    End,
    PrefillLocally,
    Request,
    ResumeState,
    Retry,
    StartDecode,
    StartPrefill,
    StateChanged,
)
from router.dispatch import Dispatch
from router.membership import Membership
from router.policies import LeastLoaded
from router.suspicion import PROGRESS

TICKET = Ticket(b"t" * 16, 1, "ipc://d", 0, 5000)
PARAMS = SamplingParams(temperature=0.0, max_tokens=4)
CONFIG = RouterConfig(max_attempts=3, max_requests=4, ticket_timeout_ms=1000, placement_timeout_ms=2000)


class World:
    """A dispatch with a membership and a note of everything it did."""

    def __init__(self, *workers, config=CONFIG):
        self.membership = Membership(timeout_s=1.5)
        self.dispatch = Dispatch("router-1", self.membership, LeastLoaded(), config)
        self.states = []  # what clients were told of their outputs' resume states
        for name in workers:
            self.join(name)

    def join(self, name, fingerprint="same"):
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        info = WorkerInfo(
            name, name, role, 1, "h", "ipc://", fingerprint, "m", ModelLimits(100, 1000, 1000), eos_token_ids=(2,)
        )
        self.membership.join(info, 0.0)

    def lose(self, name):
        self.membership.leave(name)
        return self.without_states(self.dispatch.on_worker_lost(name, 0.0))

    def without_states(self, actions):
        self.states += [action.state for action in actions if isinstance(action, StateChanged)]
        return [action for action in actions if not isinstance(action, StateChanged)]

    def submit(self, request_id="r", params=PARAMS):
        return self.dispatch.submit(Request(request_id, (5, 6, 7), params), 0.0)

    def resume(self, state, *received_ids):
        """The request of a client that comes from another router."""
        return self.dispatch.submit(Request("r", (5, 6, 7), PARAMS, (received_ids,), resume_states=(state,)), 0.0)

    def submit_outputs(self, n):
        return self.dispatch.submit(Request("r", (5, 6, 7), PARAMS, received_ids=((),) * n), 0.0)

    def prefilling(self):
        """A request whose prefill worker is at work."""
        (start,) = self.submit()
        (prefill,) = self.dispatch.on_ticket(start.worker, start.owner, TICKET, 0.0)
        assert isinstance(prefill, StartPrefill)
        return start

    def decoding(self):
        """A request whose first token has come."""
        start = self.prefilling()
        assert self.tokens(start, 0, 10) == [Accept("r", 0, (SampledToken(10),))]
        return start

    def tokens(self, start, position, *ids):
        sampled = tuple(SampledToken(i) for i in ids)
        return self.without_states(self.dispatch.on_tokens(start.worker, start.owner, position, sampled, 0.0))

    def terminal(self, start, outcome, worker=None):
        """Of the decode worker, or of a prefill worker and the ticket it was given last."""
        worker = worker or start.worker
        entry = self.dispatch._requests.get((start.owner.request_id, start.owner.output))
        epoch = entry.attempt.epoch if worker.startswith("p") and entry and entry.attempt.prefill == worker else 0
        return self.dispatch.on_terminal(worker, start.owner, outcome, epoch, 0.0)


LENGTH = Finish(FinishReason.LENGTH)


def test_an_undisturbed_request_takes_one_attempt():
    world = World("p0", "d0")
    (start,) = world.submit()
    assert (start.worker, start.output_ids, start.local_prefill) == ("d0", (), False)
    (prefill,) = world.dispatch.on_ticket("d0", start.owner, TICKET, 0.0)
    assert (prefill.worker, prefill.ticket, prefill.owner) == ("p0", TICKET, start.owner)
    world.tokens(start, 0, 10)
    world.tokens(start, 1, 11, 12)
    world.tokens(start, 3, 13)
    assert world.terminal(start, LENGTH) == [End("r", 0, LENGTH, 1, True)]
    assert len(world.dispatch) == 0


def test_a_lost_decode_worker_leads_to_an_attempt_that_goes_on_from_the_accepted_tokens():
    world = World("p0", "d0", "d1")
    start = world.decoding()
    world.tokens(start, 1, 11)
    retry, again = world.lose("d0")
    assert isinstance(retry, Retry)
    assert again == replace(start, worker="d1", owner=replace(start.owner, attempt=2), output_ids=(10, 11))
    world.dispatch.on_ticket("d1", again.owner, TICKET, 0.0)
    assert world.tokens(again, 2, 12) == [Accept("r", 0, (SampledToken(12),))]


def test_what_an_old_attempt_still_says_is_fenced_off():
    world = World("p0", "d0", "d1")
    start = world.decoding()
    world.lose("d0")
    assert world.tokens(start, 1, 99) == []
    assert world.terminal(start, LENGTH) == []
    assert world.terminal(start, InternalError("late")) == []
    assert world.dispatch.on_ticket("d0", start.owner, TICKET, 0.0) == []


def test_a_request_id_that_comes_again_gets_another_owner():
    world = World("d1", "p1")
    first = world.prefilling()
    world.dispatch.cancel("r")
    again = world.prefilling()
    assert again.owner != first.owner, "a late word or a late abort of the first would hit the second"
    assert world.dispatch.on_terminal("d1", first.owner, Cancelled("the first was aborted"), 0, 0.0) == []


def test_another_worker_cannot_speak_for_the_attempt():
    world = World("p0", "d0", "d1")
    start = world.decoding()
    assert world.dispatch.on_tokens("d1", start.owner, 1, (SampledToken(99),), 0.0) == []
    assert world.dispatch.on_tokens("p0", start.owner, 1, (SampledToken(99),), 0.0) == []


def test_a_repeated_token_fails_the_attempt_instead_of_reaching_the_client():
    world = World("p0", "d0", "d1")
    start = world.decoding()
    actions = world.tokens(start, 0, 10)
    assert [type(action) for action in actions] == [AbortAttempt, Retry, StartDecode]
    assert actions[0].worker == "d0"


def test_a_prefill_worker_lost_before_the_ticket_is_not_chosen():
    world = World("p0", "p1", "d0")
    (start,) = world.submit()
    assert world.lose("p0") == []
    (prefill,) = world.dispatch.on_ticket("d0", start.owner, TICKET, 0.0)
    assert prefill.worker == "p1"


@pytest.mark.parametrize("end", ["lost", "failed"])
def test_a_prefill_worker_that_ends_early_is_replaced_within_the_attempt(end):
    world = World("p0", "p1", "d0")
    start = world.prefilling()
    if end == "lost":
        (lost,) = world.lose("p0")
    else:
        (lost,) = world.terminal(start, InternalError("a step failed"), worker="p0")
    assert (lost.worker, lost.owner, lost.epoch) == ("d0", start.owner, 1)
    fallback, prefill = world.dispatch.on_ticket("d0", start.owner, replace(TICKET, epoch=2), 0.0)
    assert fallback.rung == "another sender"
    assert (prefill.worker, prefill.owner, prefill.ticket.epoch) == ("p1", start.owner, 2)
    assert world.tokens(start, 0, 10) == [Accept("r", 0, (SampledToken(10),))]
    (ended,) = world.terminal(start, LENGTH)
    assert ended.attempts == 1


def test_a_ticket_of_an_old_epoch_starts_nobody():
    world = World("p0", "p1", "d0")
    start = world.prefilling()
    world.lose("p0")
    world.dispatch.on_ticket("d0", start.owner, replace(TICKET, epoch=2), 0.0)
    assert world.dispatch.on_ticket("d0", start.owner, replace(TICKET, epoch=2), 0.0) == []
    assert world.dispatch.on_ticket("d0", start.owner, TICKET, 0.0) == []


def test_without_another_prefill_worker_decode_prefills_the_rest():
    world = World("p0", "d0")
    start = world.prefilling()
    world.lose("p0")
    ticket = replace(TICKET, epoch=2)
    assert world.dispatch.on_ticket("d0", start.owner, ticket, 0.0) == [PrefillLocally("d0", start.owner)]
    (fallback,) = world.dispatch.on_local_prefill("d0", start.owner, "no prefill worker is left")
    assert fallback.rung == "local"
    assert world.tokens(start, 0, 10) == [Accept("r", 0, (SampledToken(10),))]


def test_with_no_prefill_worker_from_the_start_no_ticket_is_asked_for():
    world = World("d0")
    (start,) = world.submit()
    assert start.local_prefill
    assert world.dispatch.on_ticket("d0", start.owner, replace(TICKET, epoch=0), 0.0) == []
    assert world.tokens(start, 0, 10) == [Accept("r", 0, (SampledToken(10),))]


def test_a_decode_worker_that_does_not_answer_the_loss_of_its_sender_fails_the_attempt():
    world = World("p0", "p1", "d0", "d1")
    world.prefilling()
    world.lose("p0")
    abort, _, again = world.dispatch.tick(1.0)
    assert (abort.worker, again.worker) == ("d0", "d1")


def test_the_late_end_of_an_earlier_epoch_hides_no_crash_of_the_same_worker():
    world = World("p0", "d0", "d1")
    start = world.prefilling()
    world.dispatch.on_ticket("d0", start.owner, replace(TICKET, epoch=2), 0.0)
    failed = InternalError("a step failed")
    assert world.dispatch.on_terminal("p0", start.owner, failed, TICKET.epoch, 0.0) == []
    world.states.clear()
    assert DropSender in [type(action) for action in world.lose("p0")]
    assert [state.crashes for state in world.states] == [1]


def test_a_prefill_error_that_no_other_worker_would_cure_ends_the_request():
    world = World("p0", "p1", "d0")
    start = world.prefilling()
    abort, end = world.terminal(start, InvalidArgument("prompt", "too long"), worker="p0")
    assert abort == AbortAttempt("d0", start.owner)
    assert isinstance(end.outcome, InvalidArgument)


def test_a_prefill_worker_lost_after_the_first_token_disturbs_nothing():
    world = World("p0", "d0")
    start = world.decoding()
    assert world.lose("p0") == []
    assert world.tokens(start, 1, 11) == [Accept("r", 0, (SampledToken(11),))]


def test_another_fingerprint_of_a_replacing_prefill_worker_is_announced_as_inexact():
    world = World("p0", "d0")
    world.join("p1", "other")
    start = world.prefilling()
    world.lose("p0")
    world.dispatch.on_ticket("d0", start.owner, replace(TICKET, epoch=2), 0.0)
    (end,) = world.terminal(start, LENGTH)[-1:]
    assert end.exact is False


def test_a_prefill_error_after_the_first_token_disturbs_nothing():
    world = World("p0", "d0")
    start = world.decoding()
    assert world.terminal(start, TransferError("acknowledgement lost"), worker="p0") == []


@pytest.mark.parametrize(
    ("params", "accepted", "reason"),
    [(PARAMS, (10, 11, 12, 13), FinishReason.LENGTH), (PARAMS, (10, 2), FinishReason.STOP)],
)
def test_a_terminal_lost_with_its_worker_is_made_up_for(params, accepted, reason):
    world = World("p0", "d0", "d1")
    start = world.decoding()
    world.tokens(start, 1, *accepted[1:])
    (end,) = world.lose("d0")
    assert end.outcome.reason is reason
    assert end.attempts == 1


def test_with_no_worker_it_waits_for_one_and_then_goes_on():
    world = World("p0", "d0")
    start = world.decoding()
    world.lose("p0")
    assert [type(action) for action in world.lose("d0")] == [Retry]
    world.join("d9")
    (again,) = world.dispatch.on_worker_joined(1.0)
    assert (again.worker, again.output_ids) == ("d9", (10,))
    assert again.owner.attempt == start.owner.attempt + 1


def test_with_no_worker_it_ends_unavailable_within_the_deadline():
    world = World()
    assert world.submit() == []
    assert world.dispatch.tick(1.9) == []
    (end,) = world.dispatch.tick(2.0)
    assert isinstance(end.outcome, Unavailable)
    assert len(world.dispatch) == 0


def test_with_no_decode_worker_a_prefill_worker_takes_both_roles():
    world = World("p0", "p1", "d0")
    world.decoding()
    _, again = world.lose("d0")
    assert (again.worker, again.local_prefill, again.output_ids) == ("p0", True, (10,))
    world.join("d1")
    (start,) = world.submit("next")
    assert (start.worker, start.local_prefill) == ("d1", False)


def test_a_ticket_that_does_not_come_fails_the_attempt():
    world = World("p0", "d0", "d1")
    (start,) = world.submit()
    abort, retry, again = world.dispatch.tick(1.0)
    assert abort == AbortAttempt("d0", start.owner)
    assert again.worker == "d1"
    assert retry.owner == start.owner


def test_it_gives_up_after_the_last_attempt():
    world = World("p0", "d0", "d1", "d2", "d3")
    world.submit()
    world.dispatch.tick(1.0)
    world.dispatch.tick(2.0)
    *_, end = world.dispatch.tick(3.0)
    assert isinstance(end.outcome, Unavailable)
    assert end.attempts == 3


def test_attempts_that_bring_tokens_are_not_counted():
    world = World("d0", "d1")
    (start,) = world.submit(params=replace(PARAMS, max_tokens=100))
    for position in range(20):
        world.tokens(start, position, 10)
        _, retry, start = [None, *world.terminal(start, InternalError("a step failed"))]
        assert isinstance(retry, Retry)
    assert start.owner.attempt == 21


def test_a_lost_workers_requests_are_placed_again_a_few_at_a_time_the_oldest_first():
    world = World("p0", "d0", config=replace(CONFIG, max_requests=8, max_recoveries=2))
    for name in "abcd":
        (start,) = world.submit(name)
        world.dispatch.on_ticket("d0", start.owner, TICKET, 0.0)
        world.tokens(start, 0, 10)
    world.join("d1")
    started = [action for action in world.lose("d0") if isinstance(action, StartDecode)]
    assert [start.request.request_id for start in started] == ["a", "b"]
    world.dispatch.on_ticket("d1", started[1].owner, TICKET, 0.0)
    _, third = world.tokens(started[1], 1, 11)
    assert third.request.request_id == "c"
    *_, fourth = world.terminal(started[0], InvalidArgument("prompt", "strange"))
    assert fourth.request.request_id == "d"


def test_a_request_that_crashes_workers_is_isolated_then_ended_and_refused():
    world = World("p0", "d0", "d1", "d2", "d3")
    world.submit()
    *_, second = world.lose("d0")
    assert not second.local_prefill
    *_, third = world.lose("d1")
    assert third.local_prefill
    (innocent,) = world.submit("innocent", replace(PARAMS, seed=1)) if third.worker != "d2" else world.submit("other")
    assert innocent.worker == "d3"
    *_, end = world.lose(third.worker)
    assert isinstance(end.outcome, InternalError)
    with pytest.raises(FailedPrecondition, match="crashed several workers"):
        world.submit("again")
    world.dispatch.submit(Request("again", (5, 6, 7), PARAMS), 61.0)


def test_two_suspected_requests_never_meet_so_that_the_innocent_one_is_not_convicted_with_the_other():
    world = World("d0")
    for name in ("poison", "innocent"):
        world.submit(name)
    world.join("d1")
    world.lose("d0")
    world.join("d2")
    started = [action for action in world.lose("d1") if isinstance(action, StartDecode)]
    assert [start.request.request_id for start in started] == ["poison"]
    assert world.dispatch.tick(60.0) == []
    *_, end = world.lose("d2")
    assert (end.request_id, type(end.outcome)) == ("poison", InternalError)
    world.join("d3")
    (start,) = world.dispatch.on_worker_joined(0.0)
    assert (start.request.request_id, start.local_prefill) == ("innocent", True)


def test_a_crash_long_after_the_last_one_is_another_ones_fault():
    world = World("d0", "d1", "d2", "d3")
    (start,) = world.submit(params=replace(PARAMS, max_tokens=1000))
    for crash in range(3):
        world.tokens(start, crash * PROGRESS, *range(PROGRESS))
        *_, start = world.lose(start.worker)
    assert not start.local_prefill or start.worker == "d3"
    assert isinstance(start, StartDecode)


def test_a_worker_that_keeps_failing_is_the_last_choice_until_a_trial_succeeds():
    config = replace(CONFIG, max_requests=100, breaker_failures=2, breaker_cooldown_ms=1000, max_attempts=1)
    world = World("d0", "d1", config=config)
    for number in range(2):
        (start,) = world.submit(f"failing-{number}")
        assert start.worker == "d0"
        world.terminal(start, InternalError("a step failed"))
    for number in range(3):
        assert world.submit(f"elsewhere-{number}")[0].worker == "d1"
    trial, *_ = world.dispatch.submit(Request("trial", (1,), PARAMS), 1.0)
    assert trial.worker == "d0"
    assert world.dispatch.submit(Request("beside", (1,), PARAMS), 1.0)[0].worker == "d1"
    world.tokens(trial, 0, 10)
    assert world.submit("after")[0].worker == "d0"


@pytest.mark.parametrize("error", [InvalidArgument("prompt", "strange"), Uncomputable("not finite")])
def test_a_requests_own_error_never_trips_a_breaker(error):
    world = World("d0", "d1", config=replace(CONFIG, max_requests=100, breaker_failures=1))
    for number in range(5):
        (start,) = world.submit(f"bad-{number}")
        assert start.worker == "d0"
        world.terminal(start, error)


def test_a_draining_worker_gets_nothing_new():
    world = World("p0", "p1", "d0", "d1")
    for name in ("p0", "d0"):
        world.membership.renew(name, Load(draining=True), 0.0)
    (start,) = world.submit()
    assert start.worker == "d1"
    (prefill,) = world.dispatch.on_ticket("d1", start.owner, TICKET, 0.0)
    assert prefill.worker == "p1"


FULL = ResourceExhausted("256 requests are queued")


def test_a_request_that_a_full_worker_refuses_goes_to_another_one():
    world = World("d0", "d1")
    (start,) = world.submit()
    retry, again = world.terminal(start, FULL)
    assert isinstance(retry, Retry)
    assert again.worker != start.worker


def test_a_request_that_every_worker_refuses_waits_for_room_and_ends_when_none_comes():
    world = World("d0", config=replace(CONFIG, max_attempts=1))
    (start,) = world.submit()
    for now in (0.0, 0.3, 0.6, 1.6):
        (retry,) = world.dispatch.on_terminal("d0", start.owner, FULL, 0, now)
        assert isinstance(retry, Retry)
        assert world.dispatch.tick(now + 0.2) == []
        (start,) = world.dispatch.tick(now + 0.25)
    world.dispatch.on_terminal("d0", start.owner, FULL, 0, 1.9)
    assert world.dispatch.tick(1.99) == []
    (end,) = world.dispatch.tick(2.0)
    assert isinstance(end.outcome, ResourceExhausted)
    assert "every worker is full (waited 2 s)" in str(end.outcome)


def test_a_stream_whose_worker_is_lost_waits_for_as_long_as_the_others_are_full():
    world = World("d0")
    (start,) = world.submit()
    world.tokens(start, 0, 10)
    world.join("d1")
    _, again = world.lose("d0")
    now = 0.0
    while now < 60.0:
        (retry,) = world.dispatch.on_terminal("d1", again.owner, FULL, 0, now)
        assert isinstance(retry, Retry)
        now += 0.25
        (again,) = world.dispatch.tick(now)
    assert again.output_ids == (10,)
    assert world.tokens(again, 1, 11) == [Accept("r", 0, (SampledToken(11),))]
    assert world.terminal(again, LENGTH) == [End("r", 0, LENGTH, 2, True)]


def test_a_full_worker_is_asked_for_one_more_at_a_time_when_a_request_of_its_has_ended():
    world = World("d0")
    first = world.submit("first")[0]
    others = [world.submit(str(number))[0] for number in range(3)]
    for start in others:
        world.terminal(start, FULL)
    (end, again) = world.terminal(first, LENGTH)
    assert isinstance(end, End)
    assert again.owner.request_id == "0"
    assert world.dispatch.tick(0.1) == []


def test_a_worker_that_gives_a_request_up_does_not_cancel_it():
    """It has lost its session with this router, and says so through the other side of the transfer."""
    world = World("p0", "d0", "d1")
    start = world.prefilling()
    gone = Cancelled("its session is broken")
    assert [type(action) for action in world.terminal(start, gone, worker="p0")] == [DropSender]
    assert [type(action) for action in world.terminal(start, gone)] == [Retry, StartDecode]


@pytest.mark.parametrize("error", [InvalidArgument("prompt", "strange"), Uncomputable("not finite")])
def test_a_requests_own_error_is_not_tried_again(error):
    world = World("p0", "d0", "d1")
    start = world.prefilling()
    abort, end = world.terminal(start, error)
    assert abort == AbortAttempt("p0", start.owner)
    assert end.outcome is error


@pytest.mark.parametrize("phase", ["placing", "ticket", "prefill", "decode"])
def test_a_cancelled_request_leaves_nothing_in_any_phase(phase):
    world = World() if phase == "placing" else World("p0", "d0")
    actions = world.submit()
    if phase in ("prefill", "decode"):
        world.dispatch.on_ticket("d0", actions[0].owner, TICKET, 0.0)
    if phase == "decode":
        world.tokens(actions[0], 0, 10)
    *aborts, end = world.dispatch.cancel("r")
    holding = {"placing": set(), "ticket": {"d0"}, "prefill": {"d0", "p0"}, "decode": {"d0"}}[phase]
    assert {abort.worker for abort in aborts} == holding
    assert isinstance(end.outcome, Cancelled)
    assert world.dispatch.cancel("r") == []


def test_a_stop_string_ends_the_request_and_the_workers_part():
    world = World("p0", "d0")
    start = world.decoding()
    finish = Finish(FinishReason.STOP, stop="\n")
    assert world.dispatch.finish("r", 0, finish) == [AbortAttempt("d0", start.owner), End("r", 0, finish, 1, True)]


def test_a_request_id_in_flight_is_refused_and_the_first_goes_on():
    world = World("p0", "d0")
    start = world.decoding()
    with pytest.raises(AlreadyExists, match="'r' is in flight"):
        world.submit()
    assert world.tokens(start, 1, 11) == [Accept("r", 0, (SampledToken(11),))]


def test_the_door_closes_when_the_router_is_full():
    world = World("p0", "d0")
    for number in range(4):
        world.submit(str(number))
    with pytest.raises(ResourceExhausted, match="4 outputs"):
        world.submit("one more")
    assert world.resume(ResumeState(), 10), "a lost router's streams find room"


def test_requests_spread_over_decode_workers():
    world = World("p0", "d0", "d1")
    workers = [world.submit(str(number))[0].worker for number in range(4)]
    assert sorted(workers) == ["d0", "d0", "d1", "d1"]


def test_another_fingerprint_is_taken_last_and_announced_as_inexact():
    world = World("p0")
    world.join("d0", "same")
    world.join("d1", "other")
    world.join("d2", "same")
    start = world.decoding()
    assert start.worker == "d0"
    *_, again = world.lose("d0")
    assert again.worker == "d2"
    *_, last = world.lose("d2")
    assert last.worker == "d1"
    world.dispatch.on_ticket("d1", last.owner, TICKET, 0.0)
    (end,) = world.terminal(last, LENGTH)[-1:]
    assert end.exact is False


def test_the_outputs_of_a_request_share_the_first_ones_prompt_wherever_it_is():
    world = World("p0", "d0", "d1")
    first, *others = world.submit_outputs(3)
    assert (first.local_prefill, first.share) == (False, None)
    assert [(start.worker, start.share, start.owner.output) for start in others] == [
        (first.worker, first.owner, 1),
        (first.worker, first.owner, 2),
    ]
    starts = [action for action in world.lose(first.worker) if isinstance(action, StartDecode)]
    again = starts[0]
    assert again.share is None
    assert again.worker != first.worker
    assert {(start.worker, start.share) for start in starts[1:]} == {(again.worker, again.owner)}


def test_each_output_ends_once_and_the_id_is_free_when_all_have():
    world = World("p0", "d0")
    first, second = world.submit_outputs(2)
    world.dispatch.on_ticket("d0", first.owner, TICKET, 0.0)
    assert world.tokens(second, 0, 20) == [Accept("r", 1, (SampledToken(20),))]
    assert world.terminal(first, LENGTH)[-1] == End("r", 0, LENGTH, 1, True)
    with pytest.raises(AlreadyExists):
        world.submit()
    assert [type(action) for action in world.dispatch.finish("r", 1, LENGTH)] == [AbortAttempt, End]
    assert len(world.dispatch) == 0
    world.submit()


def test_cancelling_a_request_ends_all_its_outputs():
    world = World("p0", "d0")
    world.submit_outputs(3)
    ends = [action for action in world.dispatch.cancel("r") if isinstance(action, End)]
    assert [end.output for end in ends] == [0, 1, 2]


def test_outputs_that_a_client_has_whole_end_at_once_and_the_others_go_on():
    world = World("p0", "d0")
    request = Request("r", (5, 6, 7), PARAMS, received_ids=((1, 1, 1, 1), (1,), ()))
    end, second, third = world.dispatch.submit(request, 0.0)
    assert (end.output, end.outcome) == (0, LENGTH)
    assert (second.output_ids, third.output_ids, third.share) == ((1,), (), second.owner)


# What one router knows of an output and the next one has to.


def test_the_client_is_told_how_its_output_stands_before_its_first_token_and_at_each_crash():
    world = World("p0", "d0", "d1")
    start = world.decoding()
    assert world.states == [ResumeState("same", "same")]
    world.tokens(start, 1, 11)
    world.lose("d0")
    assert world.states[1:] == [ResumeState("same", "same", crashes=1, crashed_at=2)]


def test_a_resumed_request_is_stopped_after_three_crashes_in_all():
    world = World("d0", "d1")
    (start,) = world.resume(ResumeState("same", "same", crashes=2, crashed_at=1), 10)
    assert start.local_prefill, "it is alone from the start"
    *_, end = world.lose(start.worker)
    assert isinstance(end.outcome, InternalError)
    with pytest.raises(FailedPrecondition, match="crashed several workers"):
        world.submit("again")


def test_a_resumed_request_that_went_on_after_its_crashes_is_no_suspect():
    world = World("p0", "d0")
    received = range(PROGRESS)
    params = replace(PARAMS, max_tokens=100)
    state = ResumeState("same", "same", crashes=2, crashed_at=0)
    request = Request("r", (5, 6, 7), params, (tuple(received),), resume_states=(state,))
    (start,) = world.dispatch.submit(request, 0.0)
    assert not start.local_prefill


@pytest.mark.parametrize(
    ("state", "exact"),
    [
        (ResumeState("same", "same"), True),
        (ResumeState("other", "same"), False),
        (ResumeState("same", "other"), False),
        (ResumeState("same", "same", exact=False), False),
        (ResumeState(), True),
    ],
)
def test_a_resumed_stream_is_exact_only_if_all_of_it_was(state, exact):
    world = World("p0", "d0")
    (start,) = world.resume(state, 10)
    world.dispatch.on_ticket("d0", start.owner, TICKET, 0.0)
    world.tokens(start, 1, 11)
    assert world.terminal(start, LENGTH)[-1].exact is exact


def test_a_resumed_stream_that_lacks_only_its_end_is_as_exact_as_it_was():
    world = World("p0", "d0")
    (end,) = world.resume(ResumeState("other", "other"), 10, 11, 12, 13)
    assert (end.outcome, end.exact) == (LENGTH, True)


def test_a_resumed_stream_goes_on_with_the_fingerprints_it_had():
    world = World()
    for name in ("p0", "d0"):
        world.join(name, "this")
    for name in ("p1", "d1"):
        world.join(name, "that")
    (start,) = world.resume(ResumeState("that", "that"), 10)
    assert start.worker == "d1"
    (prefill,) = world.dispatch.on_ticket("d1", start.owner, TICKET, 0.0)
    assert prefill.worker == "p1"


def test_a_delivered_prompt_that_decode_computes_again_under_another_fingerprint_is_announced_as_inexact():
    world = World()
    world.join("p0", "this")
    world.join("d0", "that")
    start = world.decoding()
    world.without_states(world.dispatch.on_local_prefill("d0", start.owner, "preempted"))
    assert [state.exact for state in world.states] == [True, False]
    world.tokens(start, 1, 11, 12, 13)
    assert world.terminal(start, LENGTH)[-1].exact is False


@pytest.mark.parametrize(("of_prefill", "exact"), [("same", True), ("other", False)])
def test_an_output_that_shares_a_prompt_of_another_fingerprint_is_announced_as_inexact(of_prefill, exact):
    world = World()
    world.join("p0", of_prefill)
    world.join("d0", "same")
    first, second = world.submit_outputs(2)
    world.dispatch.on_ticket("d0", first.owner, TICKET, 0.0)
    for start, expected in ((first, True), (second, exact)):
        world.tokens(start, 0, 10)
        assert world.terminal(start, LENGTH)[-1].exact is expected
