"""Adjusts logits by what was said before: a function of (logits, parameters, prompt ids, output ids) and nothing else.

Counts are taken anew for every token, so that a sequence that goes on at another worker is adjusted the same. In this
order: logit_bias, repetition_penalty, frequency_penalty, presence_penalty, min_tokens. The sampler's temperature and
filters come afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdserve.types import SamplingParams


def needs_adjustment(params: SamplingParams, output_count: int) -> bool:
    """Whether `adjusted` would change anything; most requests have nothing to adjust."""
    return _penalises(params) or bool(params.logit_bias) or output_count < params.min_tokens


def adjusted(
    logits: np.ndarray,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_token_ids: Sequence[int],
) -> np.ndarray:
    """A new fp32 [V]: `logits` with biases and penalties applied, and forbidden tokens at -inf."""
    logits = logits.copy()
    for token_id, bias in params.logit_bias:
        logits[token_id] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array([*prompt_ids, *output_ids], dtype=np.int64))
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if params.frequency_penalty or params.presence_penalty:
        said, counts = np.unique(np.array(output_ids, dtype=np.int64), return_counts=True)
        logits[said] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        logits[said] -= np.float32(params.presence_penalty)
    if len(output_ids) < params.min_tokens:
        eos = () if params.ignore_eos else eos_token_ids
        logits[[*params.stop_token_ids, *eos]] = -np.inf
    return logits


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
