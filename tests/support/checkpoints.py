"""Writes small checkpoints with random weights, as real Hugging Face directories.

The tensors are written without transformers, whose import takes seconds; that they are what transformers expects
is what the golden tests show. Weights are scaled so that activations stay near 1 and logits differ.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from model.embedded import embedded_model_directory

Family = Literal["llama", "qwen2", "qwen3"]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class TinyShape:
    """A tiny decoder. `head_dim` 0 is hidden_size / heads; `rope_scaling` as in config.json."""

    vocab_size: int = 257
    hidden_size: int = 64
    intermediate_size: int = 112
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    max_position: int = 1024
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None)
    attention_bias: bool = False

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.heads


def write_tiny_checkpoint(
    directory: Path,
    family: Family,
    *,
    seed: int = 0,
    tied: bool = False,
    shards: int = 1,
    shape: TinyShape | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write config.json and `shards` safetensors files into `directory` (made if absent); returns it."""
    shape = TinyShape() if shape is None else shape
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(family, shape, tied, dtype))
    tensors = _random_tensors(family, shape, tied, torch.Generator().manual_seed(seed))
    _write_tensors(directory, {name: tensor.to(dtype) for name, tensor in tensors.items()}, shards)
    return directory


def write_small_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    """A random Llama that runs quickly behind the embedded model's tokenizer and chat template, for tests of whole
    clusters: 4 layers, hidden size 128, 4 heads of 32 on 2 KV heads."""
    embedded = embedded_model_directory()
    vocab_size = json.loads((embedded / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    shape = TinyShape(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=256, layers=4, head_dim=32, max_position=4096
    )
    write_tiny_checkpoint(directory, "llama", seed=seed, shape=shape)
    for name in _TEXT_FILES:
        shutil.copyfile(embedded / name, directory / name)
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Set keys of a checkpoint's config.json; None takes a key out."""
    path = directory / "config.json"
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    _write_json(path, {key: value for key, value in document.items() if value is not None})


def _config(family: Family, shape: TinyShape, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape.head_dim:
        config["head_dim"] = shape.head_dim
    elif family == "qwen3":
        config["head_dim"] = shape.head_size
    if shape.rope_scaling is not None:
        config["rope_scaling"] = dict(shape.rope_scaling)
    if family != "qwen2":
        config["attention_bias"] = shape.attention_bias
    return config


def _random_tensors(
    family: Family, shape: TinyShape, tied: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=generator)

    hidden, q_rows, kv_rows = shape.hidden_size, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    # Small beside what the layers add: a tied head would otherwise answer every token with itself.
    embedding = 0.1 * torch.randn(shape.vocab_size, hidden, generator=generator)
    tensors = {"model.embed_tokens.weight": embedding}
    for index in range(shape.layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            tensors[f"{attention}.{name}.weight"] = matrix(rows, hidden)
            if family == "qwen2" or shape.attention_bias:
                tensors[f"{attention}.{name}.bias"] = 0.2 * torch.randn(rows, generator=generator)
        tensors[f"{attention}.o_proj.weight"] = matrix(hidden, q_rows)
        if family != "qwen2" and shape.attention_bias:
            tensors[f"{attention}.o_proj.bias"] = 0.2 * torch.randn(hidden, generator=generator)
        if family == "qwen3":
            tensors[f"{attention}.q_norm.weight"] = norm(shape.head_size)
            tensors[f"{attention}.k_norm.weight"] = norm(shape.head_size)
        tensors[f"{mlp}.gate_proj.weight"] = matrix(shape.intermediate_size, hidden)
        tensors[f"{mlp}.up_proj.weight"] = matrix(shape.intermediate_size, hidden)
        tensors[f"{mlp}.down_proj.weight"] = matrix(hidden, shape.intermediate_size)
        tensors[f"model.layers.{index}.input_layernorm.weight"] = norm(hidden)
        tensors[f"model.layers.{index}.post_attention_layernorm.weight"] = norm(hidden)
    tensors["model.norm.weight"] = norm(hidden)
    if not tied:
        tensors["lm_head.weight"] = 2.0 * matrix(shape.vocab_size, hidden)
    return tensors


def _write_tensors(directory: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}  # dealt out: merged products span shards
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total_bytes}, "weight_map": weight_map},
    )


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
