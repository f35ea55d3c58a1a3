"""The table of operations: what an implementation must provide, and the contract it must keep.

The contract (docs/ARCHITECTURE.md has it whole): every row that an operation yields depends only on that row's
input and on that sequence's KV, bit for bit. Not on how many rows there are, which sequences share the batch,
where a prompt was cut into chunks, where blocks lie, or how many threads compute. A position's K, V and logits are
the same bits whether it was reached by prefill or by decode.

Shapes: M rows of a step, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a paged KV cache is made of. A slot is one token's place: block * block_tokens + offset."""

    layer_count: int
    block_count: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * self.layer_count * self.block_tokens * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a step: rows [row, row + count) are its positions [start, start + count).

    `blocks`: its physical blocks in logical order, int64, enough to cover position start + count - 1.
    """

    row: int
    count: int
    start: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tensors of one forward pass over M rows."""

    token_ids: torch.Tensor  # int64 [M]
    positions: torch.Tensor  # int64 [M]
    slots: torch.Tensor  # int64 [M], where each row's K and V go
    sequences: tuple[SequenceRows, ...]  # their rows partition 0..M in order
    logit_rows: torch.Tensor  # int64 [L], ascending: the rows whose logits are wanted


class Kernels(Protocol):
    """One implementation of the operations. Stateless but for what it packs; calls come from one thread,
    except write_kv and read_kv, which may run beside them on other slots."""

    name: str

    def default_dtype(self) -> torch.dtype:
        """The dtype it is best at on this machine, used where the config says "auto"."""
        ...

    def identity(self) -> str:
        """What its bits depend on besides inputs: its source, versions, instruction-set path."""
        ...

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """Take over a linear's weight [N, K] and bias [N] in the form that `linear` wants.

        It may share the weight's memory: read it further, but do not change it.
        """
        ...

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """[M, K] -> [M, N], accumulated in fp32, rounded to x's dtype once."""
        ...

    def logits(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """[L, K] -> [L, N] in fp32, not rounded."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D] over its last dimension, times weight [D]; in fp32 inside."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[M, 2 I] -> [M, I]: silu(first half) * second half, in fp32 inside."""
        ...

    def rotary(self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [M, H, D] by its positions [M]; cos and sin are fp32 [max_position, D / 2]."""
        ...

    def make_cache(self, shape: CacheShape) -> Any:
        """Memory for `shape`, not touched until written."""
        ...

    def write_kv(self, cache: Any, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k and v [T, Hkv, D] into slots [T] of a layer."""
        ...

    def read_kv(self, cache: Any, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """The canonical form of slots [T]: a new contiguous [2, T, Hkv, D], K first."""
        ...

    def attention(
        self, q: torch.Tensor, cache: Any, layer: int, sequences: tuple[SequenceRows, ...], scale: float
    ) -> torch.Tensor:
        """Causal attention of q [M, Hq, D] over each sequence's cached K and V (its own rows' included, which
        must have been written before) -> [M, Hq, D]. Unused slots may hold anything, NaN included."""
        ...
