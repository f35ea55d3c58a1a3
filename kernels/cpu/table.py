"""`kernels.ops.Kernels` in C: the shapes are checked and the pointers taken here, the numbers are made in `native/`."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kernels.cpu import library as native
from kernels.cpu.build import library_path
from kernels.cpu.memory import Arena, map_zeros
from kernels.ops import (
    AfterLayer,
    CacheShape,
    DecoderParameters,
    LayerParameters,
    SequenceRows,
    StepBatch,
)
from pdserve.errors import ConfigError, InternalError

PATHS = ("amx", "avx512", "avx2", "portable")  # best first

_DTYPES = {torch.float32: native.FLOAT32, torch.bfloat16: native.BFLOAT16}
_ENDED, _NO_MEMORY = 1, 2  # what pdk_forward returns beside 0


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear's panels, what compact ones have beside them, and bias; `struct` points into them."""

    struct: native.Linear
    panels: torch.Tensor
    compact: CompactPanels | None
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        beside = 0 if self.compact is None else self.compact.panel_exceptions.nbytes + self.compact.exceptions.nbytes
        return self.panels.nbytes + beside


@dataclass(frozen=True, slots=True)
class CompactPanels:
    """The codes of bfloat16 weights in 12 bits, and the weights that they do not reach; `struct` points into them."""

    struct: native.Compact
    panel_exceptions: torch.Tensor
    exceptions: torch.Tensor


@dataclass(frozen=True, slots=True)
class CpuCache:
    """A paged cache's memory; `struct` points into it."""

    struct: native.Cache
    shape: CacheShape
    memory: torch.Tensor


