"""Attention: right values, and the same bits however a position is reached and wherever its KV lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels import CacheShape, Kernels, SequenceRows
from kernels.ops import item_of, slots_of
from pdserve.kv_format import KVFormat

NAN = float("nan")
LENGTH = 530  # two whole tiles of the reference and a part of one


@dataclass(frozen=True, slots=True)
class Case:
    """A sequence's Q, K and V: [LENGTH, heads, D], all of them values that `dtype`, the cache's, can hold."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def make_case(
    *, kv_heads: int = 2, group: int = 3, head_dim: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    sizes = (kv_heads * group, kv_heads, kv_heads)
    q, k, v = (torch.randn(LENGTH, heads, head_dim, generator=generator) for heads in sizes)
    return Case(*(tensor.to(dtype).float() for tensor in (3.0 * q, k, v)), dtype)


class Cache:
    """A cache full of NaN, its blocks handed out in random order."""

    def __init__(self, kernels: Kernels, case: Case, *, block_tokens: int = 32, sequences: int = 1) -> None:
        self.kernels = kernels
        self.block_tokens = block_tokens
        per_sequence = -(-LENGTH // block_tokens)
        block_count = per_sequence * sequences + 3
        kv_heads, head_dim = case.k.shape[1:]
        self.cache: Any = kernels.make_cache(
            CacheShape(KVFormat(1, kv_heads, head_dim, item_of(case.dtype)), block_count, block_tokens)
        )
        slot_count = block_count * block_tokens
        poison = torch.full((slot_count, kv_heads, head_dim), NAN)
        kernels.write_kv(self.cache, 0, torch.arange(slot_count), poison, poison)
        shuffled = torch.randperm(block_count, generator=torch.Generator().manual_seed(block_tokens))
        self.blocks = shuffled[: per_sequence * sequences].view(sequences, per_sequence).tolist()

    def write(self, case: Case, start: int, stop: int, sequence: int = 0) -> None:
        slots = slots_of(self.blocks[sequence], start, stop - start, self.block_tokens)
        self.kernels.write_kv(self.cache, 0, slots, case.k[start:stop], case.v[start:stop])

    def attend(self, case: Case, start: int, stop: int) -> torch.Tensor:
        rows = SequenceRows(0, stop - start, start, self.blocks[0])
        return self.kernels.attention(case.q[start:stop], self.cache, 0, (rows,), case.scale)


def whole(kernels: Kernels, case: Case, block_tokens: int = 32) -> torch.Tensor:
    cache = Cache(kernels, case, block_tokens=block_tokens)
    cache.write(case, 0, LENGTH)
    return cache.attend(case, 0, LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"),
    [(2, 1, 16), (1, 3, 20), (3, 3, 64), (2, 4, 8), (1, 4, 128), (1, 1, 80), (2, 3, 32), (1, 40, 8)],
)
def test_values_are_those_of_a_float64_softmax(
    kernels: Kernels, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = make_case(kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    q = case.q.double().unflatten(1, (kv_heads, group))
    scores = torch.einsum("ikgd,jkd->kgij", q, case.k.double()) * case.scale
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    wanted = torch.einsum("kgij,jkd->ikgd", scores.softmax(-1), case.v.double()).flatten(1, 2)
    atol = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(whole(kernels, case).double(), wanted, rtol=2.0**-8 if atol > 1e-3 else 1e-5, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "group"), [(7, 3), (64, 1), (64, 4), (133, 3), (133, 4)])
def test_chunks_give_the_bits_of_the_whole_prompt(kernels: Kernels, chunk: int, group: int, dtype: torch.dtype) -> None:
    case = make_case(group=group, dtype=dtype)
    wanted, cache = whole(kernels, case), Cache(kernels, case)
    for start in range(0, LENGTH, chunk):
        stop = min(start + chunk, LENGTH)
        cache.write(case, start, stop)
        assert torch.equal(cache.attend(case, start, stop), wanted[start:stop]), f"[{start}, {stop})"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3])
def test_decode_steps_give_the_bits_of_prefill(kernels: Kernels, group: int, dtype: torch.dtype) -> None:
    case = make_case(group=group, dtype=dtype)
    wanted, cache = whole(kernels, case), Cache(kernels, case)
    for position in range(LENGTH):
        cache.write(case, position, position + 1)
        if position < 40 or position % 32 in (31, 0, 1):
            assert torch.equal(cache.attend(case, position, position + 1), wanted[position : position + 1]), position


@pytest.mark.parametrize("block_tokens", [1, 16, 40, 64])
def test_block_size_and_placement_do_not_show(kernels: Kernels, block_tokens: int) -> None:
    case = make_case()
    assert torch.equal(whole(kernels, case, block_tokens), whole(kernels, case, 32))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (8, 20)])
def test_the_thread_count_does_not_show(kernels: Kernels, threads: int, kv_heads: int, head_dim: int) -> None:
    case = make_case(kv_heads=kv_heads, head_dim=head_dim)
    wanted = whole(kernels, case)
    cache = Cache(kernels, case)
    cache.write(case, 0, LENGTH)
    kernels.set_threads(threads)
    assert torch.equal(cache.attend(case, 0, LENGTH), wanted)
    assert torch.equal(cache.attend(case, LENGTH - 1, LENGTH), wanted[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_in_a_mixed_batch_has_the_bits_it_has_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    parts = [(0, 1), (529, 530), (255, 256), (256, 257), (100, 333), (0, 17), (511, 514)]
    cases = [make_case(dtype=dtype, seed=seed) for seed in range(len(parts))]
    cache = Cache(kernels, cases[0], sequences=len(parts))
    sequences, row = [], 0
    for index, (start, stop) in enumerate(parts):
        cache.write(cases[index], 0, stop, sequence=index)
        sequences.append(SequenceRows(row, stop - start, start, cache.blocks[index]))
        row += stop - start
    q = torch.cat([case.q[start:stop] for case, (start, stop) in zip(cases, parts, strict=True)])
    mixed = kernels.attention(q, cache.cache, 0, tuple(sequences), cases[0].scale)
    for rows, case, (start, stop) in zip(sequences, cases, parts, strict=True):
        wanted = whole(kernels, case)[start:stop]
        assert torch.equal(mixed[rows.row : rows.row + rows.count], wanted), f"[{start}, {stop})"


def test_large_scores_neither_overflow_nor_leak_from_the_future(kernels: Kernels) -> None:
    case = make_case()
    loud = Case(1000.0 * case.q, case.k, case.v, case.dtype)
    attended = whole(kernels, loud)
    assert torch.isfinite(attended).all()
    changed = Case(loud.q, loud.k.clone(), loud.v.clone(), case.dtype)
    changed.k[300:] *= -7.0
    changed.v[300:] += 100.0
    assert torch.equal(whole(kernels, changed)[:300], attended[:300])


def test_a_sequence_is_not_harmed_by_a_neighbour_whose_kv_is_not_finite(kernels: Kernels) -> None:
    case = make_case()
    ill = Case(case.q, case.k, case.v.clone(), case.dtype)
    ill.v[100:] = NAN
    cache = Cache(kernels, case, sequences=2)
    cache.write(ill, 0, 200, sequence=0)
    cache.write(case, 0, 50, sequence=1)
    rows = (SequenceRows(0, 1, 199, cache.blocks[0]), SequenceRows(1, 1, 49, cache.blocks[1]))
    q = torch.stack((case.q[199], case.q[49]))
    attended = kernels.attention(q, cache.cache, 0, rows, case.scale)
    assert attended[0].isnan().all()
    assert torch.equal(attended[1], whole(kernels, case)[49])
