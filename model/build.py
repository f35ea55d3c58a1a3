"""Makes the executor of a checkpoint and settings, on which an engine stands, and its numerics fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

import kernels
from kernels.ops import SequenceRows, StepBatch
from model.config import ModelConfig
from model.decoder import Decoder, kv_format_of
from model.executor import ModelExecutor
from model.weights import weights_digest
from pdserve.config import EngineConfig
from pdserve.errors import ConfigError
from pdserve.kv_format import KVFormat

_PROBE_TOKENS = 40  # more than one slab of rows and one block, so that the probe takes the paths that matter


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """An executor and what identifies its results. `weights` alone identifies the model. `max_model_len`: the most
    tokens that prompt and output have together, as configured."""

    executor: ModelExecutor
    fingerprint: str
    weights: str
    max_model_len: int


def build_model(
    directory: Path, kernels_name: str, dtype_name: str, config: EngineConfig, cpu_path: str = "auto"
) -> BuiltModel:
    """Load a checkpoint and lay out its KV store. Raises ConfigError where they do not fit together."""
    ops = kernels.select(kernels_name, cpu_path)
    if config.threads > 0:
        torch.set_num_threads(config.threads)
        ops.set_threads(config.threads)
    dtype = ops.default_dtype() if dtype_name == "auto" else getattr(torch, dtype_name)
    model = ModelConfig.from_hf(directory)
    max_model_len = _max_model_len(model, config)
    block_count = _block_count(kv_format_of(model, dtype), config)
    served = min(max_model_len, block_count * config.block_tokens)  # a checkpoint may allow millions
    decoder = Decoder.load(directory, ops, dtype, max(served, _PROBE_TOKENS))
    executor = ModelExecutor(decoder, decoder.cache_shape(block_count, config.block_tokens))
    weights = weights_digest(directory)
    return BuiltModel(executor, _fingerprint(decoder, weights), weights, max_model_len)


def _block_count(kv_format: KVFormat, config: EngineConfig) -> int:
    """How many blocks the memory for KV holds."""
    block_bytes = config.block_tokens * kv_format.token_bytes
    block_count = config.kv_cache_mb * 2**20 // block_bytes
    if block_count < 2:
        raise ConfigError(
            f"engine.kv_cache_mb = {config.kv_cache_mb}: holds {block_count} blocks of {block_bytes} bytes; "
            f"at least {-(-2 * block_bytes // 2**20)} are needed"
        )
    return block_count


def _max_model_len(model: ModelConfig, config: EngineConfig) -> int:
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"engine.max_model_len = {config.max_model_len}: the model was trained for {model.max_position}"
        )
    return config.max_model_len or model.max_position


def _fingerprint(decoder: Decoder, weights: str) -> str:
    """Equal fingerprints mean bit-equal results: of weights, dtype, KV format, kernels, and the bits of a probe run."""
    ops, dtype = decoder.kernels, str(decoder.dtype).removeprefix("torch.")
    parts = (weights, dtype, decoder.kv_format.identity, ops.name, ops.identity(), _probe(decoder))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _probe(decoder: Decoder) -> str:
    """Digest of the logits of a fixed prompt in a cache of its own."""
    count = min(_PROBE_TOKENS, decoder.max_position)
    batch = StepBatch(
        token_ids=[position * 7919 % decoder.config.vocab_size for position in range(count)],
        sequences=(SequenceRows(0, count, 0, (0,)),),
        logit_rows=(count - 1,),
    )
    logits = decoder.forward(batch, decoder.kernels.make_cache(decoder.cache_shape(1, count)))
    return hashlib.blake2b(logits.numpy().tobytes(), digest_size=16).hexdigest()
