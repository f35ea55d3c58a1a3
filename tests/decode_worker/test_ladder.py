"""The ladder as a state machine: whatever comes in whatever order, its promises hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from decode_worker.ladder import Ladder, LadderLimits, Rung


class LadderMachine(RuleBasedStateMachine):
    """The ladder of a worker beside what its docstring says in other words."""

    @initialize(budget=st.integers(0, 3), max_failures=st.integers(1, 3))
    def set_up(self, budget: int, max_failures: int) -> None:
        self.limits = LadderLimits(budget, max_failures, cooldown_s=10.0)
        self.ladder = Ladder(self.limits)
        self.now = 0.0
        self.failures: list[float] = []  # in a row since the last cooldown or success
        self.cools_until = 0.0

    @rule(taken=st.integers(0, 4))
    def a_sender_is_lost(self, taken: int) -> None:
        rung = self.ladder.next_rung(taken, self.now)
        allowed = taken < self.limits.budget and self.now >= self.cools_until
        assert rung is (Rung.ANOTHER_SENDER if allowed else Rung.LOCAL)

    @rule()
    def a_new_sender_fails(self) -> None:
        self.ladder.failed(self.now)
        self.failures.append(self.now)
        if len(self.failures) == self.limits.max_failures:
            self.failures.clear()
            self.cools_until = self.now + self.limits.cooldown_s

    @rule()
    def a_new_sender_delivers(self) -> None:
        self.ladder.succeeded()
        self.failures.clear()

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds


TestLadder = LadderMachine.TestCase
TestLadder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
