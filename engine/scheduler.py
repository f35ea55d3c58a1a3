"""One scheduler for chunked prefill and continuous batching. Pure: integers and queues, no tensor, clock or thread.

A step has a budget of tokens. First every decoding sequence gets its one token, oldest first; then the oldest
prefills get what is left, in chunks; then waiting sequences are admitted in the order of their arrival, as long as
their blocks can be leased. A decoding sequence that finds no block preempts the youngest running one, whose KV is
computed again later: the contract of the kernels makes the result the same bits.

Ranges of a sequence's tokens:
    [0, computed)            KV is in the cache
    [computed, known)        pending: computed by the next slices
    [known, ...)             not sampled yet
"""

from __future__ import annotations

from collections import deque

from engine.blocks import BlockPool
from engine.plan import Slice, StepPlan
from engine.sequence import KVSource, Phase, Sequence


class Scheduler:
    """Decides what each step computes and which sequences hold blocks."""

    def __init__(self, pool: BlockPool, max_step_tokens: int, max_running: int) -> None:
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._waiting: deque[Sequence] = deque()
        self._receiving: list[Sequence] = []
        self._running: list[Sequence] = []  # oldest first
        self._preempted: list[Sequence] = []  # while planning

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def receiving_count(self) -> int:
        return len(self._receiving)

    @property
    def running_count(self) -> int:
        return len(self._running)

    def has_work(self) -> bool:
        """Whether a plan made now could be other than empty."""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others."""
        self._waiting.append(sequence)

    def fork(self, leader: Sequence, follower: Sequence) -> bool:
        """Start a sequence on the prompt's KV of another one; False if there is no room, and nothing has changed.

        Full blocks are shared. A partly filled one is the follower's own, and the caller copies what is in it. The
        prompt's last token is left to be computed again, because its logits are wanted.
        """
        full = (leader.prompt_count - 1) // self._pool.block_tokens
        needed = self._pool.blocks_for(follower.known) - full
        if len(self._running) + len(self._receiving) >= self._max_running or needed > self._pool.free_count:
            return False
        shared = leader.blocks[:full]
        self._pool.share(follower.owner, shared)
        own = self._pool.lease(follower.owner, needed)
        assert own is not None
        follower.blocks = [*shared, *own]
        follower.computed = leader.prompt_count - 1
        follower.phase = Phase.RUNNING
        self._running.append(follower)
        return True

    def received(self, sequence: Sequence, computed: int) -> None:
        """The KV of the first `computed` tokens is there and no more will come: it runs from the next step on."""
        self._receiving.remove(sequence)
        sequence.computed = computed
        sequence.phase = Phase.RUNNING
        self._running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its phase. Its lease is the caller's business."""
        for queue in (self._waiting, self._receiving, self._running):
            if sequence in queue:
                queue.remove(sequence)
        sequence.phase = Phase.ENDED

    def plan(self) -> StepPlan:
        """The next step. Leases blocks for it; running sequences may be preempted."""
        slices: list[Slice] = []
        budget = self._max_step_tokens
        for sequence in [s for s in self._running if s.pending == 1]:
            if budget == 0:
                break
            if sequence.phase is Phase.RUNNING and self._grow(sequence):
                slices.append(_next_slice(sequence, budget))
                budget -= 1
        # A sequence planned early in this loop can have been preempted by an older one after it.
        slices = [slice_ for slice_ in slices if slice_.sequence.phase is Phase.RUNNING]
        for sequence in self._running:
            if budget > 0 and sequence.pending > 1:
                slices.append(_next_slice(sequence, budget))
                budget -= slices[-1].count
        leased = self._admit()
        for sequence in leased:
            if budget > 0 and sequence.phase is Phase.RUNNING:
                slices.append(_next_slice(sequence, budget))
                budget -= slices[-1].count
        preempted, self._preempted = self._preempted, []
        return StepPlan(tuple(slices), tuple(leased), tuple(preempted))

    def _admit(self) -> list[Sequence]:
        """Lease blocks to waiting sequences, first come first served, and start them."""
        admitted: list[Sequence] = []
        while self._waiting and len(self._running) + len(self._receiving) < self._max_running:
            sequence = self._waiting[0]
            needed = self._pool.blocks_for(sequence.known)
            # One block in reserve for each sequence that will grow, so that admission does not preempt.
            reserve = len(self._running) + len(self._receiving)
            if needed + reserve > self._pool.free_count:
                break
            blocks = self._pool.lease(sequence.owner, needed)
            assert blocks is not None
            self._waiting.popleft()
            sequence.blocks = blocks
            self._start(sequence)
            admitted.append(sequence)
        return admitted

    def _start(self, sequence: Sequence) -> None:
        sequence.pinned = sequence.outlet is not None or sequence.source is KVSource.DELIVERED
        if sequence.source is KVSource.DELIVERED:
            sequence.phase = Phase.RECEIVING
            self._receiving.append(sequence)
        else:
            sequence.phase = Phase.RUNNING
            self._running.append(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure a decoding sequence has a block for its pending token; False if it must sit out this step."""
        while len(sequence.blocks) < self._pool.blocks_for(sequence.known):
            blocks = self._pool.lease(sequence.owner, 1)
            if blocks is not None:
                sequence.blocks.extend(blocks)
            elif not self._preempt_youngest() or sequence.phase is not Phase.RUNNING:
                return False
        return True

    def _preempt_youngest(self) -> bool:
        """Take the blocks of the youngest running sequence that nobody outside reads; it waits at the front."""
        victim = next((s for s in reversed(self._running) if not s.pinned), None)
        if victim is None:
            return False
        self._running.remove(victim)
        self._pool.give_back(victim.owner)
        victim.blocks = []
        victim.computed = 0
        victim.source = KVSource.COMPUTED
        victim.phase = Phase.WAITING
        self._waiting.appendleft(victim)
        self._preempted.append(victim)
        return True


def _next_slice(sequence: Sequence, budget: int) -> Slice:
    count = min(sequence.pending, budget)
    return Slice(sequence, sequence.computed, count, samples=count == sequence.pending)
