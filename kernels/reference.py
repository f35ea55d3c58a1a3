"""The operations in plain torch: the oracle, meant to be obviously right rather than fast.

torch's own kernels may give a row other bits when its neighbours, its place or the thread count change. Four
things are behind that, and each has one answer here:

* Matrix products choose their code by the number of rows, and by memory alignment. Here every product is made of
  slabs of exactly 16 rows in freshly allocated (so aligned) memory, all other dimensions padded to multiples of 16.
* Matrix products split K between threads where that pays, which it does on CPUs with AVX-512. Here a product runs on
  one thread, whatever `set_threads` says.
* Sums are grouped by shape and threads. Here a row is summed by halving: elementwise additions of its two halves.
* Transcendental functions may use other code for a short tail, or where threads split the work. The only one here is
  exp, and it runs on flat tiles of whole vectors, below the size at which torch starts threads.

Everything else is elementwise arithmetic and maxima, which are exact in any order. All of it is float32. This module
does not know models, blocks' owners or devices other than the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from kernels.ops import CacheShape, DecoderParameters, SequenceRows, slots_of

SLAB_ROWS = 16  # rows of every matrix product
KV_TILE = 256  # tokens of K and V that attention reduces at once, counted from position 0
EXP_TILE = 8192  # elements of one exp call: whole vectors, below torch's threading grain of 32768
# Results of exp are added to 1, or to weights whose largest is 1: smaller ones than this do not show in float32. They
# are made zero because torch takes many times longer where exp comes near underflow.
SMALLEST_EXP = 1e-34
LOWEST_EXPONENT = -80.0  # its exp is below SMALLEST_EXP
PAD = 16  # every other dimension of a product is a multiple of this
ALIGNMENT_BYTES = 64  # what torch's CPU allocator guarantees
# Finite, so that no NaN can arise from it, and a power of two, so that adding and comparing it is exact.
MASKED = -(2.0**100)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear's weight, float32, padded with zeros to multiples of PAD: [N', K'], and its bias [N]. `dtype`: what it
    was before, to which inputs are rounded."""

    dtype: torch.dtype
    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class ReferenceCache:
    """K and V as [layer, slot, Hkv, D]."""

    shape: CacheShape
    k: torch.Tensor
    v: torch.Tensor


