"""Runs a step's plan: builds the batch's tensors, calls the model, samples. Knows no queues and no owners.

After each layer the sequences that export their KV are told, so that it can leave while the next layer computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kv_store import KVStore
from engine.plan import Slice, StepPlan
from engine.sampler import sample
from kernels.ops import SequenceRows, StepBatch
from model.decoder import Decoder
from pdserve.types import SampledToken


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token sampled after a slice."""

    part: Slice
    token: SampledToken


class Runner:
    """A model and its KV store."""

    def __init__(self, decoder: Decoder, store: KVStore) -> None:
        self._decoder = decoder
        self._store = store

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Compute the plan's slices; the tokens of those that sample, in the plan's order."""
        exporting = [part for part in plan.slices if part.sequence.exports_kv]

        def after_layer(layer: int) -> None:
            for part in exporting:
                part.sequence.sink.on_layer(part.sequence, layer, part.start, part.stop)

        batch = self._batch(plan.slices)
        rows = self._decoder.forward(batch, self._store.cache, after_layer if exporting else None).numpy()
        sampling = [part for part in plan.slices if part.samples]
        return [
            Sampled(part, sample(rows[i], part.sequence.params, part.sequence.index, part.sequence.known))
            for i, part in enumerate(sampling)
        ]

    def _batch(self, slices: tuple[Slice, ...]) -> StepBatch:
        token_ids: list[int] = []
        positions, slots, sequences, logit_rows = [], [], [], []
        for part in slices:
            blocks = torch.tensor(part.sequence.blocks, dtype=torch.int64)
            sequences.append(SequenceRows(len(token_ids), part.count, part.start, blocks))
            token_ids.extend(part.sequence.token_ids[part.start : part.stop])
            positions.append(torch.arange(part.start, part.stop))
            slots.append(self._store.slots(blocks, part.start, part.stop))
            if part.samples:
                logit_rows.append(len(token_ids) - 1)
        return StepBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            sequences=tuple(sequences),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        )
