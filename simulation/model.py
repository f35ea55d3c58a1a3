"""The simulated model and its memory: tags instead of numbers, behind the shapes of Decoder and of the kernels' cache.

Whatever reads KV, a forward pass or a transfer, is checked: what it gets must be whole, of this sequence, and in blocks
that are leased to it. Blocks that become free are wiped, so that nothing right is left in them by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.blocks import BlockPool
from engine.engine import Engine
from engine.sequence import Phase, Sequence
from kernels.ops import AfterLayer, CacheShape, SequenceRows, StepBatch
from pdserve.config import EngineConfig
from pdserve.kv_format import KVFormat
from pdserve.types import Owner, SampledToken
from simulation.oracle import COLOUR, EOS, VOCAB_SIZE, Oracle, Provenance, Script, Violation, logits_after

LAYERS = 2
LAYOUT = KVFormat(layer_count=LAYERS, kv_heads=1, head_dim=2, item="float32")  # one 64-bit tag is a row
TOKEN_BYTES = LAYOUT.payload_bytes(1)
_ANY_COLOUR = np.array([0, COLOUR], np.uint64)  # K, V


class Poisoned(BaseException):
    """What a step computes crashes the process."""


class TagStore:
    """The memory of all blocks of one worker: uint64 [layer, slot, K or V]."""

    def __init__(self, block_count: int, block_tokens: int) -> None:
        self.shape = CacheShape(LAYERS, block_count, block_tokens, LAYOUT.kv_heads, LAYOUT.head_dim, torch.float32)
        self.cache = np.zeros((LAYERS, block_count * block_tokens, 2), np.uint64)
        self._block_of, self._within = np.divmod(np.arange(block_count * block_tokens), block_tokens)

    def slots(self, blocks: ListLike[int], start: int, stop: int) -> np.ndarray:
        """Where tokens [start, stop) of a sequence with these blocks are."""
        return np.asarray(blocks)[self._block_of[start:stop]] * self.shape.block_tokens + self._within[start:stop]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a block into another one."""
        size = self.shape.block_tokens
        self.cache[:, target * size : target * size + tokens] = self.cache[:, source * size : source * size + tokens]

    def wipe(self, blocks: ListLike[int]) -> None:
        size = self.shape.block_tokens
        for block in blocks:
            self.cache[:, block * size : (block + 1) * size] = 0


@dataclass(frozen=True, slots=True)
class Logits:
    """Rows as the runner takes them."""

    rows: np.ndarray

    def numpy(self) -> np.ndarray:
        return self.rows


@dataclass(frozen=True, slots=True)
class _ModelShape:
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = (EOS,)


class OracleDecoder:
    """Computes tags and their logits, from the cache as a real model would.

    `between_layers` is called after each layer: what other threads of a worker do while a step runs. `colour`: which
    kind of worker this is, 0 or 1.
    """

    def __init__(self, oracle: Oracle, store: TagStore, between_layers: Callable[[], None], colour: int) -> None:
        self.config = _ModelShape()
        self._oracle = oracle
        self._store = store
        self._between_layers = between_layers
        self._mask = np.array([2**64 - 1, 2**64 - 2 + colour], np.uint64)  # K, V: what it leaves of the right tags
        self.broken = False  # the next pass raises

    def forward(self, batch: StepBatch, cache: np.ndarray, after_layer: AfterLayer | None = None) -> Logits:
        parts = [
            (rows, self._store.slots(rows.blocks, 0, rows.start + rows.count), self._script(rows, batch, cache))
            for rows in batch.sequences
        ]
        if self.broken:
            self.broken = False
            raise RuntimeError("a step that was meant to fail")
        for layer in range(LAYERS):
            for rows, slots, script in parts:
                stop = rows.start + rows.count
                cache[layer, slots[rows.start :]] = script.tags[layer, rows.start : stop] & self._mask
            if after_layer is not None:
                after_layer(layer)
            self._between_layers()
            for rows, slots, script in parts:
                if not same_tags(cache[layer, slots], script.tags[layer, : rows.start + rows.count]):
                    raise Violation(f"a step of {script.request_id} read KV that is not its own in layer {layer}")
        return self._logits(batch, [(rows, script) for rows, _, script in parts])

    def _script(self, rows: SequenceRows, batch: StepBatch, cache: np.ndarray) -> Script:
        """Whose rows these are, by the KV before them."""
        tag = int(cache[0, self._store.slots(rows.blocks, rows.start - 1, rows.start)[0], 0]) if rows.start else 0
        script, last = self._oracle.at(tag, batch.token_ids[rows.row : rows.row + rows.count])
        if last != rows.start + rows.count - 1:
            raise Violation(f"a step of {script.request_id} computes other tokens than its own from {rows.start} on")
        deadly = self._oracle.poison.get(script.request_id)
        if deadly is not None and rows.start <= deadly <= last:
            self._oracle.poisoned[script.request_id] += 1
            raise Poisoned(script.request_id)
        return script

    def _logits(self, batch: StepBatch, parts: list[tuple[SequenceRows, Script]]) -> Logits:
        ends = {rows.row + rows.count - 1: (rows.start + rows.count, script) for rows, script in parts}
        logits = np.empty((len(batch.logit_rows), VOCAB_SIZE), np.float32)
        for index, row in enumerate(batch.logit_rows):
            position, script = ends[row]
            if position >= len(script.token_ids):
                raise Violation(f"{script.request_id} is sampled beyond its end")
            logits[index] = logits_after(int(script.tags[0, position - 1, 0]))
        return Logits(logits)


