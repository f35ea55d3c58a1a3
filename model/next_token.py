"""The token after a sequence's known ones, from the model's logits: adjustment, then the sampler."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np

from engine.sequence import Sequence
from model.adjustment import adjusted, needs_adjustment
from model.sampler import sample
from pdserve import logs
from pdserve.errors import Uncomputable
from pdserve.types import SampledToken

_log = logs.logger("model")


def next_token(logits: np.ndarray, sequence: Sequence, eos_token_ids: ListLike[int]) -> SampledToken | Uncomputable:
    """Sample from fp32 [V]. What fails here ends this sequence alone: the others of its step have their tokens."""
    try:
        return _sampled(logits, sequence, eos_token_ids)
    except Exception as error:  # noqa: BLE001 - as for a step: it must end its request, not the worker
        _log.exception("sampling failed", owner=sequence.owner)
        return Uncomputable(f"sampling failed: {type(error).__name__}: {error}")


def _sampled(logits: np.ndarray, sequence: Sequence, eos_token_ids: ListLike[int]) -> SampledToken:
    params, border = sequence.params, sequence.prompt_count
    drawn_from = None
    if needs_adjustment(params, sequence.output_count):
        prompt_ids, output_ids = sequence.token_ids[:border], sequence.token_ids[border:]
        drawn_from = adjusted(logits, params, prompt_ids, output_ids, eos_token_ids)
    return sample(logits, params, sequence.index, sequence.known, drawn_from)