class CpuKernels:
    """The operations on one instruction-set path: one of PATHS, or "auto" for the best that this machine has.

    `library`: a build of the sources, by default the one for this machine. Raises ConfigError if it is not there or
    the machine lacks the path.
    """

    name = "cpu"

    def __init__(self, path: str = "auto", library: Path | None = None) -> None:
        file = library_path() if library is None else library
        if not file.exists():
            raise ConfigError("the CPU kernels are not built: run `python -m kernels.cpu.build`")
        try:
            self._library = native.load(file)
        except (OSError, AttributeError) as error:
            raise ConfigError(f"the CPU kernels cannot be loaded: {error}") from None
        self._file = file
        self.path = self._choose(path)
        self._path = self._library.pdk_path(self.path.encode())
        self._arena = Arena()
        self._pool: int | None = None
        self._close_pool: weakref.finalize | None = None
        self.set_threads(len(os.sched_getaffinity(0)))

    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def identity(self) -> str:
        compiler = self._library.pdk_build().decode()
        return f"{self.name}-{self._file.stem}/{compiler}/{self.path}"

    def set_threads(self, count: int) -> None:
        pool = self._library.pdk_pool_create(count)
        if pool is None:
            raise ConfigError(f"cannot start {count} threads")
        if self._close_pool is not None:
            self._close_pool()
        self._pool = pool
        self._close_pool = weakref.finalize(self, self._library.pdk_pool_destroy, pool)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        weight = weight.contiguous()
        compact = self._plan_compact(weight) if weight.dtype == torch.bfloat16 else None
        dtype = _DTYPES[weight.dtype] if compact is None else native.COMPACT
        panels = self._arena.take(self._library.pdk_packed_bytes(*weight.shape, dtype))
        compact_pointer = None if compact is None else ctypes.pointer(compact.struct)
        self._library.pdk_pack(weight.data_ptr(), *weight.shape, dtype, compact_pointer, panels.data_ptr())
        bias = None if bias is None else bias.float().contiguous()
        bias_pointer = None if bias is None else bias.data_ptr()
        struct = native.Linear(panels.data_ptr(), compact_pointer, bias_pointer, *weight.shape, dtype)
        return PackedLinear(struct, panels, compact, bias)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        x = _rows(x)
        rows, struct = x.shape[0], packed.struct
        y = torch.empty(rows, struct.out_features)
        self._check(
            self._library.pdk_linear(self._path, self._pool, ctypes.byref(struct), x.data_ptr(), rows, y.data_ptr())
        )
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, weight = _rows(x), _rows(weight)
        y, size = torch.empty_like(x), x.shape[-1]
        self._library.pdk_rms_norm(
            self._path, x.data_ptr(), x.numel() // size, size, weight.data_ptr(), eps, y.data_ptr()
        )
        return y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = _rows(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty(rows, size)
        self._library.pdk_silu_mul(self._path, gate_up.data_ptr(), rows, size, y.data_ptr())
        return y

    def rotary(self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x, positions, cos, sin = _rows(x), positions.contiguous(), _rows(cos), _rows(sin)
        y = torch.empty_like(x)
        self._library.pdk_rotary(
            *(self._path, x.data_ptr(), *x.shape, positions.data_ptr()),
            *(cos.data_ptr(), sin.data_ptr(), y.data_ptr()),
        )
        return y

    def make_cache(self, shape: CacheShape) -> CpuCache:
        struct = native.Cache(
            *(None, shape.layer_count, shape.slot_count, shape.block_tokens),
            *(shape.kv_heads, shape.head_dim, _DTYPES[shape.dtype]),
        )
        memory = map_zeros(self._library.pdk_cache_bytes(ctypes.byref(struct)))
        struct.memory = memory.data_ptr()
        return CpuCache(struct, shape, memory)

    def write_kv(self, cache: CpuCache, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        k, v, slots = k.contiguous(), v.contiguous(), slots.contiguous()
        self._library.pdk_write_kv(
            *(ctypes.byref(cache.struct), layer, slots.data_ptr(), len(slots)),
            *(k.data_ptr(), v.data_ptr(), _DTYPES[k.dtype]),
        )

    def read_kv(
        self, cache: CpuCache, layer: int, slots: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        shape, slots = cache.shape, slots.contiguous()
        size = (2, len(slots), shape.kv_heads, shape.head_dim)
        if out is None:
            out = torch.empty(size, dtype=shape.dtype)
        assert (out.shape, out.dtype) == (size, shape.dtype)
        assert out.is_contiguous()
        self._library.pdk_read_kv(ctypes.byref(cache.struct), layer, slots.data_ptr(), len(slots), out.data_ptr())
        return out

    def attention(
        self, q: torch.Tensor, cache: CpuCache, layer: int, sequences: tuple[SequenceRows, ...], scale: float
    ) -> torch.Tensor:
        q = _rows(q)
        out = torch.empty_like(q)
        batch = _BatchArrays([], sequences, [], cache.shape.block_tokens)
        self._check(
            self._library.pdk_attention(
                *(self._path, self._pool, ctypes.byref(cache.struct), layer, ctypes.byref(batch.struct)),
                *(q.shape[1], scale, q.data_ptr(), out.data_ptr()),
            )
        )
        return out

    def fuse(self, parameters: DecoderParameters) -> CpuForward:
        return CpuForward(self, parameters)

    def forward(
        self, decoder: native.Decoder, cache: CpuCache, batch: StepBatch, after_layer: AfterLayer | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One native call for a whole pass; see `kernels.ops.FusedForward`."""
        arrays = _BatchArrays(batch.token_ids, batch.sequences, batch.logit_rows, cache.shape.block_tokens)
        logits = torch.empty(len(batch.logit_rows), decoder.head.out_features)
        finite = torch.empty(len(batch.logit_rows), dtype=torch.bool)
        listener = _Listener(after_layer)
        outcome = self._library.pdk_forward(
            *(self._path, self._pool, ctypes.byref(decoder), ctypes.byref(cache.struct), ctypes.byref(arrays.struct)),
            *(listener.callback, logits.data_ptr(), ctypes.cast(finite.data_ptr(), ctypes.POINTER(ctypes.c_uint8))),
        )
        if outcome == _ENDED and listener.error is not None:
            raise listener.error
        self._check(outcome)
        return logits, finite

    def read_rate(self, memory: torch.Tensor, repeats: int = 10) -> float:
        """Bytes a second of the fastest of `repeats` plain reads of `memory` on all threads: the machine's limit."""
        return self._library.pdk_read_rate(self._pool, memory.data_ptr(), memory.nbytes, repeats)

    def product_rate(self, dtype: torch.dtype, repeats: int = 10) -> float:
        """Floating point operations a second of the fastest of `repeats` runs of a product that stays in the nearest
        caches, on all threads: this path's limit."""
        return self._library.pdk_product_rate(self._path, self._pool, _DTYPES[dtype], repeats)

    def _plan_compact(self, weight: torch.Tensor) -> CompactPanels | None:
        """The memory beside compact panels; None: they would not do for this weight, or this path has none."""
        struct = native.Compact()
        count = self._library.pdk_plan_compact(self._path, weight.data_ptr(), *weight.shape, ctypes.byref(struct))
        if count < 0:
            return None
        panel_exceptions = torch.empty(-(-weight.shape[0] // native.PANEL) + 1, dtype=torch.int32)
        exceptions = torch.empty(count, native.EXCEPTION_BYTES, dtype=torch.uint8)
        struct.panel_exceptions, struct.exceptions = panel_exceptions.data_ptr(), exceptions.data_ptr()
        return CompactPanels(struct, panel_exceptions, exceptions)

    def _choose(self, path: str) -> str:
        wanted = PATHS if path == "auto" else (path,)
        for name in wanted:
            if name in PATHS and self._library.pdk_path(name.encode()) is not None:
                return name
        if path not in PATHS:
            raise ConfigError(f"model.cpu_path = {path!r}: must be auto or one of {', '.join(PATHS)}")
        built = self._library.pdk_path_is_built(path.encode())
        reason = "this machine cannot run it" if built else "the compiler that built the kernels does not know it"
        raise ConfigError(f"model.cpu_path = {path!r}: {reason}")

    def _check(self, outcome: int) -> None:
        if outcome != 0:
            raise InternalError("the CPU kernels ran out of memory")


class CpuForward:
    """`kernels.ops.FusedForward`: keeps the parameters' memory and the structs that point into it."""

    def __init__(self, kernels: CpuKernels, parameters: DecoderParameters) -> None:
        self._kernels = kernels
        self._parameters = parameters  # keeps what the structs point to
        self._kept: list[torch.Tensor] = []
        layers = (native.Layer * len(parameters.layers))(*(self._layer(layer) for layer in parameters.layers))
        embedding = parameters.embedding.contiguous()
        self._kept.append(embedding)
        self._struct = native.Decoder(
            layer_count=len(layers),
            heads=parameters.heads,
            kv_heads=parameters.kv_heads,
            head_dim=parameters.head_dim,
            hidden_size=embedding.shape[1],
            intermediate_size=parameters.layers[0].down.struct.in_features,
            dtype=_DTYPES[embedding.dtype],
            rms_norm_eps=parameters.rms_norm_eps,
            scale=parameters.scale,
            cos=self._floats(parameters.cos),
            sin=self._floats(parameters.sin),
            embedding=embedding.data_ptr(),
            final_norm=self._floats(parameters.final_norm),
            layers=layers,
            head=parameters.head.struct,
        )

    def __call__(
        self, batch: StepBatch, cache: CpuCache, after_layer: AfterLayer | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.forward(self._struct, cache, batch, after_layer)

    def _layer(self, layer: LayerParameters) -> native.Layer:
        return native.Layer(
            input_norm=self._floats(layer.input_norm),
            q_norm=None if layer.q_norm is None else self._floats(layer.q_norm),
            k_norm=None if layer.k_norm is None else self._floats(layer.k_norm),
            post_attention_norm=self._floats(layer.post_attention_norm),
            qkv=layer.qkv.struct,
            o=layer.o.struct,
            gate_up=layer.gate_up.struct,
            down=layer.down.struct,
        )

    def _floats(self, tensor: torch.Tensor) -> int:
        self._kept.append(_rows(tensor))
        return self._kept[-1].data_ptr()


class _BatchArrays:
    """A step's integers as arrays that C reads; `struct` points into them."""

    def __init__(
        self,
        token_ids: Sequence[int],
        sequences: tuple[SequenceRows, ...],
        logit_rows: Sequence[int],
        block_tokens: int,
    ) -> None:
        table: list[tuple[int, int, int, int]] = []
        blocks: list[int] = []
        for rows in sequences:
            table.append((rows.row, rows.count, rows.start, len(blocks)))
            blocks += rows.blocks[: -(-(rows.start + rows.count) // block_tokens)]
        self._token_ids = np.array(token_ids, dtype=np.int32)
        self._sequences = np.array(table, dtype=np.int64)
        self._blocks = np.array(blocks, dtype=np.int32)
        self._logit_rows = np.array(logit_rows, dtype=np.int32)
        self.struct = native.Batch(
            sequences[-1].row + sequences[-1].count if sequences else 0,
            len(sequences),
            len(logit_rows),
            self._token_ids.ctypes.data,
            self._sequences.ctypes.data,
            self._blocks.ctypes.data,
            self._logit_rows.ctypes.data,
        )


class _Listener:
    """Carries a Python callback, and what it raises, across C."""

    def __init__(self, after_layer: AfterLayer | None) -> None:
        self.error: Exception | None = None
        self._after_layer = after_layer
        self.callback = native.LayerCallback(self._call) if after_layer is not None else native.LayerCallback()

    def _call(self, layer: int) -> int:
        assert self._after_layer is not None
        try:
            self._after_layer(layer)
        except Exception as error:  # noqa: BLE001 - it is raised again on the other side of C
            self.error = error
            return 1
        return 0


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """float32 and contiguous, the tensor itself where it is that already."""
    return tensor.float().contiguous()
