"""One decoder for the Llama, Qwen2 and Qwen3 families; their differences are data in ModelConfig.

A forward pass writes each layer's K and V into the cache before it attends, so that a row sees its own position
through the cache whatever phase it belongs to. The decoder keeps no state between passes and knows no requests,
blocks or sampling: `kernels.ops.StepBatch` says which rows stand where.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.ops import CacheShape, Kernels, StepBatch
from model.config import ModelConfig
from model.parameters import LayerParameters, Parameters, load_parameters
from model.rotary import rotary_tables
from pdserve.errors import InternalError


class Decoder:
    """Parameters and the pass over them.

    `config`: the checkpoint's shape. `dtype`: of activations and of K and V. `max_position`: positions
    [0, max_position) can be computed.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, kernels: Kernels, dtype: torch.dtype) -> None:
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.max_position = config.max_position
        self._parameters = parameters
        self._cos, self._sin = rotary_tables(config.rope, config.head_dim, config.max_position)
        self._scale = config.head_dim**-0.5

    @classmethod
    def load(cls, directory: Path, kernels: Kernels, dtype: torch.dtype) -> Decoder:
        """Load a Hugging Face directory, converting its weights to `dtype`. Raises ConfigError."""
        config = ModelConfig.from_hf(directory)
        return cls(config, load_parameters(directory, config, kernels, dtype), kernels, dtype)

    def cache_shape(self, block_count: int, block_tokens: int) -> CacheShape:
        """The shape of a KV cache for this decoder."""
        config = self.config
        return CacheShape(config.layer_count, block_count, block_tokens, config.kv_heads, config.head_dim, self.dtype)

    def forward(self, batch: StepBatch, cache: Any, after_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Compute every row of `batch`; returns the logits of its `logit_rows`, float32 [L, vocab_size].

        `after_layer(layer)` is called as soon as that layer's K and V of all rows are in `cache`, before its
        attention: they can leave while the rest of the layer and the next ones are computed. Raises InternalError
        naming the rows if logits are not finite.
        """
        kernels, config, parameters = self.kernels, self.config, self._parameters
        x = parameters.embedding[batch.token_ids]
        for index, layer in enumerate(parameters.layers):
            hidden = kernels.rms_norm(x, layer.input_norm, config.rms_norm_eps)
            q, k, v = self._qkv(layer, hidden, batch.positions)
            kernels.write_kv(cache, index, batch.slots, k, v)
            if after_layer is not None:
                after_layer(index)
            attended = kernels.attention(q, cache, index, batch.sequences, self._scale)
            x = x + kernels.linear(attended.flatten(1), layer.o)
            hidden = kernels.rms_norm(x, layer.post_attention_norm, config.rms_norm_eps)
            x = x + kernels.linear(kernels.silu_mul(kernels.linear(hidden, layer.gate_up)), layer.down)
        x = kernels.rms_norm(x[batch.logit_rows], parameters.final_norm, config.rms_norm_eps)
        logits = kernels.logits(x, parameters.head)
        _check_finite(logits, batch.logit_rows)
        return logits

    def _qkv(
        self, layer: LayerParameters, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [M, Hq, D] and k, v [M, Hkv, D], q and k normed (where the family does) and turned."""
        kernels, config = self.kernels, self.config
        merged = kernels.linear(hidden, layer.qkv).unflatten(1, (-1, config.head_dim))
        q, k, v = merged.split((config.heads, config.kv_heads, config.kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q = kernels.rotary(q, positions, self._cos, self._sin)
        k = kernels.rotary(k, positions, self._cos, self._sin)
        return q, k, v


def _check_finite(logits: torch.Tensor, rows: torch.Tensor) -> None:
    finite = torch.isfinite(logits).all(dim=-1)
    if not finite.all():
        raise InternalError(f"logits are not finite in rows {rows[~finite].tolist()} of the step")
