"""The executor of the simulation: tags instead of numbers, behind the engine's port.

Whatever reads KV, a step or a transfer, is checked: what it gets must be whole, of this sequence, and in blocks that
are leased to it. Blocks that become free are wiped, so that nothing right is left in them by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as ListLike

import numpy as np

from engine.blocks import BlockPool
from engine.executor import Capacity, Sampled
from engine.plan import Slice, StepPlan
from engine.sequence import Sequence
from model.next_token import next_token
from pdserve.kv_format import KVFormat
from pdserve.types import Owner
from simulation.oracle import COLOUR, EOS, VOCAB_SIZE, Oracle, Provenance, Script, Violation, logits_after

LAYERS = 2
KV_FORMAT = KVFormat(layer_count=LAYERS, kv_heads=1, head_dim=2, item="float32")  # one 64-bit tag is a row
TOKEN_BYTES = KV_FORMAT.payload_bytes(1)
_ANY_COLOUR = np.array([0, COLOUR], np.uint64)  # K, V


class Poisoned(BaseException):
    """What a step computes crashes the process."""


class TagStore:
    """The memory of all blocks of one worker: uint64 [layer, slot, K or V]."""

    def __init__(self, block_count: int, block_tokens: int) -> None:
        self.block_count = block_count
        self.block_tokens = block_tokens
        self.tags = np.zeros((LAYERS, block_count * block_tokens, 2), np.uint64)
        self._block_of, self._within = np.divmod(np.arange(block_count * block_tokens), block_tokens)

    def slots(self, blocks: ListLike[int], start: int, stop: int) -> np.ndarray:
        """Where tokens [start, stop) of a sequence with these blocks are."""
        return np.asarray(blocks)[self._block_of[start:stop]] * self.block_tokens + self._within[start:stop]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a block into another one."""
        size = self.block_tokens
        self.tags[:, target * size : target * size + tokens] = self.tags[:, source * size : source * size + tokens]

    def wipe(self, blocks: ListLike[int]) -> None:
        size = self.block_tokens
        for block in blocks:
            self.tags[:, block * size : (block + 1) * size] = 0


class WatchedPool(BlockPool):
    """The books of a store's blocks: wipes what becomes free, and notes what happens."""

    def __init__(self, store: TagStore) -> None:
        super().__init__(store.block_count, store.block_tokens)
        self.touched = True  # since somebody last looked at its books
        self.prompts_shared = 0
        self._store = store

    def lease(self, owner: Hashable, count: int) -> list[int] | None:
        self.touched = True
        return super().lease(owner, count)

    def share(self, owner: Hashable, blocks: ListLike[int]) -> None:
        self.touched = True
        self.prompts_shared += 1
        super().share(owner, blocks)

    def give_back(self, owner: Hashable) -> int:
        self.touched = True
        blocks = self.leased_to(owner)
        freed = super().give_back(owner)
        self._store.wipe([block for block in blocks if self._references[block] == 0])
        return freed


