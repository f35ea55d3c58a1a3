"""The scheduler and the pool together, without a model: whatever comes in whatever order, everything ends, every step
keeps to its budget, and no block is held by a sequence that is not there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import KVSource, Phase, Sequence
from pdserve.types import Owner, SamplingParams
from support.length import times


class Outlet:
    def opened(self, kv): ...

    def layer_ready(self, layer, start, stop): ...


def sequence(number, prompt, output, **kwargs):
    owner = Owner("t", str(number), "router", 1)
    return Sequence(owner, [1] * prompt, [], SamplingParams(max_tokens=output), **kwargs)


def run_plan(scheduler, pool, plan):
    """What the engine does after a step, with every sampled token being 2."""
    for slice_ in plan.slices:
        assert slice_.sequence.phase is Phase.RUNNING
        assert slice_.start == slice_.sequence.computed
        assert slice_.samples == (slice_.stop == slice_.sequence.known)
        assert len(slice_.sequence.blocks) >= pool.blocks_for(slice_.stop)
        slice_.sequence.computed = slice_.stop
    for slice_ in plan.slices:
        if slice_.samples and slice_.sequence.accept(2, ()):
            scheduler.remove(slice_.sequence)
            if not slice_.sequence.pinned:
                pool.give_back(slice_.sequence.owner)
    pool.check_integrity()


@settings(max_examples=times(150), deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.booleans()), min_size=1, max_size=8),
    budget=st.integers(1, 70),
    block_tokens=st.integers(1, 9),
    spare_blocks=st.integers(0, 12),
    arrivals=st.lists(st.integers(0, 10), min_size=8, max_size=8),
)
def test_everything_ends_within_the_budget_and_all_blocks_come_back(jobs, budget, block_tokens, spare_blocks, arrivals):
    longest = max(prompt + output for prompt, output, _ in jobs)
    pool = BlockPool(-(-longest // block_tokens) + spare_blocks, block_tokens)
    scheduler = Scheduler(pool, budget, max_running=6)
    waiting = [
        sequence(i, prompt, output, source=KVSource.DELIVERED if delivered else KVSource.COMPUTED)
        for i, (prompt, output, delivered) in enumerate(jobs)
    ]
    everything = list(waiting)
    receiving = []
    for step in range(6000):
        while waiting and step >= arrivals[len(everything) - len(waiting)]:
            scheduler.add(waiting.pop(0))
        for arrived in receiving:
            arrived.pinned = False
            scheduler.received(arrived, arrived.known)
            if arrived.accept(2, ()):
                scheduler.remove(arrived)
                pool.give_back(arrived.owner)
        plan = scheduler.plan()
        receiving = [leased for leased in plan.leased if leased.phase is Phase.RECEIVING]
        assert plan.token_count <= budget
        run_plan(scheduler, pool, plan)
        if not waiting and not receiving and not scheduler.has_work():
            break
    assert all(each.phase is Phase.ENDED for each in everything)
    assert all(each.output_count == each.params.max_tokens for each in everything)
    assert pool.free_count == pool.block_count


def test_decoding_sequences_go_before_prefill_chunks():
    pool = BlockPool(64, 4)
    scheduler = Scheduler(pool, max_step_tokens=8, max_running=8)
    old = sequence(1, 3, 10)
    scheduler.add(old)
    run_plan(scheduler, pool, scheduler.plan())
    scheduler.add(sequence(2, 30, 10))
    counts = []
    for _ in range(5):
        plan = scheduler.plan()
        counts.append([(slice_.sequence.owner.request_id, slice_.count) for slice_ in plan.slices])
        run_plan(scheduler, pool, plan)
    assert counts[:4] == [[("1", 1), ("2", 7)]] * 4
    assert counts[4] == [("1", 1), ("2", 2)]


def test_the_youngest_is_preempted_and_computed_again():
    pool = BlockPool(6, 4)
    scheduler = Scheduler(pool, max_step_tokens=64, max_running=4)
    old, young = sequence(1, 8, 14), sequence(2, 8, 6)
    scheduler.add(old)
    run_plan(scheduler, pool, scheduler.plan())
    scheduler.add(young)
    told = []
    while old.phase is Phase.RUNNING:
        plan = scheduler.plan()
        told += plan.preempted
        run_plan(scheduler, pool, plan)
        assert bool(told) == (young.phase is Phase.WAITING and young.computed == 0 and not young.blocks)
    assert told == [young]
    while young.phase is not Phase.ENDED:
        run_plan(scheduler, pool, scheduler.plan())
    assert young.output_count == 6


def test_a_pinned_sequence_is_never_preempted():
    pool = BlockPool(4, 4)
    scheduler = Scheduler(pool, max_step_tokens=2, max_running=4)
    growing = sequence(1, 2, 100)
    scheduler.add(growing)
    run_plan(scheduler, pool, scheduler.plan())
    sending = sequence(2, 8, 5, outlet=Outlet())
    scheduler.add(sending)
    stalled = 0
    for _ in range(12):
        plan = scheduler.plan()
        stalled += growing not in [slice_.sequence for slice_ in plan.slices]
        run_plan(scheduler, pool, plan)
    assert stalled, "the pool never ran out: the test shows nothing"
    assert sending.pinned
    assert pool.leased_to(sending.owner) == tuple(sending.blocks)


@pytest.mark.parametrize("source", list(KVSource))
def test_sequences_wait_for_blocks_in_the_order_they_came(source):
    pool = BlockPool(4, 4)
    scheduler = Scheduler(pool, max_step_tokens=64, max_running=8)
    for number, prompt in ((1, 12), (2, 16), (3, 4)):
        scheduler.add(sequence(number, prompt, 2, source=source))
    assert [each.owner.request_id for each in scheduler.plan().leased] == ["1"]
    assert scheduler.waiting_count == 2
