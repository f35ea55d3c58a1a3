"""Known faults, compiled in on purpose: the checks of the contract must find each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import CacheShape, Kernels, SequenceRows
from kernels.cpu.build import MUTANTS
from kernels.ops import slots_of
from pdserve.kv_format import KVFormat
from support.kernels import make_kernels, make_mutant

LENGTH = 100


def attention_sees_just_its_past(kernels: Kernels) -> bool:
    """Attention with blocks of 40 and of 32 equals a float64 softmax over each position's past."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(LENGTH, 1, 32, generator=generator) for _ in range(3))
    scores = torch.einsum("ihd,jhd->ij", q.double(), k.double()).masked_fill(
        torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf
    )
    wanted = torch.einsum("ij,jhd->ihd", scores.softmax(-1), v.double())
    for block_tokens, blocks in ((32, [3, 0, 2, 1]), (40, [2, 0, 1])):
        cache = kernels.make_cache(CacheShape(KVFormat(1, 1, 32, "float32"), len(blocks), block_tokens))
        kernels.write_kv(cache, 0, slots_of(blocks, 0, LENGTH, block_tokens), k, v)
        got = kernels.attention(q, cache, 0, (SequenceRows(0, LENGTH, 0, blocks),), 1.0)
        if not torch.allclose(got.double(), wanted, rtol=0, atol=1e-5):
            return False
    return True


def linear_is_the_same_for_any_thread_count(kernels: Kernels) -> bool:
    generator = torch.Generator().manual_seed(1)
    packed = kernels.pack(torch.randn(64, 300, generator=generator), None)
    x = torch.randn(9, 300, generator=generator)
    results = []
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        results.append(kernels.linear(x, packed))
    return all(torch.equal(result, results[0]) for result in results)


CHECKS: dict[str, Callable[[Kernels], bool]] = {
    "PDK_MUTANT_UNMASKED": attention_sees_just_its_past,
    "PDK_MUTANT_BLOCK_EDGE": attention_sees_just_its_past,
    "PDK_MUTANT_SPLIT_REDUCTION": linear_is_the_same_for_any_thread_count,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails_the_check_that_the_kernels_pass(mutant: str) -> None:
    check = CHECKS[mutant]
    assert check(make_kernels("cpu-portable"))
    assert not check(make_mutant(mutant)), f"{mutant} went unnoticed"
