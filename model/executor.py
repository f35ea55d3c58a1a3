"""The executor that computes: a decoder, its kernels, and the memory of the blocks, behind the engine's port."""

from __future__ import annotations

import numpy as np

from engine.executor import Capacity, Sampled
from engine.plan import Slice, StepPlan
from engine.sequence import Sequence
from kernels.ops import CacheShape, SequenceRows, StepBatch
from model.decoder import Decoder
from model.kv_store import KVStore, StoredKV
from model.next_token import next_token
from pdserve.errors import Uncomputable
from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken


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
        logits, finite = self.decoder.forward_checked(batch, self._store.cache, after_layer if leaving else None)
        sampling = [slice_ for slice_ in plan.slices if slice_.samples]
        rows = zip(sampling, logits.numpy(), finite.tolist(), strict=True)
        return [Sampled(slice_, self._outcome(slice_, row, good)) for slice_, row, good in rows]

    def _outcome(self, slice_: Slice, logits: np.ndarray, finite: bool) -> SampledToken | Uncomputable:
        sequence = slice_.sequence
        if not finite:
            return Uncomputable(f"the logits after token {sequence.known - 1} are not finite")
        return next_token(logits, sequence, self._capacity.eos_token_ids)

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
