"""Turns a Llama-architecture GGUF file into a Hugging Face model directory.

It knows GGUF's names, its quantised blocks (through the gguf library) and the files that Hugging Face tools
expect. It does not know where the file comes from or where the directory belongs: `model.embedded` decides that.

GGUF stores the rows of the query and key projections in the order of interleaved rotary pairs; Hugging Face
rotates halves, so those rows are put back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader

Progress = Callable[[int, int], None]  # (tensors done, tensors in all)

_SUPPORTED_TOKENIZER = ("gpt2", "smollm")
_CONTROL_TOKEN = 3  # GGUF's token type of special tokens

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unpack_gguf(source: Path, directory: Path, progress: Progress | None = None) -> None:
    """Write `source` into the existing, empty `directory`: bfloat16 weights, config, tokenizer, chat template.

    Raises ConfigError if the gguf library is missing or the file is of a kind that is not supported.
    """
    reader = _open(source)
    config = _config(reader)
    tensors = _tensors(reader, config, progress)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(reader).save(str(directory / "tokenizer.json"))
    for name, document in (
        ("config.json", config),
        ("generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}),
        ("tokenizer_config.json", _tokenizer_config(reader)),
    ):
        (directory / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _open(source: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError("unpacking the embedded model needs the package gguf: run `make setup`") from None
    try:
        reader = GGUFReader(source)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{source}: not a readable GGUF file: {error}") from None
    if _value(reader, "general.architecture") != "llama":
        raise ConfigError(f"{source}: architecture {_value(reader, 'general.architecture')!r}: only llama is unpacked")
    kind = (_value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre"))
    if kind != _SUPPORTED_TOKENIZER:
        raise ConfigError(f"{source}: tokenizer {kind}: only {_SUPPORTED_TOKENIZER} is unpacked")
    return reader


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ConfigError(f"GGUF file without the field {key}")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    heads = _value(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens")),
        "hidden_size": _value(reader, "llama.embedding_length"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "head_dim": _value(reader, "llama.embedding_length") // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "rms_norm_eps": _shortest(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(_value(reader, "llama.rope.freq_base")),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tensors(reader: GGUFReader, config: dict[str, Any], progress: Progress | None) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    rotary_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = dequantize(tensor.data, tensor.tensor_type)
        for part, heads in rotary_heads.items():
            if tensor.name.endswith(f".{part}.weight"):
                values = _halves_from_pairs(values, heads)
        tensors[_hugging_face_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
        if progress is not None:
            progress(done, len(reader.tensors))
    return tensors


def _halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder each head's rows from (pair, member) to (member, pair)."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _hugging_face_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, layer, part, suffix = (*name.split("."), "", "", "")[:4]
    if block != "blk" or part not in _LAYER_NAMES or suffix != "weight":
        raise ConfigError(f"GGUF tensor {name}: not a part of a Llama model")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level BPE whose digits stand alone: what GGUF calls the pre-tokenizer "smollm"."""
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _value(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    special = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _value(reader, "tokenizer.ggml.add_bos_token"),
        "add_prefix_space": _value(reader, "tokenizer.ggml.add_space_prefix"),
        "clean_up_tokenization_spaces": False,
        **{name: tokens[_value(reader, key)] for name, key in special.items()},
        "model_max_length": _value(reader, "llama.context_length"),
        "chat_template": _value(reader, "tokenizer.chat_template"),
    }
