"""The engine: the blocks of one executor, and the loop of steps. A plain object that runs without Ray.

One thread steps it; every other thread only enqueues commands, which are carried out between steps:

    drain the inbox  ->  plan (scheduler)  ->  run (executor)  ->  accept the sampled tokens  ->  tell the listener

A sequence's lease is returned in one place, `_settle`: when it has ended and no transfer reads or writes its blocks.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from collections.abc import Sequence as ListLike

from engine.blocks import BlockPool
from engine.events import Aborting, Ended, EngineEvent, EngineListener, Leased, Preempted, Tokens
from engine.executor import Executor
from engine.plan import StepPlan
from engine.scheduler import Scheduler
from engine.sequence import KVSource, Phase, Sequence
from pdserve import logs
from pdserve.config import EngineConfig
from pdserve.errors import InternalError, InvalidArgument, PdserveError, Uncomputable
from pdserve.types import Finish, Load, ModelLimits, Owner, SampledToken

_log = logs.logger("engine")

# For sys.setswitchinterval in a process that steps an engine beside other threads: a step that comes back from its
# kernels waits so long for the interpreter when another thread is busy in it.
SWITCH_INTERVAL_S = 0.0005


class Engine:
    """Steps sequences over one executor. Methods marked "any thread" only enqueue."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        max_model_len: int,
        listener: EngineListener,
        pool: BlockPool | None = None,
    ) -> None:
        """`pool`: the books of the executor's blocks, for who wants to watch them; by default one of its own."""
        capacity = executor.capacity
        self.limits = ModelLimits(capacity.vocab_size, max_model_len, capacity.pool_tokens)
        self._executor = executor
        self._eos_token_ids = capacity.eos_token_ids
        self._listener = listener
        self._pool = BlockPool(capacity.block_count, capacity.block_tokens) if pool is None else pool
        self._scheduler = Scheduler(self._pool, config.max_step_tokens, config.max_running)
        self._sequences: dict[Owner, Sequence] = {}
        self._expected: dict[Owner, list[Sequence]] = {}  # not submitted yet; who waits for their prompt's KV
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._events: list[EngineEvent] = []  # since the listener was last told
        self._stalled = False  # the last plan was empty: only a command can change that

    # Commands: any thread.

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence. Its owner must have no other one here."""
        self._inbox.put(lambda: self._submit(sequence))

    def expect(self, owner: Owner) -> None:
        """A sequence of this owner will be submitted, or forgotten: those that share its prompt's KV wait for it."""
        self._inbox.put(lambda: self._expect(owner))

    def forget(self, owner: Owner) -> None:
        """A sequence that was expected will not come."""
        self._inbox.put(lambda: self._forget(owner))

    def abort(self, owner: Owner, error: PdserveError) -> None:
        """End a sequence with `error`. Unknown or ended already: nothing happens."""
        self._inbox.put(lambda: self._abort(owner, error))

    def deliver(self, owner: Owner, tokens: ListLike[SampledToken]) -> None:
        """All KV of a receiving sequence is in its blocks, and these tokens follow. Unpins it."""
        self._inbox.put(lambda: self._deliver(owner, tokens))

    def take_over(self, owner: Owner, computed: int) -> None:
        """No more KV will come for a receiving sequence: the first `computed` tokens' is in its blocks, the rest is
        computed here. Unpins it."""
        self._inbox.put(lambda: self._take_over(owner, computed))

    def unpin(self, owner: Owner) -> None:
        """No transfer reads or writes the sequence's blocks any more."""
        self._inbox.put(lambda: self._unpin(owner))

    # The loop: the engine's thread.

    def step(self, wait_s: float = 0.0) -> bool:
        """Carry out queued commands, then one step. Waits at most `wait_s` for work; False: there was none."""
        worked = self._drain_inbox(0.0 if self._scheduler.has_work() and not self._stalled else wait_s)
        plan = self._scheduler.plan()
        self._stalled = not plan.slices and not plan.leased
        if self._note_leases(plan):
            self._tell()
        if plan.slices:
            self._run(plan)
        if worked or plan.slices or plan.leased:
            self._tell()
            if self.idle():
                self.check_integrity()
            return True
        return False

    def has_commands(self) -> bool:
        """Whether a command waits to be carried out. Any thread."""
        return not self._inbox.empty()

    def has_work(self) -> bool:
        """Whether a sequence runs, or waits for blocks. The engine's thread."""
        return self._scheduler.has_work()

    def idle(self) -> bool:
        """No sequence is left, and none is expected. The engine's thread."""
        return not self._sequences and not self._expected

    def load(self) -> Load:
        """A snapshot for the routers. The engine's thread; the listener gets it with the events."""
        running = self._scheduler.running_count
        queued = self._scheduler.waiting_count + self._scheduler.receiving_count
        return Load(queued=queued, running=running, blocks=self._pool.counts())

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the pool's books add up and every lease has a sequence."""
        self._pool.check_integrity()
        if not self._sequences and self._pool.counts().leased:
            raise InternalError(f"{self._pool.counts().leased} blocks are leased and no sequence is left")

    def _drain_inbox(self, wait_s: float) -> bool:
        worked = False
        while True:
            try:
                command = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            except queue.Empty:
                return worked
            command()
            worked, wait_s = True, 0.0

    def _note_leases(self, plan: StepPlan) -> bool:
        """Who got blocks and who lost them; whether the listener should know before the step is computed."""
        known = len(self._events)
        self._events += [Preempted(sequence.owner) for sequence in plan.preempted]
        for sequence in plan.leased:
            if sequence.outlet is not None:
                sequence.outlet.opened(self._executor.sequence_kv(sequence))
            if sequence.phase is Phase.RECEIVING:
                self._events.append(Leased(sequence.owner, self._executor.sequence_kv(sequence)))
        return len(self._events) > known

    def _tell(self) -> None:
        events, self._events = tuple(self._events), []
        self._listener.on_engine(events, self.load())

    def _run(self, plan: StepPlan) -> None:
        try:
            sampled = self._executor.run(plan)
        except Exception as error:  # noqa: BLE001 - the loop's supervisor: a failed step must end its requests, not the worker
            _log.exception("step failed", sequences=len(plan.slices), tokens=plan.token_count)
            failure = InternalError(f"a step failed: {type(error).__name__}: {error}")
            for slice_ in plan.slices:
                self._abort(slice_.sequence.owner, failure)
            return
        for slice_ in plan.slices:
            slice_.sequence.computed = slice_.stop
            self._fork_followers(slice_.sequence)
        for result in sampled:
            if isinstance(result.token, Uncomputable):
                self._abort(result.slice.sequence.owner, result.token)
            else:
                self._accept(result.slice.sequence, [result.token])

    def _accept(self, sequence: Sequence, tokens: ListLike[SampledToken]) -> None:
        finish: Finish | None = None
        accepted: list[SampledToken] = []
        for token in tokens:
            finish = sequence.accept(token.token_id, self._eos_token_ids)
            accepted.append(token)
            if finish:
                break
        first_position = sequence.output_count - len(accepted)
        self._events.append(Tokens(sequence.owner, first_position, tuple(accepted)))
        if sequence.stops_after_prefill:
            self._end(sequence, None)
        elif finish:
            self._end(sequence, finish)

    def _submit(self, sequence: Sequence) -> None:
        if sequence.owner in self._sequences:
            # What an event says of this owner is said of the first one, which goes on.
            _log.error("an owner was submitted twice", owner=sequence.owner)
            return
        problem = self._misfit(sequence)
        if problem is not None:
            self._forget(sequence.owner)
            self._events.append(Ended(sequence.owner, problem))
            return
        self._sequences[sequence.owner] = sequence
        sequence.followers = self._expected.pop(sequence.owner, [])
        leader = self._leader(sequence)
        if sequence.shares in self._expected:
            self._expected[sequence.shares].append(sequence)
        elif leader is None or leader.phase is Phase.ENDED:
            self._scheduler.add(sequence)
        else:
            leader.followers.append(sequence)
            self._fork_followers(leader)

    def _expect(self, owner: Owner) -> None:
        if owner not in self._sequences:
            self._expected.setdefault(owner, [])

    def _forget(self, owner: Owner) -> None:
        for follower in self._expected.pop(owner, ()):
            self._scheduler.add(follower)

    def _leader(self, sequence: Sequence) -> Sequence | None:
        """The sequence whose prompt's KV this one shares, if it is here."""
        return self._sequences.get(sequence.shares) if sequence.shares is not None else None

    def _fork_followers(self, leader: Sequence) -> None:
        """Start those that waited for this sequence's prompt, if its KV is there."""
        if not leader.followers or not leader.prompt_ready:
            return
        followers, leader.followers = leader.followers, []
        for follower in followers:
            if self._scheduler.fork(leader, follower):
                last, tokens = divmod(leader.prompt_count - 1, self._pool.block_tokens)
                if tokens:
                    self._executor.copy_block(leader.blocks[last], follower.blocks[last], tokens)
            else:
                self._scheduler.add(follower)

    def _misfit(self, sequence: Sequence) -> InvalidArgument | None:
        """What the router should have refused: a sequence that could never end here."""
        longest = min(self.limits.max_model_len, self.limits.pool_tokens)
        if not 0 < sequence.known < longest:
            return InvalidArgument("prompt", f"has {sequence.known} tokens: must be between 1 and {longest - 1}")
        room = longest - sequence.prompt_count
        if sequence.params.max_tokens > room:
            return InvalidArgument("max_tokens", f"is {sequence.params.max_tokens}: there is room for {room}")
        return None

    def _abort(self, owner: Owner, error: PdserveError) -> None:
        sequence = self._sequences.get(owner)
        if sequence is not None and sequence.phase is not Phase.ENDED:
            self._end(sequence, error)

    def _deliver(self, owner: Owner, tokens: ListLike[SampledToken]) -> None:
        sequence = self._sequences.get(owner)
        if sequence is None:
            return
        sequence.pinned = False
        if sequence.phase is Phase.RECEIVING:
            self._scheduler.received(sequence, sequence.known)
            self._fork_followers(sequence)
            self._accept(sequence, tokens)
        else:
            self._settle(sequence)

    def _take_over(self, owner: Owner, computed: int) -> None:
        sequence = self._sequences.get(owner)
        if sequence is None:
            return
        sequence.pinned = False
        sequence.source = KVSource.COMPUTED
        if sequence.phase is Phase.RECEIVING:
            # The last known token is computed in any case: what follows it is sampled from its logits.
            self._scheduler.received(sequence, min(computed, sequence.known - 1))
            self._fork_followers(sequence)
        self._settle(sequence)

    def _unpin(self, owner: Owner) -> None:
        sequence = self._sequences.get(owner)
        if sequence is not None:
            sequence.pinned = False
            self._settle(sequence)

    def _end(self, sequence: Sequence, outcome: Finish | PdserveError | None) -> None:
        self._scheduler.remove(sequence)
        for follower in sequence.followers:  # it ended before its prompt was ready
            self._scheduler.add(follower)
        sequence.followers = []
        if sequence.shares is not None:
            leader = self._sequences.get(sequence.shares)
            for waiting in (leader.followers if leader is not None else [], self._expected.get(sequence.shares, [])):
                if sequence in waiting:
                    waiting.remove(sequence)
        sequence.outcome = outcome
        if sequence.pinned and isinstance(outcome, PdserveError):
            self._events.append(Aborting(sequence.owner, outcome))
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Return the lease of a sequence that has ended, once nobody touches its blocks."""
        if sequence.phase is Phase.ENDED and not sequence.pinned:
            self._pool.give_back(sequence.owner)
            del self._sequences[sequence.owner]
            self._events.append(Ended(sequence.owner, sequence.outcome))
