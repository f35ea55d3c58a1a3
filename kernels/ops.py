"""The table of operations: what an implementation must provide, and the contract it must keep.

The contract (docs/ARCHITECTURE.md has it whole): every row that an operation yields depends only on that row's
input and on that sequence's KV, bit for bit. Not on how many rows there are, which sequences share the batch,
where a prompt was cut into chunks, where blocks lie, or how many threads compute. A position's K, V and logits are
the same bits whether it was reached by prefill or by decode.

Activations between operations are float32. A dtype is that of weights, of the KV cache and of the inputs of matrix
products: `linear` rounds its input to its weight's dtype and accumulates in float32; K and V are rounded to the cache's
when they are written, and q before attention.

Shapes: M rows of a step, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pdserve.kv_format import KVFormat

# A received frame's memory is read-only. It is only read from, which torch cannot know.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

_ITEM_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def item_of(dtype: torch.dtype) -> str:
    """The item type of a KVFormat whose K and V torch holds as `dtype`."""
    return next(item for item, stored_as in _ITEM_DTYPES.items() if stored_as is dtype)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a paged KV cache is made of. A slot is one token's place: block * block_tokens + offset."""

    format: KVFormat
    block_count: int
    block_tokens: int

    @property
    def layer_count(self) -> int:
        return self.format.layer_count

    @property
    def slot_count(self) -> int:
        return self.block_count * self.block_tokens

    @property
    def kv_heads(self) -> int:
        return self.format.kv_heads

    @property
    def head_dim(self) -> int:
        return self.format.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """What K and V are rounded to when they are written."""
        return _ITEM_DTYPES[self.format.item]

    def canonical(self, buffer: memoryview, token_count: int) -> torch.Tensor:
        """The canonical bytes of a range, as `Kernels.read_kv` yields them: [2, T, Hkv, D], in the same memory."""
        return torch.frombuffer(buffer, dtype=self.dtype).view(2, token_count, self.kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a step: rows [row, row + count) are its positions [start, start + count).

    `blocks`: its physical blocks in logical order, enough to cover position start + count - 1. Only read while the step
    is computed, so it may be the owner's own list.
    """

    row: int
    count: int
    start: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over M rows, in plain integers: a decode step has few, and tensors would cost more than they."""

    token_ids: Sequence[int]  # [M]
    sequences: tuple[SequenceRows, ...]  # their rows partition 0..M in order
    logit_rows: Sequence[int]  # [L], ascending: the rows whose logits are wanted

    def positions(self) -> torch.Tensor:
        """Each row's position in its sequence, int64 [M]."""
        return torch.cat([torch.arange(rows.start, rows.start + rows.count) for rows in self.sequences])

    def slots(self, block_tokens: int) -> torch.Tensor:
        """Where each row's K and V go, int64 [M]."""
        return torch.cat([slots_of(rows.blocks, rows.start, rows.count, block_tokens) for rows in self.sequences])


def slots_of(blocks: Sequence[int], start: int, count: int, block_tokens: int) -> torch.Tensor:
    """The slots of positions [start, start + count) of a sequence with these blocks, int64."""
    positions = torch.arange(start, start + count)
    table = torch.tensor(blocks, dtype=torch.int64)
    return table[positions // block_tokens] * block_tokens + positions % block_tokens


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One layer. Norms are float32; what is Any has been packed by the kernels."""

    input_norm: torch.Tensor
    qkv: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Any
    post_attention_norm: torch.Tensor
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class DecoderParameters:
    """All that a decoder's pass needs beside its batch and cache. With a tied head, `head` may share the embedding's
    memory."""

    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    scale: float  # of attention's scores
    cos: torch.Tensor  # float32 [max_position, D / 2]
    sin: torch.Tensor
    embedding: torch.Tensor
    layers: tuple[LayerParameters, ...]
    final_norm: torch.Tensor
    head: Any


AfterLayer = Callable[[int], None]


class FusedForward(Protocol):
    """A decoder's whole pass in one call, with the bits of the pass over the table's operations."""

    def __call__(
        self, batch: StepBatch, cache: Any, after_layer: AfterLayer | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of the batch's `logit_rows`, float32 [L, vocab_size], and which of these rows are finite, bool
        [L]. What `after_layer` raises ends the pass and is raised from here."""
        ...


class Kernels(Protocol):
    """One implementation of the operations. Stateless but for its threads and what it packs; calls come from one
    thread, except write_kv and read_kv, which may run beside them on other slots."""

    name: str

    def default_dtype(self) -> torch.dtype:
        """The dtype it is best at on this machine, used where the config says "auto"."""
        ...

    def identity(self) -> str:
        """What its bits depend on besides inputs: its source, versions, instruction-set path."""
        ...

    def set_threads(self, count: int) -> None:
        """Compute with `count` threads from now on. Shows in no bit."""
        ...

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """Take over a linear's weight [N, K], and bias [N] in float32, in the form that `linear` wants. That has
        `nbytes`: what a product reads.

        It may share the weight's memory: read it further, but do not change it.
        """
        ...

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """float32 [M, K] -> [M, N]: x rounded to the weight's dtype, accumulated in float32, not rounded."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D] over its last dimension, times weight [D]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[M, 2 I] -> [M, I]: silu(first half) * second half."""
        ...

    def rotary(self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [M, H, D] by its positions [M]; cos and sin are fp32 [max_position, D / 2]."""
        ...

    def make_cache(self, shape: CacheShape) -> Any:
        """Memory for `shape`, not touched until written."""
        ...

    def write_kv(self, cache: Any, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Round k and v [T, Hkv, D] to the cache's dtype and put them into slots [T] of a layer."""
        ...

    def read_kv(self, cache: Any, layer: int, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The canonical form of slots [T]: contiguous [2, T, Hkv, D], K first, in the cache's dtype; in `out`, where
        that is given."""
        ...

    def attention(
        self, q: torch.Tensor, cache: Any, layer: int, sequences: tuple[SequenceRows, ...], scale: float
    ) -> torch.Tensor:
        """Causal attention of q [M, Hq, D], rounded to the cache's dtype, over each sequence's cached K and V (its own
        rows' included, which must have been written before) -> [M, Hq, D]. Unused slots may hold anything, NaN
        included."""
        ...

    def fuse(self, parameters: DecoderParameters) -> FusedForward | None:
        """The whole pass in one call; None: there is none, go operation by operation."""
        ...