def same_tags(found: np.ndarray, right: np.ndarray) -> bool:
    """Whether tags [..., K or V] are the right ones, whoever computed them."""
    return np.array_equal(found | _ANY_COLOUR, right)


class SimulatedEngine(Engine):
    """The engine over tags, with an eye on its blocks: it wipes what becomes free and watches transfers' views."""

    def __init__(
        self,
        oracle: Oracle,
        config: EngineConfig,
        block_count: int,
        between_layers: Callable[[], None],
        colour: int = 0,
    ) -> None:
        store = TagStore(block_count, config.block_tokens)
        decoder = OracleDecoder(oracle, store, between_layers, colour)
        self.preemptions = 0
        self.prompts_shared = 0
        super().__init__(decoder, store, config, max_model_len=block_count * config.block_tokens)  # type: ignore[arg-type]
        self._oracle = oracle
        self.pool_touched = True  # since somebody last looked at its books
        for name in ("lease", "share"):
            setattr(self._pool, name, self._touching(getattr(self._pool, name)))
        self._pool.give_back = self._give_back_wiped  # type: ignore[method-assign]
        if oracle.mixed:
            self._sample = self._runner._sample
            self._runner._sample = self._sample_noted  # type: ignore[method-assign]

    @property
    def pool(self) -> BlockPool:
        return self._pool

    def fail_next_step(self) -> None:
        self.decoder.broken = True

    @property
    def has_commands(self) -> bool:
        return not self._inbox.empty()

    @property
    def has_waiting(self) -> bool:
        return self._scheduler.has_work()

    def sequence_kv(self, sequence: Sequence) -> CheckedKV:
        script = self._oracle.script(sequence.owner.request_id, sequence.owner.output)
        return CheckedKV(self, sequence.owner, tuple(sequence.blocks), script)

    def _sample_noted(self, logits: np.ndarray, sequence: Sequence) -> SampledToken:
        """Note who computed the KV that this token follows from."""
        colours = self.store.cache[0, self.store.slots(sequence.blocks, 0, sequence.known), 1] & COLOUR
        prompt, output = colours[: sequence.prompt_count], colours[sequence.prompt_count :]
        provenance = Provenance(frozenset(prompt.tolist()), frozenset(output.tolist()))
        self._oracle.note(sequence.owner, sequence.output_count, provenance)
        return self._sample(logits, sequence)

    def _touching(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.pool_touched = True
            self.prompts_shared += change.__name__ == "share"
            return change(*args)

        return noted

    def _give_back_wiped(self, owner: Owner) -> int:
        self.pool_touched = True
        blocks = self._pool.leased_to(owner)
        self.preemptions += self._sequences[owner].phase is not Phase.ENDED
        freed = BlockPool.give_back(self._pool, owner)
        self.store.wipe([block for block in blocks if self._pool._references[block] == 0])
        return freed


class CheckedKV:
    """One sequence's KV as a transfer sees it, in the wire's canonical bytes: all K, then all V.

    What a sender reads must be right. A receiver may store what was damaged on its way, and reads it back to find that
    out; whether it goes on with it is seen where a step reads it."""

    def __init__(self, engine: SimulatedEngine, owner: Owner, blocks: tuple[int, ...], script: Script) -> None:
        self.owner = owner
        self.blocks = blocks
        self._engine = engine
        self._script = script
        self._receives = False

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        self._check_lease("reads", start, stop)
        store = self._engine.store
        found = store.cache[layer, store.slots(self.blocks, start, stop)].T
        if not self._receives:
            self._check_tags(found, layer, start, stop)
        np.frombuffer(out, np.uint64).reshape(2, -1)[:] = found

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        self._receives = True
        self._check_lease("writes", start, stop)
        store = self._engine.store
        store.cache[layer, store.slots(self.blocks, start, stop)] = np.frombuffer(payload, np.uint64).reshape(2, -1).T

    def _check_lease(self, verb: str, start: int, stop: int) -> None:
        size = self._engine.store.shape.block_tokens
        leased = self._engine.pool.leased_to(self.owner)
        for block in self.blocks[start // size : -(-stop // size)]:
            if block not in leased:
                raise Violation(f"a transfer {verb} block {block} for {self.owner}, which has no lease of it")

    def _check_tags(self, tags: np.ndarray, layer: int, start: int, stop: int) -> None:
        if not same_tags(tags.T, self._script.tags[layer, start:stop]):
            raise Violation(f"a transfer reads KV of {self.owner} that is not whole: layer {layer}, [{start}, {stop})")
