"""MXFP8, MXFP4 and NVFP4 groups against exact rational arithmetic and published numbers."""

import math
from fractions import Fraction

import pytest
import torch
from small_float_oracle import E2M1, E4M3, midpoints, mx_group, nibbles, nvfp4_group

from plugins.formats import mxfp4, mxfp8, nvfp4
from plugins.formats.fallback import Fp8RowScale, Fp8WithBf16Rope

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ALL = {
    "activation": (mxfp8.ACTIVATION, 32),
    "weight": (mxfp8.WEIGHT, 32),
    "mxfp4": (mxfp4.MXFP4, 32),
    "nvfp4": (nvfp4.CACHE, 16),
}


def oracle(name: str, group: list[float]) -> tuple[list[int], int]:
    """Expected data bytes and scale byte of one group."""
    if name == "nvfp4":
        codes, scale = nvfp4_group(group)
        return nibbles(codes), scale
    if name == "mxfp4":
        codes, scale = mx_group(group, 6 * 2.0**-126, E2M1)
        return nibbles(codes), scale
    return mx_group(group, 1e-4 if name == "activation" else 448 * 2.0**-126, E4M3)


def hostile_groups(width: int) -> torch.Tensor:
    """Groups over many magnitudes, zeros, lone spikes, values on the clamp and below the floor."""
    draw = torch.Generator().manual_seed(7)
    rows = [torch.randn(width, generator=draw, dtype=torch.float64) * 10.0**e for e in range(-9, 4)]
    ramp = torch.linspace(-1, 1, width, dtype=torch.float64)
    spike = torch.zeros(width, dtype=torch.float64)
    spike[3] = -448.0
    rows += [ramp, spike, torch.zeros(width, dtype=torch.float64), -torch.zeros_like(spike)]
    rows += [ramp * 3000.0, ramp * 6.0, ramp * 448.0, ramp * 0.0117, ramp * 1e-4, ramp * 1.1e-4]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_bytes_equal_the_oracle_and_round_equals_the_round_trip(
    name: str, dtype: torch.dtype
) -> None:
    fmt, width = ALL[name]
    values = hostile_groups(width).to(dtype)
    data, scale = fmt.pack(values)
    for row, got, got_scale in zip(values.tolist(), data.tolist(), scale.tolist(), strict=True):
        assert (got, got_scale[0]) == oracle(name, row)
    back = fmt.unpack(data, scale, dtype)
    rounded = fmt.round(values)
    assert back.dtype == rounded.dtype == dtype
    assert torch.equal(back, rounded)
    assert torch.equal(back.signbit(), rounded.signbit())
    # bfloat16 holds every value of these formats, so a narrow read is the exact read.
    exact = fmt.unpack(data, scale, torch.float64)
    assert torch.equal(exact, fmt.unpack(data, scale, torch.bfloat16).double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_nvfp4_division_by_the_scale_is_exact_at_every_tie(dtype: torch.dtype) -> None:
    ties = midpoints(E2M1)
    scales = E4M3[1:]
    centre = torch.tensor([[float(s * t) for t in ties] for s in scales], dtype=dtype)
    inf = torch.tensor(math.inf, dtype=dtype)
    groups = torch.zeros(len(scales), 3, 16, dtype=dtype)
    groups[..., 0] = torch.tensor([[6 * float(s)] for s in scales], dtype=dtype)
    groups[:, :, 1:8] = torch.stack(
        [centre, torch.nextafter(centre, inf), torch.nextafter(centre, -inf)], dim=1
    )
    data, scale = nvfp4.CACHE.pack(groups)
    expected_scale = torch.arange(1, len(E4M3), dtype=torch.uint8)
    assert torch.equal(scale, expected_scale[:, None, None].expand(-1, 3, 1))
    for rows, packed in zip(groups.tolist(), data.tolist(), strict=True):
        for row, got in zip(rows, packed, strict=True):
            assert got == nibbles(nvfp4_group(row)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_nvfp4_scale_is_exact_at_every_tie(dtype: torch.dtype) -> None:
    ties = midpoints(E4M3[1:])
    amax = torch.tensor([float(6 * t) for t in ties], dtype=dtype)
    inf = torch.tensor(math.inf, dtype=dtype)
    amax = torch.cat([amax, torch.nextafter(amax, inf), torch.nextafter(amax, -inf)])
    groups = torch.zeros(len(amax), 16, dtype=dtype)
    groups[:, 5] = -amax
    _, scale = nvfp4.CACHE.pack(groups)
    assert scale[:, 0].tolist() == [nvfp4_group([v])[1] for v in amax.tolist()]


def test_nvfp4_known_group() -> None:
    half = [0.0859375, 0.171875, 0.34375, 0.515625, 0.515625, 0.6875, 1.03125, 1.03125]
    x = torch.linspace(-1, 1, 16, dtype=torch.float64)
    _, scale = nvfp4.CACHE.pack(x)
    assert Fraction(0.171875) == E4M3[scale.item()]
    assert nvfp4.CACHE.round(x).tolist() == [-v for v in reversed(half)] + half


def test_the_activation_floor_acts_and_the_weight_format_has_none() -> None:
    x = torch.full((32,), 1e-9, dtype=torch.float64)
    # Floor 1e-4: scale 2^-22, and 1e-9 · 2^22 = 0.0042 rounds to 2 subnormal steps of 2^-9.
    assert mxfp8.ACTIVATION.round(x).tolist() == [2 * 2.0**-9 * 2.0**-22] * 32
    # No floor: scale 2^ceil(log2(1e-9 / 448)) = 2^-38, and 1e-9 · 2^38 = 274.9 rounds to 288.
    assert mxfp8.WEIGHT.round(x).tolist() == [288 * 2.0**-38] * 32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ALL)
def test_a_value_that_is_not_finite_poisons_its_group_and_no_other(name: str, bad: float) -> None:
    fmt, width = ALL[name]
    x = torch.full((2, 2 * width), 6.0)
    x[0, 1] = bad
    for got in (fmt.round(x), fmt.unpack(*fmt.pack(x), torch.float32)):
        assert got[0, :width].isnan().all()
        assert torch.equal(got[0, width:], torch.full((width,), 6.0))
        assert torch.equal(got[1], torch.full((2 * width,), 6.0))


@pytest.mark.parametrize("name", ALL)
def test_shapes_strides_and_no_rows(name: str) -> None:
    fmt, width = ALL[name]
    draw = torch.Generator().manual_seed(2)
    wide = torch.randn(3, 5, 4 * width, generator=draw)
    strided = wide[:, :, ::2]
    assert torch.equal(fmt.round(strided), fmt.round(strided.contiguous()))
    assert torch.equal(fmt.pack(strided)[0], fmt.pack(strided.contiguous())[0])
    empty = fmt.pack(torch.zeros(0, width))
    assert fmt.unpack(*empty, torch.float32).shape == (0, width)
    with pytest.raises(ValueError, match=f"multiple of {width}"):
        fmt.round(torch.zeros(width + 1))


@pytest.mark.parametrize(
    "fmt",
    [*(fmt for fmt, _ in ALL.values()), Fp8WithBf16Rope(rope_dim=64, group=64), Fp8RowScale(128)],
    ids=lambda f: type(f).__name__,
)
def test_the_gradient_passes_straight_through(fmt: mxfp8.MxFp8) -> None:
    x = torch.linspace(-900, 900, 128, requires_grad=True)
    weight = torch.linspace(0, 1, 128)
    rounded = fmt.round(x)
    assert not torch.equal(rounded, x)
    (rounded * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_row_scale_is_one_float32_power_of_two() -> None:
    x = torch.linspace(-1, 1, 128)
    data, scale = Fp8RowScale(128).pack(x)
    # amax 1: 2^ceil(log2(1/448)) = 2^-8.
    assert scale.view(torch.float32).tolist() == [2.0**-8]
    assert data[0].item() == 0x80 | E4M3.index(Fraction(256))
    assert data.shape == (128,)


def test_bf16_rope_dims_are_kept_and_the_rest_has_groups_of_64() -> None:
    x = torch.linspace(-2, 2, 512)
    data, scale = Fp8WithBf16Rope(rope_dim=64).pack(x)
    assert data[448:].view(torch.bfloat16).equal(x[448:].bfloat16())
    assert scale.shape == (8,)
    assert scale[7] == 0
    for g in range(7):
        codes, byte = mx_group(x[64 * g : 64 * g + 64].tolist(), 1e-4, E4M3)
        assert scale[g] == byte
        assert data[64 * g : 64 * g + 64].tolist() == codes
