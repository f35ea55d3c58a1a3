"""What a checkpoint's decoder looks like: the only reader of Hugging Face configuration keys.

Three families are served, Llama, Qwen2 and Qwen3, and their differences are data here. A feature that the decoder
does not have is refused with one line that names directory, key, value and what is supported, so that no checkpoint
is ever served wrongly in silence. No torch: dtypes are names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve import logs
from pdserve.errors import ConfigError

_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_ROPE_TYPES = ("default", "linear", "llama3")
_DTYPES = ("float32", "bfloat16", "float16")
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_RMS_NORM_EPS = 1e-6
_QWEN3_HEAD_DIM = 128  # what a Qwen3 config without head_dim means; elsewhere it is hidden size / heads

_log = logs.logger("model")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. `factor` and what follows matter only to the types that scale."""

    type: str = "default"
    theta: float = _DEFAULT_ROPE_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. `dtype` is that of the stored weights, as a torch name."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tied_head: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, directory: Path) -> ModelConfig:
        """Read config.json and, for the end-of-sequence ids, generation_config.json where there is one.

        Raises ConfigError for a missing or damaged file, and for a model that is not supported.
        """
        keys = _Keys(directory, "config.json", _read_json(directory / "config.json"))
        family = _family(keys)
        _refuse_unsupported(keys, family)
        heads = keys.count("num_attention_heads")
        kv_heads = keys.count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise keys.refusal("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
        hidden_size = keys.count("hidden_size")
        head_dim = keys.count("head_dim", _QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // heads)
        if head_dim % 2:
            raise keys.refusal("head_dim", head_dim, "an even number")
        attention_bias = keys.flag("attention_bias") and family != "qwen2"
        return cls(
            family=family,
            vocab_size=keys.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.count("intermediate_size"),
            layer_count=keys.count("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", _DEFAULT_RMS_NORM_EPS),
            max_position=keys.count("max_position_embeddings"),
            rope=_rope(keys),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            qk_norm=family == "qwen3",
            tied_head=keys.flag("tie_word_embeddings"),
            dtype=_dtype(keys),
            eos_token_ids=_eos_token_ids(directory, keys, keys.count("vocab_size")),
        )


class _Keys:
    """A JSON object whose values are checked as they are taken. Null counts as absent."""

    def __init__(self, directory: Path, file: str, values: Mapping[str, Any]) -> None:
        self._directory = directory
        self._file = file
        self._values = values

    def refusal(self, key: str, value: Any, supported: str) -> ConfigError:
        return ConfigError(f"{self._directory}: {self._file}: {key} = {json.dumps(value)}: must be {supported}")

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """An integer above 0."""
        value = self._present(key, default)
        if type(value) is not int or value < 1:
            raise self.refusal(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._present(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.refusal(key, value, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value not in (None, True, False):
            raise self.refusal(key, value, "true or false")
        return bool(value)

    def section(self, key: str) -> _Keys | None:
        """The object below `key`, whose keys are then named with it."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refusal(key, value, "an object")
        return _Keys(self._directory, f"{self._file}: {key}", value)

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self._directory}: {self._file}: {key} is missing")
        return value


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: not a model directory: {path.name} is missing") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # of JSON or of UTF-8
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: must hold a JSON object")
    return document


def _family(keys: _Keys) -> str:
    supported = f"one of {', '.join(_FAMILIES)}"
    architectures = keys.get("architectures")
    if architectures:
        if architectures[0] not in _FAMILIES:
            raise keys.refusal("architectures", architectures, supported)
        return _FAMILIES[architectures[0]]
    model_type = keys.get("model_type")
    if model_type not in _FAMILIES.values():
        raise keys.refusal("model_type", model_type, f"one of {', '.join(_FAMILIES.values())}")
    return str(model_type)


def _refuse_unsupported(keys: _Keys, family: str) -> None:
    if keys.get("hidden_act") not in (None, "silu"):
        raise keys.refusal("hidden_act", keys.get("hidden_act"), '"silu"')
    if keys.flag("mlp_bias"):
        raise keys.refusal("mlp_bias", True, "false: biases in the MLP are not supported")
    if keys.get("quantization_config") is not None:
        method = keys.get("quantization_config")
        raise keys.refusal("quantization_config", method, "absent: quantised checkpoints are not supported")
    if keys.get("partial_rotary_factor") not in (None, 1):
        raise keys.refusal("partial_rotary_factor", keys.get("partial_rotary_factor"), "1")
    if family != "llama":
        _refuse_sliding_window(keys)


def _refuse_sliding_window(keys: _Keys) -> None:
    """Most Qwen configs carry a window that is switched off, or would begin above the last layer."""
    supported = "full attention in every layer: sliding windows are not supported"
    layer_types = keys.get("layer_types")
    if layer_types is not None and any(kind != "full_attention" for kind in layer_types):
        raise keys.refusal("layer_types", layer_types, supported)
    first_windowed_layer = keys.get("max_window_layers")
    begins_above = first_windowed_layer is not None and first_windowed_layer >= keys.count("num_hidden_layers")
    all_full = layer_types is not None or begins_above
    if keys.flag("use_sliding_window") and keys.get("sliding_window") is not None and not all_full:
        raise keys.refusal("use_sliding_window", True, supported)


def _rope(keys: _Keys) -> RopeConfig:
    """Rotary settings in either form: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    parameters = keys.section("rope_parameters") or keys.section("rope_scaling")
    theta = keys.number("rope_theta", _DEFAULT_ROPE_THETA)
    if parameters is None:
        return RopeConfig(theta=theta)
    theta = parameters.number("rope_theta", theta)
    name = "type" if parameters.get("rope_type") is None else "rope_type"
    kind = parameters.get(name) or "default"
    if kind not in _ROPE_TYPES:
        raise parameters.refusal(name, kind, f"one of {', '.join(_ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise parameters.refusal("partial_rotary_factor", parameters.get("partial_rotary_factor"), "1")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = parameters.number("factor")
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.refusal("high_freq_factor", high, f"above low_freq_factor = {low}")
    return RopeConfig(kind, theta, factor, low, high, parameters.count("original_max_position_embeddings"))


def _dtype(keys: _Keys) -> str:
    name = "torch_dtype" if keys.get("dtype") is None else "dtype"
    dtype = keys.get(name) or "float32"
    if dtype not in _DTYPES:
        raise keys.refusal(name, dtype, f"one of {', '.join(_DTYPES)}")
    return str(dtype)


def _eos_token_ids(directory: Path, keys: _Keys, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json decides: chat models end turns with ids that config.json does not know.

    An id that the head does not have can never come, so it is left out here and nobody further on meets it.
    """
    generation_path = directory / "generation_config.json"
    if generation_path.exists():
        generation = _Keys(directory, generation_path.name, _read_json(generation_path))
        if generation.get("eos_token_id") is not None:
            keys = generation
    value = keys.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise keys.refusal("eos_token_id", value, "a token id or a list of them")
    if beyond := [token_id for token_id in ids if token_id >= vocab_size]:
        _log.warning(
            "end-of-sequence ids beyond the vocabulary are left out",
            directory=str(directory),
            ids=beyond,
            vocab_size=vocab_size,
        )
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id < vocab_size))
