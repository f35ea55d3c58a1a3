"""What other machines test of AMX is what the instructions do: the emulation has their bits."""

from __future__ import annotations

import pytest
import torch

from kernels import CacheShape, SequenceRows
from kernels.ops import slots_of
from pdserve.kv_format import KVFormat
from support.kernels import make_native_and_emulated


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(96, 1100, 130), (37, 50, 21), (64, 576, 13), (70, 96, 4)])
@pytest.mark.parametrize("exponent", [0, -60])
def test_a_linear_has_the_bits_of_the_instructions(outputs: int, inputs: int, rows: int, exponent: int) -> None:
    """With tiny operands as well: products below float32's normal range are zero."""
    weight = (random(outputs, inputs, seed=2) * 2.0**exponent).to(torch.bfloat16)
    x = random(rows, inputs) * torch.exp2(exponent * random(rows, inputs, seed=4).abs())
    results = [
        kernels.linear(x, kernels.pack(weight, random(outputs, seed=3) * 2.0 ** (2 * exponent)))
        for kernels in make_native_and_emulated("amx")
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(64, 9, 3), (80, 4, 1), (128, 2, 2), (160, 2, 1)])
def test_attention_has_the_bits_of_the_instructions(head_dim: int, heads: int, kv_heads: int) -> None:
    tokens, blocks = 300, range(10)
    q, k, v = (random(tokens, count, head_dim, seed=count) for count in (heads, kv_heads, kv_heads))
    results = []
    for kernels in make_native_and_emulated("amx"):
        shape = CacheShape(KVFormat(1, kv_heads, head_dim, "bfloat16"), len(blocks), 32)
        cache = kernels.make_cache(shape)
        kernels.write_kv(cache, 0, slots_of(blocks, 0, tokens, 32), k, v)
        results.append(kernels.attention(q, cache, 0, (SequenceRows(0, tokens, 0, blocks),), head_dim**-0.5))
    assert torch.equal(*results)
