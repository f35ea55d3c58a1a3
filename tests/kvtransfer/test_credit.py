"""Credit: conservation whatever order the totals come in."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtransfer.credit import CreditGranter, CreditSpender
from pdserve.errors import InternalError, ProtocolError
from support.length import times


class CreditModel(RuleBasedStateMachine):
    """Grants and spent totals travel through two bags: they come late, doubled, out of order, or never."""

    @initialize(window=st.integers(1, 50), data=st.data())
    def set_up(self, window: int, data: st.DataObject) -> None:
        self.window = window
        self.frame = data.draw(st.integers(1, window))
        self.granter = CreditGranter(window, self.frame)
        self.spender = CreditSpender()
        self.grants = [self.granter.grant()]
        self.arrivals = [0]

    @rule(data=st.data())
    def a_grant_arrives(self, data: st.DataObject) -> None:
        self.spender.grant(data.draw(st.sampled_from(self.grants)))

    @rule(data=st.data())
    def a_frame_leaves(self, data: st.DataObject) -> None:
        if self.spender.available:
            byte_count = data.draw(st.integers(1, self.spender.available))
            self.arrivals.append(self.spender.spend(byte_count))

    @rule(data=st.data())
    def a_frame_arrives(self, data: st.DataObject) -> None:
        self.granter.consume(data.draw(st.sampled_from(self.arrivals)))
        if self.granter.due():
            self.grants.append(self.granter.grant())

    @invariant()
    def nothing_is_minted(self) -> None:
        if not hasattr(self, "granter"):
            return
        assert self.granter.consumed <= self.spender.spent <= self.spender.granted <= self.granter.granted
        assert self.granter.granted <= self.granter.consumed + self.window

    @invariant()
    def a_frame_never_waits_for_ever(self) -> None:
        """Once all has arrived, either a grant is on its way or one frame fits."""
        if hasattr(self, "granter") and self.granter.consumed == self.spender.spent:
            latest = max(self.grants) - self.spender.spent
            assert latest >= self.frame


TestCredit = CreditModel.TestCase
TestCredit.settings = settings(max_examples=times(60), stateful_step_count=40, deadline=None)


def test_doubled_and_older_totals_mint_nothing() -> None:
    spender = CreditSpender()
    for total in (100, 100, 40, 100):
        spender.grant(total)
    assert spender.available == 100


def test_spending_beyond_the_grant_is_a_bug_of_ours() -> None:
    spender = CreditSpender()
    spender.grant(10)
    with pytest.raises(InternalError):
        spender.spend(11)


def test_a_peer_that_spends_beyond_its_grant_is_refused() -> None:
    granter = CreditGranter(10, 5)
    granter.grant()
    with pytest.raises(ProtocolError):
        granter.consume(11)


def test_lost_bytes_do_not_shrink_the_window() -> None:
    granter = CreditGranter(100, 10)
    assert granter.grant() == 100
    granter.consume(90)  # of which only the last frame came
    assert granter.grant() == 190


@pytest.mark.parametrize(("window", "frame"), [(1, 1), (10, 10), (10, 9), (10, 5), (10, 1)])
def test_sender_that_waits_for_one_frames_credit_gets_it(window: int, frame: int) -> None:
    for spent in range(window + 1):
        granter = CreditGranter(window, frame)
        granter.grant()
        granter.consume(spent)
        assert granter.due() or granter.granted - spent >= frame


def test_window_smaller_than_a_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        CreditGranter(10, 11)
