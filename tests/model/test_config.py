"""Reading config.json: both generations of Hugging Face keys, and one clear line for what is not supported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.adjustment import adjusted
from model.config import ModelConfig, RopeConfig
from pdserve.errors import ConfigError
from pdserve.types import SamplingParams
from support.checkpoints import TinyShape, edit_config, write_tiny_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(directory: Path, **changes: Any) -> ModelConfig:
    edit_config(directory, **changes)
    return ModelConfig.from_hf(directory)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path, "llama", shape=TinyShape(layers=1))


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path, "qwen2", shape=TinyShape(layers=1))


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path, "qwen3", shape=TinyShape(layers=1, head_dim=32))


def test_a_llama(llama: Path) -> None:
    assert ModelConfig.from_hf(llama) == ModelConfig(
        family="llama",
        vocab_size=257,
        hidden_size=64,
        intermediate_size=112,
        layer_count=1,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position=1024,
        rope=RopeConfig(theta=10_000.0),
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
        tied_head=False,
        dtype="float32",
        eos_token_ids=(2,),
    )


def test_what_makes_a_qwen2(qwen2: Path) -> None:
    config = ModelConfig.from_hf(qwen2)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False)


def test_what_makes_a_qwen3(qwen3: Path) -> None:
    config = ModelConfig.from_hf(qwen3)
    assert (config.qkv_bias, config.o_bias, config.qk_norm, config.head_dim) == (False, False, True, 32)
    assert read(qwen3, head_dim=None).head_dim == 128


def test_attention_bias_of_a_llama_is_on_all_four_projections(llama: Path) -> None:
    config = read(llama, attention_bias=True)
    assert (config.qkv_bias, config.o_bias) == (True, True)


def test_the_family_comes_from_model_type_where_architectures_is_absent(qwen2: Path) -> None:
    assert read(qwen2, architectures=None).family == "qwen2"


def test_without_num_key_value_heads_every_head_has_its_own(llama: Path) -> None:
    assert read(llama, num_key_value_heads=None).kv_heads == 4


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": None}, RopeConfig(theta=1e4)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig("linear", 5e5, 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, RopeConfig(theta=5e5)),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, RopeConfig(theta=7e4)),
        (
            {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 7e4}},
            RopeConfig("llama3", 7e4, 8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_in_the_older_and_the_newer_form(llama: Path, keys: dict[str, Any], wanted: RopeConfig) -> None:
    assert read(llama, **keys).rope == wanted


@pytest.mark.parametrize(
    ("config_eos", "generation", "wanted"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (None, None, ()),
        (2, {"eos_token_id": [5, 2, 5]}, (5, 2)),
        (2, {"eos_token_id": 9}, (9,)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_end_of_sequence_ids(llama: Path, config_eos: Any, generation: Any, wanted: tuple[int, ...]) -> None:
    if generation is not None:
        (llama / "generation_config.json").write_text(json.dumps(generation))
    assert read(llama, eos_token_id=config_eos).eos_token_ids == wanted


@pytest.mark.parametrize(
    ("config_eos", "generation", "wanted"),
    [(257, None, ()), ([2, 300, 256], None, (2, 256)), (2, {"eos_token_id": [128_009, 5]}, (5,))],
)
def test_end_of_sequence_ids_that_the_head_does_not_have_are_left_out_with_one_line(
    llama: Path, caplog: pytest.LogCaptureFixture, config_eos: Any, generation: Any, wanted: tuple[int, ...]
) -> None:
    if generation is not None:
        (llama / "generation_config.json").write_text(json.dumps(generation))
    config = read(llama, eos_token_id=config_eos)
    assert config.eos_token_ids == wanted
    assert len(caplog.records) == 1
    params = SamplingParams(temperature=0.0, min_tokens=2)
    logits = adjusted(np.zeros(config.vocab_size, np.float32), params, [1], [], config.eos_token_ids)
    assert set(np.flatnonzero(logits)) == set(wanted)


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_dtype_under_either_key(llama: Path, key: str) -> None:
    assert read(llama, **{"torch_dtype": None, key: "bfloat16"}).dtype == "bfloat16"


def test_a_sliding_window_that_is_off_or_above_the_last_layer_is_accepted(qwen2: Path) -> None:
    read(qwen2, use_sliding_window=False, sliding_window=64, max_window_layers=0)
    read(qwen2, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    read(qwen2, use_sliding_window=True, sliding_window=64, layer_types=["full_attention"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ["architectures", "MistralForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None, "model_type": "gpt2"}, ["model_type", '"gpt2"', "llama, qwen2, qwen3"]),
        ({"hidden_act": "gelu"}, ["hidden_act", '"gelu"', '"silu"']),
        ({"mlp_bias": True}, ["mlp_bias", "true"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling: rope_type", '"yarn"', "llama3"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["rope_scaling: type", '"dynamic"']),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters", "factor is missing"]),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ["high_freq_factor", "low_freq_factor"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "an object"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "num_attention_heads = 4"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "positive integer"]),
        ({"vocab_size": "257"}, ["vocab_size", '"257"']),
        ({"rms_norm_eps": -1e-5}, ["rms_norm_eps", "-1e-05"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", '"yes"', "true or false"]),
        ({"torch_dtype": "int8"}, ["torch_dtype", '"int8"', "bfloat16"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", '"</s>"']),
    ],
)
def test_what_is_not_supported_is_refused_by_name(llama: Path, changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(llama, **changes)
    message = str(refusal.value)
    assert message.startswith(f"{llama}: config.json: ")
    assert "\n" not in message
    for part in named:
        assert part in message


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
        {"layer_types": ["sliding_attention"]},
    ],
)
def test_a_sliding_window_in_use_is_refused(qwen2: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sliding windows are not supported"):
        read(qwen2, **changes)


@pytest.mark.parametrize("content", ["", "{", "[]", '"llama"', b"\xff\xfe{}"])
def test_a_damaged_config_is_refused_with_its_path(llama: Path, content: str | bytes) -> None:
    path = llama / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        ModelConfig.from_hf(llama)


def test_a_directory_without_config_is_no_model_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))}: not a model directory"):
        ModelConfig.from_hf(tmp_path)
