"""A decoder's parameters, and how they are put together from a checkpoint's stream of tensors.

Products that share their input are merged (q, k and v; gate and up), and each is packed the moment its last part has
come and the parts are dropped, so that loading needs little more memory than the parameters themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.ops import DecoderParameters, Kernels, LayerParameters
from model.config import ModelConfig
from model.rotary import rotary_tables
from model.weights import iterate_weights
from pdserve.errors import ConfigError

_STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head"
_RECOMPUTED_SUFFIX = ".rotary_emb.inv_freq"  # old checkpoints carry these buffers


def load_parameters(
    directory: Path, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, max_position: int
) -> DecoderParameters:
    """Read all tensors of a checkpoint; matrices become `dtype`, norms and biases float32. There are angles for
    positions [0, max_position).

    Raises ConfigError for a tensor that is missing, left over, or of another shape than the config says.
    """
    assembly = _Assembly(directory, config, kernels, dtype)
    for name, tensor in iterate_weights(directory):
        assembly.add(name, tensor)
    return assembly.finish(max_position)


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear merged from parts that share its input: each part's prefix and rows, in order."""

    parts: dict[str, int]
    in_features: int
    bias: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        weights = {f"{part}.weight": (rows, self.in_features) for part, rows in self.parts.items()}
        return weights | ({f"{part}.bias": (rows,) for part, rows in self.parts.items()} if self.bias else {})


class _Assembly:
    """Takes tensors in any order; holds those whose product is not complete yet."""

    def __init__(self, directory: Path, config: ModelConfig, kernels: Kernels, dtype: torch.dtype) -> None:
        self._directory = directory
        self._config = config
        self._kernels = kernels
        self._dtype = dtype
        self._linears = _linears(config)
        self._linear_of = {name: key for key, linear in self._linears.items() for name in linear.shapes()}
        self._awaited = _vectors(config) | {_EMBEDDING: (config.vocab_size, config.hidden_size)}
        for linear in self._linears.values():
            self._awaited |= linear.shapes()
        self._held: dict[str, torch.Tensor] = {}
        self._packed: dict[str, Any] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name.endswith(_RECOMPUTED_SUFFIX) or (name == f"{_HEAD}.weight" and self._config.tied_head):
            return
        self._check(name, tensor)
        del self._awaited[name]
        self._held[name] = tensor.to(self._dtype if tensor.dim() == 2 else torch.float32, copy=True)
        key = self._linear_of.get(name)
        if key is not None and not self._linears[key].shapes().keys() - self._held.keys():
            self._pack(key)

    def finish(self, max_position: int) -> DecoderParameters:
        if self._awaited:
            missing = sorted(self._awaited)
            raise ConfigError(f"{self._directory}: {len(missing)} tensors are missing, the first is {missing[0]}")
        config, embedding = self._config, self._held[_EMBEDDING]
        cos, sin = rotary_tables(config.rope, config.head_dim, max_position)
        return DecoderParameters(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            cos=cos,
            sin=sin,
            embedding=embedding,
            layers=tuple(self._layer(index) for index in range(config.layer_count)),
            final_norm=self._held[_FINAL_NORM],
            head=self._kernels.pack(embedding, None) if config.tied_head else self._packed[_HEAD],
        )

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        shape = self._awaited.get(name)
        if shape is None:
            raise ConfigError(f"{self._directory}: tensor {name} has no place in a {self._config.family} decoder")
        if tuple(tensor.shape) != shape:
            got = list(tensor.shape)
            raise ConfigError(f"{self._directory}: tensor {name} has shape {got}; config.json says {list(shape)}")
        if tensor.dtype not in _STORED_DTYPES:
            raise ConfigError(f"{self._directory}: tensor {name} is {tensor.dtype}: must be 32 or 16 bit floats")

    def _pack(self, key: str) -> None:
        linear = self._linears[key]
        weight = _joined([self._held.pop(f"{part}.weight") for part in linear.parts])
        bias = _joined([self._held.pop(f"{part}.bias") for part in linear.parts]) if linear.bias else None
        self._packed[key] = self._kernels.pack(weight, bias)

    def _layer(self, index: int) -> LayerParameters:
        prefix = f"model.layers.{index}"
        return LayerParameters(
            input_norm=self._held[f"{prefix}.input_layernorm.weight"],
            qkv=self._packed[f"{prefix}.qkv"],
            q_norm=self._held.get(f"{prefix}.self_attn.q_norm.weight"),
            k_norm=self._held.get(f"{prefix}.self_attn.k_norm.weight"),
            o=self._packed[f"{prefix}.o"],
            post_attention_norm=self._held[f"{prefix}.post_attention_layernorm.weight"],
            gate_up=self._packed[f"{prefix}.gate_up"],
            down=self._packed[f"{prefix}.down"],
        )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _linears(config: ModelConfig) -> dict[str, _Linear]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = {} if config.tied_head else {_HEAD: _Linear({_HEAD: config.vocab_size}, hidden)}
    for index in range(config.layer_count):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv_parts = {f"{attention}.q_proj": q_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows}
        gate_up_parts = {f"{mlp}.gate_proj": intermediate, f"{mlp}.up_proj": intermediate}
        linears[f"{prefix}.qkv"] = _Linear(qkv_parts, hidden, config.qkv_bias)
        linears[f"{prefix}.o"] = _Linear({f"{attention}.o_proj": hidden}, q_rows, config.o_bias)
        linears[f"{prefix}.gate_up"] = _Linear(gate_up_parts, hidden)
        linears[f"{prefix}.down"] = _Linear({f"{mlp}.down_proj": hidden}, intermediate)
    return linears


def _vectors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The norms' weights and their shapes."""
    shapes: dict[str, tuple[int, ...]] = {_FINAL_NORM: (config.hidden_size,)}
    for index in range(config.layer_count):
        prefix = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (config.hidden_size,)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                shapes[f"{prefix}.self_attn.{norm}.weight"] = (config.head_dim,)
    return shapes
