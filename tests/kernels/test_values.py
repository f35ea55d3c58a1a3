"""The operations against the same formulas in float64."""

from __future__ import annotations

import pytest
import torch

from kernels import CacheShape, Kernels, select
from kernels.ops import item_of
from pdserve.errors import ConfigError
from pdserve.kv_format import KVFormat
from support.kernels import make_kernels


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """`tolerance` is relative to the largest value."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_rounds_its_input_to_the_weights_dtype_and_nothing_else(
    kernels: Kernels, dtype: torch.dtype, bias: bool
) -> None:
    for out_features, in_features, rows in ((37, 50, 21), (96, 1100, 130)):
        x, weight = random(rows, in_features), random(out_features, in_features, dtype=dtype, seed=2)
        offset = random(out_features, seed=3) if bias else None
        packed = kernels.pack(weight, offset)
        wanted = x.to(dtype).double() @ weight.double().t() + (offset.double() if offset is not None else 0.0)
        assert_close(kernels.linear(x, packed), wanted, 1e-5)
        unrounded = x.double() @ weight.double().t() + (offset.double() if offset is not None else 0.0)
        assert_close(kernels.linear(x, packed), unrounded, 1e-5 if dtype == torch.float32 else 3e-3)


def _with_far_exponents(every: int) -> torch.Tensor:
    """bfloat16 [70, 100] of usual weights, each `every`th of which is zero, tiny, or large. None is subnormal, which
    products of bfloat16 pairs take for zero."""
    weight = 0.05 * random(70, 100)
    far = torch.tensor([0.0, -0.0, 1e-37, -1e-30, 3.3e38, -1e30, 2.0**-126, 9.0])
    places = weight.view(-1)[::every]
    places.copy_(far.repeat(len(places) // len(far) + 1)[: len(places)])
    return weight.to(torch.bfloat16)


@pytest.mark.parametrize("every", [2, 13, 700])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 100])
def test_packing_loses_no_bit_of_a_weight(kernels: Kernels, every: int, rows: int) -> None:
    weight = _with_far_exponents(every)
    packed = kernels.pack(weight, None)
    ones = torch.eye(weight.shape[1])
    got = torch.cat([kernels.linear(ones[first : first + rows], packed) for first in range(0, len(ones), rows)])
    assert torch.equal(got, weight.t().float())


@pytest.mark.parametrize("path", ["portable", "avx2"])
def test_compact_panels_take_three_quarters_of_a_usual_weights_bytes(path: str) -> None:
    kernels = make_kernels(f"cpu-{path}")
    weight = (0.05 * random(256, 320)).to(torch.bfloat16)
    packed = kernels.pack(weight, None)
    assert 0.75 <= packed.nbytes / weight.nbytes < 0.77
    assert kernels.pack(weight.float(), None).nbytes == weight.float().nbytes
    odd = (0.05 * random(256, 320) * torch.exp2(torch.randint(-20, 20, (256, 320)).float())).to(torch.bfloat16)
    assert kernels.pack(odd, None).nbytes == odd.nbytes, "too many exceptions to pay"


def test_rms_norm(kernels: Kernels) -> None:
    x, weight = 5.0 * random(9, 3, 20), random(20, seed=2)
    mean_square = x.double().pow(2).mean(-1, keepdim=True)
    assert_close(kernels.rms_norm(x, weight, 1e-5), x.double() / (mean_square + 1e-5).sqrt() * weight.double(), 1e-6)


def test_silu_mul_up_to_gates_where_exp_overflows(kernels: Kernels) -> None:
    gate, up = torch.linspace(-200.0, 200.0, 501).repeat(2, 1), random(2, 501)
    wanted = gate.double() * torch.sigmoid(gate.double()) * up.double()
    assert_close(kernels.silu_mul(torch.cat((gate, up), dim=-1)), wanted, 1e-6)
    small = torch.linspace(-8.0, 8.0, 501).repeat(2, 1)
    exact = small.double() * torch.sigmoid(small.double())
    got = kernels.silu_mul(torch.cat((small, torch.ones_like(small)), dim=-1))
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)


def test_rotary_turns_dimension_i_with_i_plus_half(kernels: Kernels) -> None:
    x, positions, angles = random(4, 2, 6), torch.tensor([0, 3, 3, 9]), random(10, 3, seed=2)
    turned = kernels.rotary(x, positions, torch.cos(angles), torch.sin(angles))
    pairs = torch.complex(x[..., :3].double(), x[..., 3:].double())
    pairs = pairs * torch.polar(torch.ones(1, dtype=torch.double), angles[positions].double())[:, None]
    assert_close(turned, torch.cat((pairs.real, pairs.imag), dim=-1), 1e-6)


def test_what_is_written_to_the_cache_is_read_back_in_canonical_order(kernels: Kernels) -> None:
    cache = kernels.make_cache(CacheShape(KVFormat(2, 3, 8, "bfloat16"), 5, 4))
    slots = torch.tensor([19, 0, 7, 6])
    k, v = random(4, 3, 8, dtype=torch.bfloat16), random(4, 3, 8, dtype=torch.bfloat16, seed=2)
    kernels.write_kv(cache, 0, slots, torch.zeros_like(k), torch.zeros_like(v))
    kernels.write_kv(cache, 1, slots, k, v)
    order = torch.tensor([2, 0, 3, 1])
    got = kernels.read_kv(cache, 1, slots[order])
    assert got.is_contiguous()
    assert torch.equal(got, torch.stack((k, v))[:, order])
    assert not kernels.read_kv(cache, 0, slots).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_is_rounded_to_the_caches_dtype_as_torch_rounds(kernels: Kernels, dtype: torch.dtype) -> None:
    cache = kernels.make_cache(CacheShape(KVFormat(1, 1, 80, item_of(dtype)), 1, 32))
    k, v = 1e3 * random(32, 1, 80), random(32, 1, 80, seed=2)
    k[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, 1e-40, torch.finfo(torch.float32).max])
    kernels.write_kv(cache, 0, torch.arange(32), k, v)
    assert torch.equal(kernels.read_kv(cache, 0, torch.arange(32)), torch.stack((k, v)).to(dtype))
    room = torch.full_like(torch.stack((k, v)), -1.0, dtype=dtype)
    assert kernels.read_kv(cache, 0, torch.arange(32), room) is room
    assert torch.equal(room, torch.stack((k, v)).to(dtype))
    kernels.write_kv(cache, 0, torch.arange(32), torch.full_like(k, torch.nan), v)
    assert kernels.read_kv(cache, 0, torch.arange(32))[0].isnan().all()


def test_a_weight_may_be_an_unaligned_view_of_another_tensor(kernels: Kernels) -> None:
    x, weight = random(3, 32), random(48, 32, seed=2)
    view = torch.empty(weight.numel() + 1)[1:].view(weight.shape).copy_(weight)
    assert torch.equal(kernels.linear(x, kernels.pack(view, None)), kernels.linear(x, kernels.pack(weight, None)))


def test_the_reference_shares_the_memory_of_a_weight_in_its_own_form() -> None:
    weight = random(48, 32)
    assert select("reference").pack(weight, None).weight.data_ptr() == weight.data_ptr()


def test_identity_names_the_implementation_and_repeats(kernels: Kernels) -> None:
    assert kernels.identity().startswith(kernels.name)
    assert kernels.identity() == kernels.identity()


def test_an_unknown_implementation_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'fast'"):
        select("fast")