class TagExecutor:
    """`engine.executor.Executor` over tags: computes them and their logits, from the store as a real model would.

    `between_layers` is called after each layer: what other threads of a worker do while a step runs. `colour`: which
    kind of worker this is, 0 or 1. The engine on top of it must keep its books in `pool`.
    """

    def __init__(
        self, oracle: Oracle, block_count: int, block_tokens: int, between_layers: Callable[[], None], colour: int = 0
    ) -> None:
        self.store = TagStore(block_count, block_tokens)
        self.pool = WatchedPool(self.store)
        self._capacity = Capacity(block_count, block_tokens, VOCAB_SIZE, (EOS,))
        self._oracle = oracle
        self._between_layers = between_layers
        self._mask = np.array([2**64 - 1, 2**64 - 2 + colour], np.uint64)  # K, V: what it leaves of the right tags
        self._broken = False  # the next step raises

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def format(self) -> KVFormat:
        return KV_FORMAT

    def fail_next_step(self) -> None:
        self._broken = True

    def run(self, plan: StepPlan) -> list[Sampled]:
        store, tags = self.store, self.store.tags
        rows = [
            (slice_, store.slots(slice_.sequence.blocks, 0, slice_.stop), self._script(slice_))
            for slice_ in plan.slices
        ]
        if self._broken:
            self._broken = False
            raise RuntimeError("a step that was meant to fail")
        for layer in range(LAYERS):
            for slice_, slots, script in rows:
                tags[layer, slots[slice_.start :]] = script.tags[layer, slice_.start : slice_.stop] & self._mask
            for slice_, _, _ in rows:
                if slice_.sequence.outlet is not None:
                    slice_.sequence.outlet.layer_ready(layer, slice_.start, slice_.stop)
            self._between_layers()
            for slice_, slots, script in rows:
                if not same_tags(tags[layer, slots], script.tags[layer, : slice_.stop]):
                    raise Violation(f"a step of {script.request_id} read KV that is not its own in layer {layer}")
        return [self._sample(slice_, script) for slice_, _, script in rows if slice_.samples]

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        self.store.copy(source, target, tokens)

    def sequence_kv(self, sequence: Sequence) -> CheckedKV:
        script = self._oracle.script(sequence.owner.request_id, sequence.owner.output)
        return CheckedKV(self.store, self.pool, sequence.owner, tuple(sequence.blocks), script)

    def _script(self, slice_: Slice) -> Script:
        """Whose tokens these are, by the KV before them."""
        sequence, start = slice_.sequence, slice_.start
        tag = int(self.store.tags[0, self.store.slots(sequence.blocks, start - 1, start)[0], 0]) if start else 0
        script, last = self._oracle.at(tag, sequence.token_ids[start : slice_.stop])
        if last != slice_.stop - 1:
            raise Violation(f"a step of {script.request_id} computes other tokens than its own from {start} on")
        deadly = self._oracle.poison.get(script.request_id)
        if deadly is not None and start <= deadly <= last:
            self._oracle.poisoned[script.request_id] += 1
            raise Poisoned(script.request_id)
        return script

    def _sample(self, slice_: Slice, script: Script) -> Sampled:
        if slice_.stop >= len(script.token_ids):
            raise Violation(f"{script.request_id} is sampled beyond its end")
        if self._oracle.mixed:
            self._note_provenance(slice_.sequence)
        logits = logits_after(int(script.tags[0, slice_.stop - 1, 0]))
        return Sampled(slice_, next_token(logits, slice_.sequence, self._capacity.eos_token_ids))

    def _note_provenance(self, sequence: Sequence) -> None:
        """Note who computed the KV that the next token follows from."""
        colours = self.store.tags[0, self.store.slots(sequence.blocks, 0, sequence.known), 1] & COLOUR
        prompt, output = colours[: sequence.prompt_count], colours[sequence.prompt_count :]
        provenance = Provenance(frozenset(prompt.tolist()), frozenset(output.tolist()))
        self._oracle.note(sequence.owner, sequence.output_count, provenance)


def same_tags(found: np.ndarray, right: np.ndarray) -> bool:
    """Whether tags [..., K or V] are the right ones, whoever computed them."""
    return np.array_equal(found | _ANY_COLOUR, right)


class CheckedKV:
    """One sequence's KV as a transfer sees it, in the wire's canonical bytes: all K, then all V.

    What a sender reads must be right. A receiver may store what was damaged on its way, and reads it back to find that
    out; whether it goes on with it is seen where a step reads it."""

    def __init__(
        self, store: TagStore, pool: WatchedPool, owner: Owner, blocks: tuple[int, ...], script: Script
    ) -> None:
        self.owner = owner
        self.blocks = blocks
        self._store = store
        self._pool = pool
        self._script = script
        self._receives = False

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        self._check_lease("reads", start, stop)
        found = self._store.tags[layer, self._store.slots(self.blocks, start, stop)].T
        if not self._receives:
            self._check_tags(found, layer, start, stop)
        np.frombuffer(out, np.uint64).reshape(2, -1)[:] = found

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        self._receives = True
        self._check_lease("writes", start, stop)
        slots = self._store.slots(self.blocks, start, stop)
        self._store.tags[layer, slots] = np.frombuffer(payload, np.uint64).reshape(2, -1).T

    def _check_lease(self, verb: str, start: int, stop: int) -> None:
        size = self._store.block_tokens
        leased = self._pool.leased_to(self.owner)
        for block in self.blocks[start // size : -(-stop // size)]:
            if block not in leased:
                raise Violation(f"a transfer {verb} block {block} for {self.owner}, which has no lease of it")

    def _check_tags(self, tags: np.ndarray, layer: int, start: int, stop: int) -> None:
        if not same_tags(tags.T, self._script.tags[layer, start:stop]):
            raise Violation(f"a transfer reads KV of {self.owner} that is not whole: layer {layer}, [{start}, {stop})")
