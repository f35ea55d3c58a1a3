"""Puts an engine together from a checkpoint and settings, and computes its numerics fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

import kernels
from engine.engine import Engine
from kernels.ops import CacheShape, Kernels, SequenceRows, StepBatch
from model.decoder import Decoder
from model.kv_store import KVStore
from model.weights import weights_digest
from pdserve.config import EngineConfig
from pdserve.errors import ConfigError

_PROBE_TOKENS = 40  # more than one slab of rows and one block, so that the probe takes the paths that matter


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what identifies its results. `weights` alone identifies the model."""

    engine: Engine
    fingerprint: str
    weights: str
    dtype: str


def build_engine(
    directory: Path, kernels_name: str, dtype_name: str, config: EngineConfig, cpu_path: str = "auto"
) -> BuiltEngine:
    """Load a checkpoint and lay out its KV store. Raises ConfigError where they do not fit together."""
    ops = kernels.select(kernels_name, cpu_path)
    if config.threads > 0:
        torch.set_num_threads(config.threads)
        ops.set_threads(config.threads)
    dtype = ops.default_dtype() if dtype_name == "auto" else getattr(torch, dtype_name)
    decoder = Decoder.load(directory, ops, dtype)
    store = KVStore(ops, _cache_shape(decoder, config))
    max_model_len = _max_model_len(decoder, config)
    weights = weights_digest(directory)
    dtype_label = str(dtype).removeprefix("torch.")
    return BuiltEngine(
        engine=Engine(decoder, store, config, max_model_len),
        fingerprint=_fingerprint(decoder, ops, weights, dtype_label),
        weights=weights,
        dtype=dtype_label,
    )


def _cache_shape(decoder: Decoder, config: EngineConfig) -> CacheShape:
    block_bytes = decoder.cache_shape(1, config.block_tokens).block_bytes
    block_count = config.kv_cache_mb * 2**20 // block_bytes
    if block_count < 2:
        raise ConfigError(
            f"engine.kv_cache_mb = {config.kv_cache_mb}: holds {block_count} blocks of {block_bytes} bytes; "
            f"at least {-(-2 * block_bytes // 2**20)} are needed"
        )
    return decoder.cache_shape(block_count, config.block_tokens)


def _max_model_len(decoder: Decoder, config: EngineConfig) -> int:
    longest = decoder.config.max_position
    if config.max_model_len > longest:
        raise ConfigError(f"engine.max_model_len = {config.max_model_len}: the model was trained for {longest}")
    return config.max_model_len or longest


def _fingerprint(decoder: Decoder, ops: Kernels, weights: str, dtype: str) -> str:
    """Equal fingerprints mean bit-equal results: weights, dtype, kernels, and the output bits of a small probe run."""
    parts = (weights, dtype, ops.name, ops.identity(), _probe(decoder, ops))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _probe(decoder: Decoder, ops: Kernels) -> str:
    """Digest of the logits of a fixed prompt in a cache of its own."""
    count = min(_PROBE_TOKENS, decoder.max_position)
    batch = StepBatch(
        token_ids=[position * 7919 % decoder.config.vocab_size for position in range(count)],
        sequences=(SequenceRows(0, count, 0, (0,)),),
        logit_rows=(count - 1,),
    )
    logits = decoder.forward(batch, ops.make_cache(decoder.cache_shape(1, count)))
    return hashlib.blake2b(logits.numpy().tobytes(), digest_size=16).hexdigest()
