"""The shared library through ctypes: its structs, its functions' signatures, and loading it.

Mirrors native/abi.h. Every call gives up the interpreter's lock while it runs.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint8, c_void_p
from pathlib import Path

FLOAT32, BFLOAT16, COMPACT = 0, 1, 2  # enum pdk_dtype
PANEL = 16  # outputs of a panel
EXCEPTION_BYTES = 8  # of a struct pdk_exception


class Compact(ctypes.Structure):
    _fields_ = (
        ("high_bytes", c_uint8 * 16),
        ("panel_exceptions", c_void_p),
        ("exceptions", c_void_p),
    )


class Linear(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("compact", POINTER(Compact)),
        ("bias", c_void_p),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("dtype", c_int64),
    )


class Cache(ctypes.Structure):
    _fields_ = (
        ("memory", c_void_p),
        ("layer_count", c_int64),
        ("slot_count", c_int64),
        ("block_tokens", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("dtype", c_int64),
    )


class Batch(ctypes.Structure):
    """`sequences` points to rows of four int64: row, count, start, first block."""

    _fields_ = (
        ("row_count", c_int64),
        ("sequence_count", c_int64),
        ("logit_count", c_int64),
        ("token_ids", c_void_p),
        ("sequences", c_void_p),
        ("blocks", c_void_p),
        ("logit_rows", c_void_p),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        ("layer_count", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("dtype", c_int64),
        ("rms_norm_eps", c_double),
        ("scale", c_double),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("layers", POINTER(Layer)),
        ("head", Linear),
    )


LayerCallback = ctypes.CFUNCTYPE(c_int, c_int64)

_PATH = _POOL = _FLOATS = _SLOTS = c_void_p
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "pdk_build": (c_char_p, ()),
    "pdk_path": (c_void_p, (c_char_p,)),
    "pdk_path_is_built": (c_int, (c_char_p,)),
    "pdk_pool_create": (c_void_p, (c_int64,)),
    "pdk_pool_destroy": (None, (_POOL,)),
    "pdk_packed_bytes": (c_int64, (c_int64, c_int64, c_int64)),
    "pdk_plan_compact": (c_int64, (_PATH, c_void_p, c_int64, c_int64, POINTER(Compact))),
    "pdk_pack": (None, (c_void_p, c_int64, c_int64, c_int64, POINTER(Compact), c_void_p)),
    "pdk_cache_bytes": (c_int64, (POINTER(Cache),)),
    "pdk_linear": (c_int, (_PATH, _POOL, POINTER(Linear), _FLOATS, c_int64, _FLOATS)),
    "pdk_rms_norm": (None, (_PATH, _FLOATS, c_int64, c_int64, _FLOATS, c_double, _FLOATS)),
    "pdk_silu_mul": (None, (_PATH, _FLOATS, c_int64, c_int64, _FLOATS)),
    "pdk_rotary": (None, (_PATH, _FLOATS, c_int64, c_int64, c_int64, c_void_p, _FLOATS, _FLOATS, _FLOATS)),
    "pdk_write_kv": (None, (POINTER(Cache), c_int64, _SLOTS, c_int64, c_void_p, c_void_p, c_int64)),
    "pdk_read_kv": (None, (POINTER(Cache), c_int64, _SLOTS, c_int64, c_void_p)),
    "pdk_attention": (
        c_int,
        (_PATH, _POOL, POINTER(Cache), c_int64, POINTER(Batch), c_int64, c_double, _FLOATS, _FLOATS),
    ),
    "pdk_forward": (
        c_int,
        (
            *(_PATH, _POOL, POINTER(Decoder), POINTER(Cache), POINTER(Batch), LayerCallback),
            *(_FLOATS, POINTER(c_uint8)),
        ),
    ),
    "pdk_read_rate": (c_double, (_POOL, c_void_p, c_int64, c_int64)),
    "pdk_product_rate": (c_double, (_PATH, _POOL, c_int64, c_int64)),
}


def load(path: Path) -> ctypes.CDLL:
    """The library with its signatures set. Raises OSError if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
