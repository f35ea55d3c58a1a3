"""Runs a step's plan: builds the batch, calls the model, samples. Knows no queues and no owners.

After each layer the sequences that export their KV are told, so that it can leave while the next layer computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.plan import Slice, StepPlan
from engine.sequence import Sequence
from kernels.ops import SequenceRows, StepBatch
from model.adjustment import adjusted, needs_adjustment
from model.decoder import Decoder
from model.kv_store import KVStore
from model.sampler import sample
from pdserve import logs
from pdserve.errors import InternalError
from pdserve.types import SampledToken

_log = logs.logger("engine")


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token sampled after a slice, or why there is none."""

    part: Slice
    token: SampledToken | InternalError


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

        batch = _batch(plan.slices)
        rows = self._decoder.forward(batch, self._store.cache, after_layer if exporting else None).numpy()
        sampling = [part for part in plan.slices if part.samples]
        return [Sampled(part, self._sample(rows[i], part.sequence)) for i, part in enumerate(sampling)]

    def _sample(self, logits: np.ndarray, sequence: Sequence) -> SampledToken | InternalError:
        """What fails here is one sequence's matter."""
        try:
            return self._sampled(logits, sequence)
        except Exception as error:  # noqa: BLE001 - as for a step; the others have their tokens
            _log.exception("sampling failed", owner=sequence.owner)
            return InternalError(f"sampling failed: {type(error).__name__}: {error}")

    def _sampled(self, logits: np.ndarray, sequence: Sequence) -> SampledToken:
        params, border = sequence.params, sequence.prompt_count
        drawn_from = None
        if needs_adjustment(params, sequence.output_count):
            prompt_ids, output_ids = sequence.token_ids[:border], sequence.token_ids[border:]
            drawn_from = adjusted(logits, params, prompt_ids, output_ids, self._decoder.config.eos_token_ids)
        return sample(logits, params, sequence.index, sequence.known, drawn_from)


def _batch(slices: tuple[Slice, ...]) -> StepBatch:
    token_ids: list[int] = []
    sequences: list[SequenceRows] = []
    logit_rows: list[int] = []
    for part in slices:
        sequences.append(SequenceRows(len(token_ids), part.count, part.start, part.sequence.blocks))
        token_ids += part.sequence.token_ids[part.start : part.stop]
        if part.samples:
            logit_rows.append(len(token_ids) - 1)
    return StepBatch(token_ids, tuple(sequences), logit_rows)
