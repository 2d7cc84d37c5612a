"""Stored weight formats: the released layouts and ModelOpt's NVFP4."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from small_float_oracle import E2M1, E4M3, mx_group, nearest, nibbles

from plugins.formats import mxfp8, nvfp4, released


def scales(exponents: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    return (torch.tensor(exponents) + 127).to(torch.uint8).view(dtype)


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_dense_blocks_are_32_by_32(scale_dtype: torch.dtype) -> None:
    weight = torch.full((64, 96), 1.5).to(torch.float8_e4m3fn)
    scale = scales([[0, 1, -2], [3, -126, 10]], scale_dtype)
    got = released.dequantize_fp8_blocks(weight, scale, torch.float64)
    for i, row in enumerate([[0, 1, -2], [3, -126, 10]]):
        for j, exponent in enumerate(row):
            block = got[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
            assert (block == 1.5 * 2.0**exponent).all()


def test_dense_quantisation_equals_the_oracle_also_on_partial_blocks() -> None:
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(40, 70, generator=draw)
    weight[:32, :32] *= 1e-3
    weight[32:, 64:] = 0.0
    codes, scale = released.quantize_fp8_blocks(weight)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float8_e8m0fnu
    assert scale.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            part = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
            expected, byte = mx_group(weight[part].flatten().tolist(), 448 * 2.0**-126, E4M3)
            assert codes.view(torch.uint8)[part].flatten().tolist() == expected
            assert scale.view(torch.uint8)[i, j] == byte


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("code_dtype", [torch.int8, torch.uint8], ids=str)
def test_expert_weights_low_nibble_is_the_even_input(
    code_dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    packed[0, 0] = 0x2F  # input 0: code 15 = −6, input 1: code 2 = 1
    packed[1, 17] = 0x81  # input 34: code 1 = 0.5, input 35: code 8 = −0
    got = released.dequantize_fp4_rows(
        packed.view(code_dtype), scales([[1, 0], [0, -3]], scale_dtype), torch.float32
    )
    expected = torch.zeros(2, 64)
    expected[0, 0], expected[0, 1], expected[1, 34] = -12.0, 2.0, 0.0625
    assert torch.equal(got, expected)
    assert got[1, 35].signbit()


def test_engram_rows_have_one_scale_per_32_values_of_a_row() -> None:
    codes = torch.full((3, 64), 2.0).to(torch.float8_e4m3fn)
    got = released.dequantize_fp8_rows(
        codes, scales([[0, 1], [2, 3], [-1, -2]], torch.uint8), torch.bfloat16
    )
    assert got[:, 0].tolist() == [2.0, 8.0, 1.0]
    assert got[:, 63].tolist() == [4.0, 16.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_quantising_a_stored_weight_again_changes_no_value(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    byte = torch.randint(0, 256, (64, 64), generator=draw, dtype=torch.uint8)
    fp8 = torch.where(byte & 0x7F == 0x7F, 0, byte)
    fp8[:32, :32] &= 0x83  # a block of subnormals only
    grid = torch.randint(100, 150, (2, 2), generator=draw).to(torch.uint8)
    per_row = torch.randint(100, 150, (64, 2), generator=draw).to(torch.uint8)
    for quantise, dequantise, codes, scale in (
        (released.quantize_fp8_blocks, released.dequantize_fp8_blocks, fp8, grid),
        (released.quantize_fp8_rows, released.dequantize_fp8_rows, fp8, per_row),
        (released.quantize_fp4_rows, released.dequantize_fp4_rows, byte[:, :32], per_row),
    ):
        stored = dequantise(codes, scale, dtype)
        assert torch.equal(dequantise(*quantise(stored), dtype), stored)


def test_row_formats_write_the_released_dtypes() -> None:
    codes, scale = released.quantize_fp4_rows(torch.ones(2, 64))
    assert (codes.dtype, tuple(codes.shape)) == (torch.int8, (2, 32))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float8_e8m0fnu, (2, 2))
    codes, scale = released.quantize_fp8_rows(torch.ones(2, 64))
    assert (codes.dtype, tuple(codes.shape)) == (torch.float8_e4m3fn, (2, 64))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float8_e8m0fnu, (2, 2))


def test_a_scale_grid_of_another_block_size_is_refused() -> None:
    weight = torch.zeros(256, 256).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"expected E8M0 scales of shape \(8, 8\).*got \(2, 2\)"):
        released.dequantize_fp8_blocks(weight, torch.zeros(2, 2, dtype=torch.uint8), torch.float32)
    with pytest.raises(ValueError, match=r"expected E8M0 scales of shape \(256, 16\)"):
        released.dequantize_fp4_rows(
            torch.zeros(256, 256, dtype=torch.int8),
            torch.zeros(256, 8, dtype=torch.uint8),
            torch.float32,
        )


def test_modelopt_nvfp4_weight_equals_the_oracle() -> None:
    draw = torch.Generator().manual_seed(11)
    weight = torch.randn(8, 64, generator=draw) * 0.05
    weight[2, 16:32] = 0.0
    weight[3, :16] *= 1e-6
    packed, scale, global_scale = nvfp4.quantize_weight(weight)
    amax = np.float32(weight.abs().max().item())
    assert global_scale.item() == amax / np.float32(6 * 448)
    got_scale = scale.view(torch.uint8)
    for n in range(8):
        for g in range(4):
            block = weight[n, 16 * g : 16 * g + 16].numpy()
            ratio = np.abs(block).max() / np.float32(6) / np.float32(global_scale)
            code = nearest(Fraction(float(min(max(ratio, 2.0**-9), 448.0))), E4M3)
            assert got_scale[n, g] == code
            step = np.float32(float(E4M3[code])) * np.float32(global_scale)
            quotient = (block / step).tolist()
            codes = [nearest(abs(Fraction(q)), E2M1) | (8 if q < 0 else 0) for q in quotient]
            assert packed[n, 8 * g : 8 * g + 8].tolist() == nibbles(codes)
    value = nvfp4.dequantize_weight(packed, scale, global_scale, torch.float64)
    assert value[0, 0].item() == (
        float(E2M1[packed[0, 0].item() & 7])
        * (-1 if packed[0, 0].item() & 8 else 1)
        * float(E4M3[got_scale[0, 0].item()])
        * global_scale.item()
    )


def test_an_all_zero_nvfp4_weight_stays_zero() -> None:
    parts = nvfp4.quantize_weight(torch.zeros(2, 32))
    assert parts[2].item() == 1.0
    assert torch.equal(nvfp4.dequantize_weight(*parts, torch.float32), torch.zeros(2, 32))


def test_relative_error_on_gaussian_weights() -> None:
    """Measured on ModelOpt's own quantisers for N(0, 0.05): NVFP4 0.0945, MXFP8 0.0265."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 1024, generator=draw) * 0.05
    back = nvfp4.dequantize_weight(*nvfp4.quantize_weight(weight), torch.float32)
    assert ((back - weight).norm() / weight.norm()).item() == pytest.approx(0.0945, rel=0.01)
    back = mxfp8.WEIGHT.round(weight)
    assert ((back - weight).norm() / weight.norm()).item() == pytest.approx(0.0265, rel=0.01)


def test_nvfp4_rows_under_a_global_scale_are_the_weight_format() -> None:
    """Rows and weights are two roads to ModelOpt's layout; blocks of zeros and tiny ones too."""
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(5)) * 0.05
    weight[3, 16:32] = 0.0
    weight[4, :16] *= 1e-4
    packed, scale, global_scale = nvfp4.quantize_weight(weight)
    rows = nvfp4.NvFp4(global_scale=global_scale.item())
    got_packed, got_scale = rows.pack(weight)
    assert torch.equal(got_packed, packed)
    assert torch.equal(got_scale, scale.view(torch.uint8))
    expected = nvfp4.dequantize_weight(packed, scale, global_scale, torch.float32)
    assert torch.equal(rows.unpack(got_packed, got_scale, torch.float32), expected)
    assert torch.equal(rows.round(weight), expected)
