"""Row invariance, bit for bit, of every operation but attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import Kernels

ROW_COUNTS = (*range(1, 65), 127, 128, 129, 512)
SHAPES = [(7, 48), (257, 64), (112, 50), (50, 1100)]  # [N, K]
DTYPES = [torch.float32, torch.bfloat16]

Operation = Callable[[torch.Tensor], torch.Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_stand_alone(kernels: Kernels, operation: Operation, x: torch.Tensor) -> None:
    """Each row's result depends on that row only: not on count, place, neighbours, memory or threads."""
    whole = operation(x)
    for count in ROW_COUNTS:
        first = (count * 7) % (len(x) - count + 1)
        assert torch.equal(operation(x[first : first + count]), whole[first : first + count]), f"{count} rows"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.equal(operation(x[order]), whole[order]), "permuted"
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        assert torch.equal(operation(x), whole), f"{threads} threads"
        assert torch.equal(operation(x[5:6]), whole[5:6]), f"one row, {threads} threads"
    unaligned = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert torch.equal(operation(unaligned), whole), "another memory alignment"
    poisoned = x.clone()
    poisoned[1::2] = float("nan")
    assert torch.equal(operation(poisoned)[::2], whole[::2]), "NaN in the neighbours"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_of_a_linear_depends_on_that_row_only(
    kernels: Kernels, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    weight = random(out_features, in_features, dtype=dtype) / in_features**0.5
    packed = kernels.pack(weight, random(out_features, seed=3))
    assert_rows_stand_alone(kernels, lambda x: kernels.linear(x, packed), random(513, in_features, seed=4))


@pytest.mark.parametrize(("out_features", "in_features"), [(257, 64), (50, 1100)])
def test_weights_of_far_exponents_leave_a_row_alone(kernels: Kernels, out_features: int, in_features: int) -> None:
    """Compact panels have no code for these: their products are added after the others."""
    weight = random(out_features, in_features) / in_features**0.5
    weight.view(-1)[::1000] *= 2.0**-40
    weight.view(-1)[200::4000] *= 2.0**9
    packed = kernels.pack(weight.to(torch.bfloat16), None)
    if getattr(kernels, "path", None) in ("avx2", "portable"):
        assert packed.compact is not None
        assert len(packed.compact.exceptions) > weight.numel() // 1000
    assert_rows_stand_alone(kernels, lambda x: kernels.linear(x, packed), random(513, in_features, seed=4))


@pytest.mark.parametrize("size", [20, 576, 2048])
def test_a_row_of_a_norm_depends_on_that_row_only(kernels: Kernels, size: int) -> None:
    weight = random(size)
    assert_rows_stand_alone(kernels, lambda x: kernels.rms_norm(x, weight, 1e-5), 3.0 * random(513, size, seed=4))


@pytest.mark.parametrize("size", [7, 112, 1536])
def test_a_row_of_silu_mul_depends_on_that_row_only(kernels: Kernels, size: int) -> None:
    assert_rows_stand_alone(kernels, kernels.silu_mul, 4.0 * random(513, 2 * size))


@pytest.mark.parametrize("head_dim", [64, 20])
def test_a_row_of_rotary_depends_on_that_row_only(kernels: Kernels, head_dim: int) -> None:
    x, positions = random(515, 3, head_dim), torch.arange(515)
    angles = random(1000, head_dim // 2, seed=7)
    cos, sin = torch.cos(angles), torch.sin(angles)
    whole = kernels.rotary(x, positions, cos, sin)
    for count in ROW_COUNTS:
        rows = slice(count % 3, count % 3 + count)
        assert torch.equal(kernels.rotary(x[rows], positions[rows], cos, sin), whole[rows])
    for threads in (1, 3):
        kernels.set_threads(threads)
        assert torch.equal(kernels.rotary(x, positions, cos, sin), whole)


def test_no_rows_give_no_results(kernels: Kernels) -> None:
    packed = kernels.pack(random(33, 16), None)
    assert kernels.linear(torch.empty(0, 16), packed).shape == (0, 33)
