"""What a worker's control takes for an engine, in virtual time: leases, chunks, layers and ends as the real one has
them, and a model whose KV is a table of random bytes.

It watches what a real engine cannot: that no range is read before it was computed, or touched after its lease.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike

import numpy as np

from engine.events import Aborting, Ended, EngineEvent, EngineListener, Leased, Tokens
from engine.sequence import KVSource, Phase, Sequence
from pdserve.errors import PdserveError
from pdserve.kv_format import KVFormat
from pdserve.types import Finish, FinishReason, Load, Owner, SampledToken
from support.kv_store import FakeStore

Later = Callable[[float, Callable[[], None]], None]


class WatchedStore(FakeStore):
    """A sequence's KV that knows which of it is there."""

    def __init__(self, layout: KVFormat, token_count: int) -> None:
        super().__init__(layout, token_count)
        self.there = np.zeros((layout.layer_count, token_count), bool)
        self.early_reads = 0

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        self.early_reads += not self.there[layer, start:stop].all()
        super().read_into(layer, start, stop, out)

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        super().write(layer, start, stop, payload)
        self.there[layer, start:stop] = True

    def is_right(self, truth: FakeStore, stop: int) -> bool:
        """Whether tokens [0, stop) of all layers are there and are the right bytes."""
        return bool(self.there[:, :stop].all()) and self.equals(truth, 0, stop)


class SimulatedEngine:
    """One worker's. `later(delay_s, call)` calls while the worker lives; `truth` is the KV that the model computes for
    a request, and `token` the one it samples after it."""

    def __init__(
        self,
        layout: KVFormat,
        pool_tokens: int,
        rng: random.Random,
        later: Later,
        truth: Callable[[Owner], FakeStore],
        token: SampledToken,
    ) -> None:
        self.pool_tokens = self.free_tokens = pool_tokens
        self.stores: list[WatchedStore] = []  # all there ever were
        self.sequences: dict[Owner, Sequence] = {}
        self.received = 0  # tokens whose KV came from outside, of all layers
        self._layout = layout
        self._rng = rng
        self._later = later
        self._truth = truth
        self._token = token
        self._waiting: deque[Sequence] = deque()
        self._leases: dict[Owner, WatchedStore] = {}
        self._events: list[EngineEvent] = []
        self.listener: EngineListener | None = None

    # What the control calls.

    def expect(self, owner: Owner) -> None: ...  # nothing shares anything here

    def forget(self, owner: Owner) -> None: ...

    def submit(self, sequence: Sequence) -> None:
        self._soon(lambda: self._submit(sequence))

    def abort(self, owner: Owner, error: PdserveError) -> None:
        self._soon(lambda: self._abort(owner, error))

    def deliver(self, owner: Owner, tokens: ListLike[SampledToken]) -> None:
        self._soon(lambda: self._go_on(owner, None, tokens))

    def take_over(self, owner: Owner, computed: int) -> None:
        self._soon(lambda: self._go_on(owner, computed, ()))

    def unpin(self, owner: Owner) -> None:
        self._soon(lambda: self._unpin(owner))

    # Its own thread.

    def _soon(self, command: Callable[[], None], delay_s: float = 0.0) -> None:
        def step() -> None:
            command()
            events, self._events = tuple(self._events), []
            if events and self.listener is not None:
                self.listener.on_engine(events, Load())

        self._later(delay_s, step)

    def _submit(self, sequence: Sequence) -> None:
        assert sequence.owner not in self.sequences, "submitted twice"
        self.sequences[sequence.owner] = sequence
        self._waiting.append(sequence)
        self._lease()

    def _lease(self) -> None:
        """First come, first served."""
        while self._waiting and self._waiting[0].known <= self.free_tokens:
            sequence = self._waiting.popleft()
            self.free_tokens -= sequence.known
            self._leases[sequence.owner] = WatchedStore(self._layout, sequence.known)
            self.stores.append(self._leases[sequence.owner])
            delivered = sequence.source is KVSource.DELIVERED
            sequence.pinned = delivered or sequence.outlet is not None
            sequence.phase = Phase.RECEIVING if delivered else Phase.RUNNING
            if delivered:
                self._events.append(Leased(sequence.owner, self._leases[sequence.owner]))
            elif sequence.outlet is not None:
                sequence.outlet.opened(self._leases[sequence.owner])
            if not delivered:
                self._compute_chunk(sequence)

    def _compute_chunk(self, sequence: Sequence) -> None:
        if sequence.computed == sequence.known:
            self._accept(sequence, [self._token])
            return
        stop = min(sequence.known, sequence.computed + self._rng.choice((1, 7, 31, 32, 33, 70)))
        self._soon(lambda: self._compute_layer(sequence, 0, stop), self._rng.choice((0.0, 0.001, 0.1)))

    def _compute_layer(self, sequence: Sequence, layer: int, stop: int) -> None:
        if sequence.phase is not Phase.RUNNING:
            return
        start = sequence.computed
        known = self._truth(sequence.owner).read(layer, start, stop)
        self._leases[sequence.owner].write(layer, start, stop, known)
        if sequence.outlet is not None:
            sequence.outlet.layer_ready(layer, start, stop)
        if layer + 1 < self._layout.layer_count:
            delay_s = self._rng.choice((0.0, 0.001, 0.1))
            self._soon(lambda: self._compute_layer(sequence, layer + 1, stop), delay_s)
        else:
            sequence.computed = stop
            self._compute_chunk(sequence)

    def _go_on(self, owner: Owner, computed: int | None, tokens: ListLike[SampledToken]) -> None:
        """The transfer of a receiving sequence is over; `computed` None: all KV is there."""
        sequence = self.sequences.get(owner)
        if sequence is None:
            return
        sequence.pinned = False
        if sequence.phase is not Phase.RECEIVING:
            sequence.source = KVSource.COMPUTED
            self._settle(sequence)
            return
        stop = sequence.known if computed is None else computed
        assert self._leases[owner].is_right(self._truth(owner), stop), "wrong KV was handed over"
        self.received += stop
        sequence.phase, sequence.computed = Phase.RUNNING, min(stop, sequence.known - (computed is not None))
        if computed is None:
            self._accept(sequence, tokens)
        else:
            self._compute_chunk(sequence)

    def _accept(self, sequence: Sequence, tokens: ListLike[SampledToken]) -> None:
        self._events.append(Tokens(sequence.owner, 0, tokens))
        self._end(sequence, None if sequence.stops_after_prefill else Finish(FinishReason.LENGTH))

    def _abort(self, owner: Owner, error: PdserveError) -> None:
        sequence = self.sequences.get(owner)
        if sequence is not None and sequence.phase is not Phase.ENDED:
            self._end(sequence, error)

    def _unpin(self, owner: Owner) -> None:
        if (sequence := self.sequences.get(owner)) is not None:
            sequence.pinned = False
            self._settle(sequence)

    def _end(self, sequence: Sequence, outcome: Finish | PdserveError | None) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        sequence.phase, sequence.outcome = Phase.ENDED, outcome
        if sequence.pinned and isinstance(outcome, PdserveError):
            self._events.append(Aborting(sequence.owner, outcome))
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Give the lease back once nobody touches it."""
        if sequence.phase is not Phase.ENDED or sequence.pinned:
            return
        del self.sequences[sequence.owner]
        if (store := self._leases.pop(sequence.owner, None)) is not None:
            store.close()
            self.free_tokens += sequence.known
        self._events.append(Ended(sequence.owner, sequence.outcome))
        self._lease()
