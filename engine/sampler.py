"""Chooses the next token: a function of (logits, parameters, seed, sequence index, position) and nothing else.

Everything is float64 over one row in vocabulary order, on one thread, so neither the batch nor the thread count can
show. Filters apply in the order temperature, top-k, top-p, min-p; equal probabilities rank by token id. The choice
is the inverse of the cumulative distribution, in vocabulary order, at one uniform.
"""

from __future__ import annotations

import numpy as np

from engine.randomness import uniform
from pdserve.types import SampledToken, SamplingParams


def sample(logits: np.ndarray, params: SamplingParams, sequence_index: int, position: int) -> SampledToken:
    """Sample from fp32 logits [V] the token at `position` (counted from the prompt's first token)."""
    if params.temperature == 0.0:
        token_id = int(np.argmax(logits))
    else:
        probabilities = _filtered(logits.astype(np.float64), params)
        cumulative = np.cumsum(probabilities)
        threshold = uniform(params.seed, sequence_index, position) * cumulative[-1]
        token_id = int(np.searchsorted(cumulative, threshold, side="right"))
        token_id = min(token_id, int(np.flatnonzero(probabilities)[-1]))
    if params.logprobs is None:
        return SampledToken(token_id)
    return _with_logprobs(logits.astype(np.float64), token_id, params.logprobs)


def _filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Unnormalised probabilities [V], 0 where a filter removed the token."""
    scaled = (logits - logits.max()) / params.temperature
    probabilities = np.exp(scaled)
    if 0 < params.top_k < len(probabilities) or params.top_p < 1.0:
        probabilities = _keep_top(probabilities, params.top_k, params.top_p)
    if params.min_p > 0.0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    return probabilities


def _keep_top(probabilities: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Keep the `top_k` most likely (0: all), then the fewest of them that reach `top_p` of their mass."""
    ranked = np.argsort(-probabilities, kind="stable")
    if top_k > 0:
        ranked = ranked[:top_k]
    if top_p < 1.0:
        mass = np.cumsum(probabilities[ranked])
        ranked = ranked[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    kept = np.zeros_like(probabilities)
    kept[ranked] = probabilities[ranked]
    return kept


def _with_logprobs(logits: np.ndarray, token_id: int, top_count: int) -> SampledToken:
    highest = logits.max()
    log_normaliser = highest + np.log(np.sum(np.exp(logits - highest)))
    ranked = np.argsort(-logits, kind="stable")[:top_count]
    top = tuple((int(i), float(logits[i] - log_normaliser)) for i in ranked)
    return SampledToken(token_id, float(logits[token_id] - log_normaliser), top)