class ReferenceKernels:
    """`kernels.ops.Kernels` in plain torch on the CPU."""

    name = "reference"

    def default_dtype(self) -> torch.dtype:
        return torch.float32

    def identity(self) -> str:
        source = xxhash.xxh3_64_hexdigest(Path(__file__).read_bytes())
        build = xxhash.xxh3_64_hexdigest(torch.__config__.show().encode())
        return f"reference-{source}/torch-{torch.__version__}-{build}/{torch.backends.cpu.get_cpu_capability()}"

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Shares the memory of a weight that has the wanted form already (float32, aligned, no padding needed); any
        other is copied, so bfloat16 weights take twice their size."""
        out_features, in_features = weight.shape
        shape, dtype = (_rounded_up(out_features, PAD), _rounded_up(in_features, PAD)), weight.dtype
        if not _is_packed(weight, shape):
            padded = torch.zeros(shape)
            padded[:out_features, :in_features] = weight
            weight = padded
        return PackedLinear(dtype, weight, None if bias is None else bias.float(), out_features, in_features)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        rows = x.shape[0]
        slabs = torch.zeros(_rounded_up(rows, SLAB_ROWS), packed.weight.shape[1])
        slabs[:rows, : packed.in_features] = x.to(packed.dtype)
        product = torch.empty(slabs.shape[0], packed.weight.shape[0])
        with _one_thread():
            for slab, result in zip(slabs.split(SLAB_ROWS), product.split(SLAB_ROWS), strict=True):
                torch.mm(slab, packed.weight.t(), out=result)
        product = product[:rows, : packed.out_features]
        return product.contiguous() if packed.bias is None else product + packed.bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        mean_square = _row_sum(x * x) / x.shape[-1]
        return x / torch.sqrt(mean_square + eps) * weight

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate / _exp_(-gate).add_(1.0) * up

    def rotary(self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The form of Llama and Qwen: dimension i turns together with dimension i + D / 2."""
        cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def make_cache(self, shape: CacheShape) -> ReferenceCache:
        size = (shape.layer_count, shape.slot_count, shape.kv_heads, shape.head_dim)
        return ReferenceCache(shape, torch.empty(size, dtype=shape.dtype), torch.empty(size, dtype=shape.dtype))

    def write_kv(
        self, cache: ReferenceCache, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        cache.k[layer].index_copy_(0, slots, k.to(cache.shape.dtype))
        cache.v[layer].index_copy_(0, slots, v.to(cache.shape.dtype))

    def read_kv(
        self, cache: ReferenceCache, layer: int, slots: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(2, len(slots), *cache.k.shape[2:], dtype=cache.k.dtype)
        for part, values in zip(out, (cache.k, cache.v), strict=True):
            torch.index_select(values[layer], 0, slots, out=part)
        return out

    def attention(
        self,
        q: torch.Tensor,
        cache: ReferenceCache,
        layer: int,
        sequences: tuple[SequenceRows, ...],
        scale: float,
    ) -> torch.Tensor:
        """Softmax over tiles of KV_TILE tokens, merged in order of position.

        The order is the same for every row and phase, so a position reached by prefill and by decode has the same
        bits. A tile beyond a row's position adds exact zeros to it, so it does not matter that slab neighbours
        need that tile.
        """
        slabs = _Slabs.cut(q.to(cache.shape.dtype), sequences, cache.shape.kv_heads)
        block_tokens = cache.shape.block_tokens
        slots = [slots_of(rows.blocks, 0, rows.start + rows.count, block_tokens) for rows in sequences]
        softmax = _RunningSoftmax(slabs.queries)
        for tile_start in range(0, max(slabs.last_positions) + 1, KV_TILE):
            seeing = [slab for slab, last in enumerate(slabs.last_positions) if last >= tile_start]
            index = torch.tensor(seeing)
            owners = [slabs.owners[slab] for slab in seeing]
            scores = torch.empty(len(seeing), *slabs.queries.shape[1:3], KV_TILE)
            tiles = _tiles(cache.k[layer], [slots[owner] for owner in owners], tile_start)
            with _one_thread():
                for slab, k, result in zip(seeing, tiles, scores, strict=True):
                    torch.bmm(slabs.queries[slab], k.transpose(1, 2), out=result)
            tokens = torch.arange(tile_start, tile_start + KV_TILE)
            hidden = tokens > slabs.positions[index][:, None, :, None]
            weights = softmax.weigh(index, scores.mul_(scale).masked_fill_(hidden, MASKED))
            weighted = torch.empty(len(seeing), *slabs.queries.shape[1:])
            tiles = _tiles(cache.v[layer], [slots[owner] for owner in owners], tile_start)
            with _one_thread():
                for weight, v, result in zip(weights, tiles, weighted, strict=True):
                    torch.bmm(weight, v, out=result)
            softmax.add(index, weighted)
        return slabs.uncut(softmax.result(), sequences, q)

    def fuse(self, parameters: DecoderParameters) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Slabs:
    """The step's query rows, cut into slabs. A sequence's rows in a slab are its (token, head of the group) pairs
    in order; the last slab of a sequence is filled up with zero rows at its last position."""

    queries: torch.Tensor  # float32 [S, Hkv, SLAB_ROWS, D']
    positions: torch.Tensor  # int64 [S, SLAB_ROWS]
    owners: tuple[int, ...]  # each slab's sequence, ascending
    last_positions: tuple[int, ...]

    @classmethod
    def cut(cls, q: torch.Tensor, sequences: tuple[SequenceRows, ...], kv_heads: int) -> _Slabs:
        group, head_dim = q.shape[1] // kv_heads, q.shape[2]
        queries, positions, owners = [], [], []
        for owner, rows in enumerate(sequences):
            count = -(-rows.count * group // SLAB_ROWS)
            filled = torch.zeros(kv_heads, count * SLAB_ROWS, _rounded_up(head_dim, PAD))
            heads_first = q[rows.row : rows.row + rows.count].unflatten(1, (kv_heads, group)).transpose(0, 1)
            filled[:, : rows.count * group, :head_dim] = heads_first.flatten(1, 2)
            queries.append(filled.unflatten(1, (count, SLAB_ROWS)).transpose(0, 1))
            token = torch.arange(count * SLAB_ROWS).div(group, rounding_mode="floor").clamp(max=rows.count - 1)
            positions.append((rows.start + token).view(count, SLAB_ROWS))
            owners += [owner] * count
        all_positions = torch.cat(positions)
        last = tuple(all_positions[:, -1].tolist())
        return cls(torch.cat(queries).contiguous(), all_positions, tuple(owners), last)

    def uncut(self, result: torch.Tensor, sequences: tuple[SequenceRows, ...], q: torch.Tensor) -> torch.Tensor:
        """Put [S, Hkv, SLAB_ROWS, D'] back into q's shape."""
        kv_heads = result.shape[1]
        group, head_dim = q.shape[1] // kv_heads, q.shape[2]
        out = torch.empty_like(q)
        first = 0
        for rows in sequences:
            count = -(-rows.count * group // SLAB_ROWS)
            flat = result[first : first + count].transpose(0, 1).flatten(1, 2)
            tokens_first = flat[:, : rows.count * group, :head_dim].unflatten(1, (rows.count, group)).transpose(0, 1)
            out[rows.row : rows.row + rows.count] = tokens_first.flatten(1, 2)
            first += count
        return out


class _RunningSoftmax:
    """Each query row's maximum, sum of weights and weighted V over the tiles seen so far."""

    def __init__(self, queries: torch.Tensor) -> None:
        column = (*queries.shape[:-1], 1)
        self._maximum = torch.full(column, MASKED)
        self._total = torch.zeros(column)
        self._weighted = torch.zeros(queries.shape)

    def weigh(self, slabs: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take in a tile's scores [A, Hkv, SLAB_ROWS, KV_TILE] of these slabs and turn them into weights."""
        before = self._maximum[slabs]
        maximum = torch.maximum(before, scores.amax(-1, keepdim=True))
        weights = _exp_(scores.sub_(maximum))
        kept = _exp_(before.sub_(maximum))
        self._maximum[slabs] = maximum
        self._total[slabs] = self._total[slabs] * kept + _row_sum(weights)
        self._weighted[slabs] = self._weighted[slabs] * kept
        return weights

    def add(self, slabs: torch.Tensor, weighted: torch.Tensor) -> None:
        self._weighted[slabs] += weighted

    def result(self) -> torch.Tensor:
        # Adding zero turns -0 into +0: whether a masked tile was added to a row must not show in a zero's sign.
        return self._weighted / self._total + 0.0


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For matrix products: no other thread takes a share of K. torch's thread count is the process's, so only one
    thread of a process may compute with these kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tiles(values: torch.Tensor, slots_of_slabs: list[torch.Tensor], tile_start: int) -> Iterator[torch.Tensor]:
    """For each slab its sequence's tokens [tile_start, tile_start + KV_TILE) of one layer's K or V [slot, Hkv, D], as
    float32 [Hkv, KV_TILE, D']. The next step of the iteration may overwrite it.

    Zeros beyond the last token, as a weight of zero does not silence a NaN.
    """
    _, kv_heads, head_dim = values.shape
    tile = torch.zeros(kv_heads, KV_TILE, _rounded_up(head_dim, PAD))
    gathered = None
    for slots in slots_of_slabs:
        if slots is not gathered:
            gathered = slots
            tile_slots = slots[tile_start : tile_start + KV_TILE]
            tile[:, : len(tile_slots), :head_dim] = values.index_select(0, tile_slots).transpose(0, 1)
            tile[:, len(tile_slots) :] = 0.0
        yield tile


def _exp_(x: torch.Tensor) -> torch.Tensor:
    """Elementwise in place on a contiguous float32 tensor, in calls of exactly EXP_TILE elements. What would be
    smaller than SMALLEST_EXP is exactly 0."""
    flat = x.clamp_(min=LOWEST_EXPONENT).view(-1)
    rest = flat.numel() % EXP_TILE
    for tile in flat[: flat.numel() - rest].split(EXP_TILE):
        tile.exp_()
    if rest:
        padded = torch.zeros(EXP_TILE)
        padded[:rest] = flat[-rest:]
        flat[-rest:] = padded.exp_()[:rest]
    return torch.nn.functional.threshold_(x, SMALLEST_EXP, 0.0)


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    """[..., N] -> [..., 1]: the upper half is added to the lower one until one column is left."""
    width = 1 << (x.shape[-1] - 1).bit_length()
    if width != x.shape[-1]:
        x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _is_packed(weight: torch.Tensor, shape: tuple[int, int]) -> bool:
    aligned = weight.data_ptr() % ALIGNMENT_BYTES == 0 and weight.is_contiguous()
    return aligned and weight.dtype == torch.float32 and tuple(weight.shape) == shape
