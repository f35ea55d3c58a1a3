"""The executor that computes: a decoder, its kernels, and the memory of the blocks, behind the engine's port."""

from __future__ import annotations

from engine.executor import Capacity, Sampled
from engine.plan import Slice, StepPlan
from engine.sequence import Sequence
from kernels.ops import CacheShape, SequenceRows, StepBatch
from model.decoder import Decoder
from model.kv_store import KVStore, StoredKV
from model.next_token import next_token
from pdserve.kv_format import KVFormat


class ModelExecutor:
    """`engine.executor.Executor` over a decoder and a store of this shape."""

    def __init__(self, decoder: Decoder, shape: CacheShape) -> None:
        self.decoder = decoder
        self._store = KVStore(decoder.kernels, shape)
        config = decoder.config
        self._capacity = Capacity(shape.block_count, shape.block_tokens, config.vocab_size, config.eos_token_ids)

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def format(self) -> KVFormat:
        return self._store.shape.format

    def run(self, plan: StepPlan) -> list[Sampled]:
        leaving = [(slice_, slice_.sequence.outlet) for slice_ in plan.slices if slice_.sequence.outlet is not None]

        def after_layer(layer: int) -> None:
            for slice_, outlet in leaving:
                outlet.layer_ready(layer, slice_.start, slice_.stop)

        batch = _batch(plan.slices)
        rows = self.decoder.forward(batch, self._store.cache, after_layer if leaving else None).numpy()
        sampling = [slice_ for slice_ in plan.slices if slice_.samples]
        eos = self._capacity.eos_token_ids
        return [Sampled(slice_, next_token(rows[i], slice_.sequence, eos)) for i, slice_ in enumerate(sampling)]

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        self._store.copy(source, target, tokens)

    def sequence_kv(self, sequence: Sequence) -> StoredKV:
        return StoredKV(self._store, sequence.blocks)


def _batch(slices: tuple[Slice, ...]) -> StepBatch:
    token_ids: list[int] = []
    sequences: list[SequenceRows] = []
    logit_rows: list[int] = []
    for slice_ in slices:
        sequences.append(SequenceRows(len(token_ids), slice_.count, slice_.start, slice_.sequence.blocks))
        token_ids += slice_.sequence.token_ids[slice_.start : slice_.stop]
        if slice_.samples:
            logit_rows.append(len(token_ids) - 1)
    return StepBatch(token_ids, tuple(sequences), logit_rows)
