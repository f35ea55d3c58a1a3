"""The block pool under any order of calls: blocks are conserved, nobody frees another's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.blocks import BlockPool, IntegrityError

OWNERS = st.sampled_from("abcdef")


class PoolMachine(RuleBasedStateMachine):
    """Against a model that is a dictionary of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(block_count=12, block_tokens=4)
        self.model: dict[str, list[int]] = {}

    @rule(owner=OWNERS, count=st.integers(0, 14))
    def lease(self, owner, count):
        free = self.pool.free_count
        blocks = self.pool.lease(owner, count)
        if count > free:
            assert blocks is None
        else:
            assert len(blocks) == len(set(blocks)) == count
            held = {block for blocks in self.model.values() for block in blocks}
            assert not held & set(blocks)
            self.model.setdefault(owner, []).extend(blocks)

    @rule(owner=OWNERS, other=OWNERS)
    def share(self, owner, other):
        blocks = self.model.get(other, [])
        if owner != other and blocks:
            self.pool.share(owner, blocks)
            self.model.setdefault(owner, []).extend(blocks)

    @rule(owner=OWNERS)
    def give_back(self, owner):
        mine = self.model.pop(owner, [])
        others = {block for blocks in self.model.values() for block in blocks}
        assert self.pool.give_back(owner) == len(set(mine) - others)

    @invariant()
    def adds_up(self):
        self.pool.check_integrity()
        held = {block for blocks in self.model.values() for block in blocks}
        counts = self.pool.counts()
        assert counts.leased == len(held)
        assert counts.total == 12


TestPool = PoolMachine.TestCase


def test_a_lease_that_does_not_fit_changes_nothing():
    pool = BlockPool(4, 16)
    assert pool.lease("a", 3) is not None
    assert pool.lease("b", 2) is None
    assert pool.leased_to("b") == ()
    assert pool.free_count == 1


def test_a_late_give_back_frees_nothing_of_the_next_owner():
    pool = BlockPool(2, 16)
    pool.lease("old", 2)
    pool.give_back("old")
    pool.lease("new", 2)
    assert pool.give_back("old") == 0
    assert pool.free_count == 0


def test_sharing_a_free_block_is_refused():
    pool = BlockPool(2, 16)
    with pytest.raises(IntegrityError, match="free"):
        pool.share("a", [0])


def test_integrity_check_sees_a_lost_block():
    pool = BlockPool(2, 16)
    pool.lease("a", 1)
    pool._leases.clear()
    with pytest.raises(IntegrityError, match="block 0"):
        pool.check_integrity()


@given(tokens=st.integers(0, 200), size=st.integers(1, 40))
def test_blocks_for_covers_tokens_with_none_to_spare(tokens, size):
    count = BlockPool(1, size).blocks_for(tokens)
    assert count * size >= tokens > (count - 1) * size or (tokens == 0 and count == 0)
