"""One decoder for the Llama, Qwen2 and Qwen3 families; their differences are data in its parameters.

A forward pass writes each layer's K and V into the cache before it attends, so that a row sees its own position
through the cache whatever phase it belongs to. `forward_by_operations` is the pass to read; kernels that have it in one
call give the same bits. The decoder keeps no state between passes and knows no requests, blocks or sampling:
`kernels.ops.StepBatch` says which rows stand where.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kernels.ops import AfterLayer, CacheShape, DecoderParameters, Kernels, LayerParameters, StepBatch, item_of
from model.config import ModelConfig
from model.parameters import load_parameters
from pdserve.errors import InternalError
from pdserve.kv_format import KVFormat


class Decoder:
    """Parameters and the pass over them.

    `config`: the checkpoint's shape. `dtype`: of weights and of K and V. `max_position`: positions [0, max_position)
    can be computed; the checkpoint may allow more.
    """

    def __init__(
        self, config: ModelConfig, parameters: DecoderParameters, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.max_position = len(parameters.cos)
        self._parameters = parameters
        self._fused = kernels.fuse(parameters)

    @classmethod
    def load(cls, directory: Path, kernels: Kernels, dtype: torch.dtype, max_position: int | None = None) -> Decoder:
        """Load a Hugging Face directory, converting its weights to `dtype`. `max_position`: no more positions than that
        will be computed; None: all that the checkpoint allows. Raises ConfigError."""
        config = ModelConfig.from_hf(directory)
        positions = min(config.max_position, max_position or config.max_position)
        return cls(config, load_parameters(directory, config, kernels, dtype, positions), kernels, dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a pass reads, as they are packed: the head's included, the embedding's not."""
        layers = ((layer.qkv, layer.o, layer.gate_up, layer.down) for layer in self._parameters.layers)
        return sum(packed.nbytes for layer in layers for packed in layer) + self._parameters.head.nbytes

    @property
    def kv_format(self) -> KVFormat:
        """What its keys and values look like in a cache and on the wire."""
        return kv_format_of(self.config, self.dtype)

    def cache_shape(self, block_count: int, block_tokens: int) -> CacheShape:
        """The shape of a KV cache for this decoder."""
        return CacheShape(self.kv_format, block_count, block_tokens)

    def forward(self, batch: StepBatch, cache: Any, after_layer: AfterLayer | None = None) -> torch.Tensor:
        """Compute every row of `batch`; returns the logits of its `logit_rows`, float32 [L, vocab_size].

        `after_layer(layer)` is called as soon as that layer's K and V of all rows are in `cache`, before its
        attention: they can leave while the rest of the layer and the next ones are computed.
        """
        return self.forward_checked(batch, cache, after_layer)[0]

    def forward_checked(
        self, batch: StepBatch, cache: Any, after_layer: AfterLayer | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and whether each row of logits is finite, bool [L]. One that is not harms no other row."""
        longest = max((rows.start + rows.count for rows in batch.sequences), default=0)
        if longest > self.max_position:  # there are no angles for it
            raise InternalError(f"the step has position {longest - 1}: {self.max_position} can be computed")
        if self._fused is not None:
            return self._fused(batch, cache, after_layer)
        logits = self.forward_by_operations(batch, cache, after_layer)
        return logits, torch.isfinite(logits).all(dim=-1)

    def forward_by_operations(
        self, batch: StepBatch, cache: Any, after_layer: AfterLayer | None = None
    ) -> torch.Tensor:
        """As `forward`, one operation of the kernels at a time."""
        kernels, parameters = self.kernels, self._parameters
        eps, positions, slots = parameters.rms_norm_eps, batch.positions(), batch.slots(cache.shape.block_tokens)
        x = parameters.embedding[torch.tensor(batch.token_ids)].float()
        for index, layer in enumerate(parameters.layers):
            q, k, v = self._qkv(layer, kernels.rms_norm(x, layer.input_norm, eps), positions)
            kernels.write_kv(cache, index, slots, k, v)
            if after_layer is not None:
                after_layer(index)
            attended = kernels.attention(q, cache, index, batch.sequences, parameters.scale)
            x = x + kernels.linear(attended.flatten(1), layer.o)
            hidden = kernels.rms_norm(x, layer.post_attention_norm, eps)
            x = x + kernels.linear(kernels.silu_mul(kernels.linear(hidden, layer.gate_up)), layer.down)
        x = x[torch.tensor(batch.logit_rows, dtype=torch.int64)]
        return kernels.linear(kernels.rms_norm(x, parameters.final_norm, eps), parameters.head)

    def _qkv(
        self, layer: LayerParameters, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [M, Hq, D] and k, v [M, Hkv, D], q and k normed (where the family does) and turned."""
        kernels, parameters = self.kernels, self._parameters
        merged = kernels.linear(hidden, layer.qkv).unflatten(1, (-1, parameters.head_dim))
        q, k, v = merged.split((parameters.heads, parameters.kv_heads, parameters.kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, parameters.rms_norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, parameters.rms_norm_eps)
        q = kernels.rotary(q, positions, parameters.cos, parameters.sin)
        k = kernels.rotary(k, positions, parameters.cos, parameters.sin)
        return q, k, v


def kv_format_of(config: ModelConfig, dtype: torch.dtype) -> KVFormat:
    """What a model's keys and values of `dtype` look like in a cache and on the wire."""
    return KVFormat(config.layer_count, config.kv_heads, config.head_dim, item_of(dtype))
