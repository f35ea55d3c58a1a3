"""Chooses the next token: a function of (logits, parameters, seed, sequence index, position) and nothing else.

Everything is float64 over one row in vocabulary order, on one thread, so neither the batch nor the thread count can
show. Filters apply in the order temperature, top-k, top-p, min-p; equal logits rank by token id. The choice is the
inverse of the cumulative distribution, in vocabulary order, at one uniform.

The vocabulary is never sorted whole: top-k selects, and top-p sorts only tokens that could belong to its nucleus.
"""

from __future__ import annotations

import numpy as np

from model.randomness import uniform
from pdserve.types import SampledToken, SamplingParams

_FLOOR_MARGIN = 0.5  # so that rounding in a floor cannot cost a token that belongs above it


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    sequence_index: int,
    position: int,
    adjusted: np.ndarray | None = None,
) -> SampledToken:
    """Sample the token at `position` (counted from the prompt's first token).

    `logits`: the model's, fp32 [V]; `adjusted`: what to draw from if that is not the same (see adjustment.py). Logprobs
    are of the model's own.
    """
    drawn_from = logits if adjusted is None else adjusted
    if params.temperature == 0.0:
        token_id = int(np.argmax(drawn_from))
    else:
        token_id = _drawn(drawn_from, params, uniform(params.seed, sequence_index, position))
    if params.logprobs is None:
        return SampledToken(token_id)
    return _with_logprobs(logits, token_id, params.logprobs)


def _drawn(logits: np.ndarray, params: SamplingParams, at: float) -> int:
    """The token where the cumulative distribution of the filtered ones passes `at`, in [0, 1)."""
    tokens, weights = _filtered(logits, params)
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, at * cumulative[-1], side="right"))
    if place == len(weights):  # `at` so near to 1 that the product was rounded up to the whole
        place = int(np.flatnonzero(weights)[-1])
    return place if tokens is None else int(tokens[place])


def _filtered(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray | None, np.ndarray]:
    """The tokens that the filters leave, in vocabulary order (None: all), and their unnormalised probabilities."""
    tokens = None
    if 0 < params.top_k < len(logits):
        tokens = np.sort(_most_likely(logits, params.top_k))
    kept = logits if tokens is None else logits[tokens]
    weights = np.exp((kept.astype(np.float64) - float(logits.max())) / params.temperature)
    if params.top_p < 1.0:
        tokens, weights = _chosen(tokens, weights, np.sort(_nucleus(weights, params.top_p)))
    if params.min_p > 0.0:
        tokens, weights = _chosen(tokens, weights, np.flatnonzero(weights >= params.min_p * weights.max()))
    return tokens, weights


def _chosen(tokens: np.ndarray | None, weights: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (places if tokens is None else tokens[places]), weights[places]


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Where the fewest of the most likely tokens are that reach `top_p` of the mass.

    All tokens below the floor together weigh less than 1 - top_p, so those above it reach top_p.
    """
    mass = weights.sum()
    candidates = np.flatnonzero(weights >= (1.0 - top_p) * mass / len(weights) * _FLOOR_MARGIN)
    ranked = candidates[np.argsort(-weights[candidates], kind="stable")]
    return ranked[: int(np.searchsorted(np.cumsum(weights[ranked]), top_p * mass)) + 1]


def _most_likely(logits: np.ndarray, count: int) -> np.ndarray:
    """The `count` tokens with the highest logits, highest first, equal ones by token id."""
    if count >= len(logits):
        return np.argsort(-logits, kind="stable")
    lowest = np.partition(logits, len(logits) - count)[len(logits) - count]
    candidates = np.flatnonzero(logits >= lowest)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def _with_logprobs(logits: np.ndarray, token_id: int, top_count: int) -> SampledToken:
    exact = logits.astype(np.float64)
    highest = exact.max()
    log_normaliser = highest + np.log(np.sum(np.exp(exact - highest)))
    ranked = _most_likely(logits, top_count) if top_count else ()
    top = tuple((int(token), float(exact[token] - log_normaliser)) for token in ranked)
    return SampledToken(token_id, float(exact[token_id] - log_normaliser), top)
