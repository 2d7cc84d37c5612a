"""One row times weights kept as values, or as codes by kernels of its own, against products in
float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from kernel_oracle import DEVICE, load_kernel, moved_weight

from plugins.formats import mxfp8
from plugins.linear import LinearWeight, PackedFormat, PackedLinearWeight
from plugins.linear.cases import packed_weight

kernel = load_kernel("linear")
wo_a = load_kernel("wo_a").wo_a
kernel_row = importlib.import_module("plugins.linear.kernel_row")
# The interpreter cuts float32 down to bfloat16 instead of rounding.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7}
# Inputs, and outputs of one or two layers: as in the model, and what fills no step and no program.
SIZES = [
    (5120, (512, 512) if DEVICE == "cuda" else (40, 24)),
    (5120, (32,)),
    (512, (128,)),
    (1300, (9, 5)),
    (320, (33,)),
    (64, (7, 3)),
]


def drawn(inner: int, outputs: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(inner)
    x, *weights = (
        torch.randn(rows, inner, generator=draw).to(torch.bfloat16).to(DEVICE)
        for rows in (1, *outputs)
    )
    return x, weights


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("inner", "outputs"), SIZES)
def test_products_of_one_row(inner: int, outputs: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weights = drawn(inner, outputs)
    assert kernel_row.takes_row(x, *weights)
    ours = kernel_row.row_products(x, tuple(weights), dtype)
    expected = torch.cat([x.double() @ one.double().T for one in weights], dim=-1)
    assert ours.dtype == dtype
    assert ours.shape == expected.shape
    assert relative(ours, expected) < TOLERANCE[dtype]
    x[0, inner - 1] = torch.nan
    assert kernel_row.row_products(x, tuple(weights), dtype).isnan().all()


def test_rows_and_weights_in_larger_ones() -> None:
    x, (weight,) = drawn(320, (33,))
    rows = torch.full((3, 640), torch.nan, dtype=x.dtype, device=DEVICE)
    rows[1:2, ::2] = x
    wider = torch.full((33, 400), torch.nan, dtype=x.dtype, device=DEVICE)
    wider[:, 8:328] = weight
    ours = kernel_row.row_products(rows[1:2, ::2], (wider[:, 8:328],), torch.float32)
    assert torch.equal(ours, kernel_row.row_products(x, (weight,), torch.float32))


@pytest.mark.parametrize("rows", [1, 2])
def test_wide_layers(rows: int) -> None:
    """bfloat16 times bfloat16 into float32; a pair has the bits of its layers."""
    x, values = drawn(320, (33, 5))
    x = x.repeat(rows, 1)
    first, second = (LinearWeight(value, quantized_input=False) for value in values)
    ours = kernel.wide_linear(x, first)
    assert ours.dtype == torch.float32
    assert relative(ours, x.double() @ values[0].double().T) < TOLERANCE[torch.float32]
    pair = kernel.wide_linear_pair(x, first, second)
    assert torch.equal(pair, torch.cat([ours, kernel.wide_linear(x, second)], dim=-1))


def test_wide_layers_of_float32() -> None:
    x, (value,) = drawn(320, (33,))
    weight = LinearWeight(value.float() * 1.01, quantized_input=False)
    ours = kernel.wide_linear(x, weight)
    assert ours.dtype == torch.float32
    assert relative(ours, x.double() @ weight.value.double().T) < 1e-5


ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)


def distant_row(inner: int, draw: torch.Generator) -> torch.Tensor:
    """[1, inner] in bfloat16, of values that lie up to 10^5 apart."""
    x = torch.randn(1, inner, generator=draw)
    return (x * 10.0 ** torch.randint(-3, 3, x.shape, generator=draw)).to(torch.bfloat16)


def distant_rows(outputs: int, inner: int, draw: torch.Generator) -> torch.Tensor:
    """[outputs, inner] in float32: rows, and groups of sixteen in them, of different size."""
    values = torch.randn(outputs, inner // 16, 16, generator=draw)
    values *= 2.0 ** -torch.randint(9, (outputs, 1, 1), generator=draw)
    values *= 2.0 ** -torch.randint(4, (outputs, inner // 16, 1), generator=draw)
    return values.flatten(1)


@pytest.mark.parametrize("stored", [PackedFormat.FP8_BLOCKS, PackedFormat.MXFP8])
def test_a_long_row(stored: PackedFormat) -> None:
    """On compute capability 9.0 by kernel_long.py, which no other device runs."""
    outputs, inner = 5120 if ON_HOPPER else 64, 8192
    draw = torch.Generator().manual_seed(inner)
    kept = packed_weight(distant_rows(outputs, inner, draw), stored, torch.bfloat16)
    weight = moved_weight(kept)
    x = distant_row(inner, draw)
    assert kernel.takes_long(x.to(DEVICE), weight, kernel.packed_weight(weight), 1) == ON_HOPPER
    ours = kernel.linear(x.to(DEVICE), weight)
    expected = mxfp8.ACTIVATION.round(x.double()) @ kept.value.double().T
    assert ours.dtype == torch.bfloat16
    assert relative(ours.cpu(), expected) < TOLERANCE[torch.bfloat16]
    x[0, inner - 1] = torch.nan
    assert kernel.linear(x.to(DEVICE), weight).isnan().all()


def test_a_pair_of_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by the kernel that it has alone, though few rows of its inputs have another: as if on
    compute capability 9.0, without its launches."""
    draw = torch.Generator().manual_seed(1)
    weights = [
        moved_weight(packed_weight(distant_rows(n, 8192, draw), PackedFormat.MXFP8, torch.bfloat16))
        for n in (8, 4)
    ]
    x = distant_row(8192, draw).to(DEVICE)
    monkeypatch.setattr(kernel, "takes_long", lambda *_: True)
    monkeypatch.setattr(kernel, "takes_few", lambda *_: True)
    monkeypatch.setattr(kernel, "long_product", lambda _x, weight, _groups, *, rounds: weight.shape)
    assert kernel.linear_pair(x, *weights) == ((8, 8192), (4, 8192))


@pytest.mark.parametrize("stored", [PackedFormat.FP4_ROWS, PackedFormat.NVFP4])
@pytest.mark.parametrize(("outputs", "inner"), [(128, 1280), (70, 1280), (40, 2304), (48, 8192)])
def test_one_row_of_two_codes_a_byte(stored: PackedFormat, outputs: int, inner: int) -> None:
    """On compute capability 9.0 by kernel_one.py, also where programs are not full; a pair, whose
    global scales differ; numbers that are none, of the row and of a scale."""
    draw = torch.Generator().manual_seed(outputs + inner)
    values = distant_rows(outputs, inner, draw)
    # float32, so that values are exact which bfloat16 rounds.
    kept = packed_weight(values, stored, torch.float32)
    weight = moved_weight(kept)
    x = distant_row(inner, draw)
    assert kernel.takes_one(x.to(DEVICE), weight, kernel.packed_weight(weight)) == ON_HOPPER
    ours = kernel.linear(x.to(DEVICE), weight)
    expected = mxfp8.ACTIVATION.round(x.double()) @ kept.value.double().T
    assert ours.dtype == torch.bfloat16
    assert relative(ours.cpu(), expected) < TOLERANCE[torch.bfloat16]
    other = moved_weight(packed_weight(8 * values[:17], stored, torch.float32))
    pair = kernel.linear_pair(x.to(DEVICE), weight, other)
    assert torch.equal(pair[0], ours)
    assert torch.equal(pair[1], kernel.linear(x.to(DEVICE), other))
    weight.packed.scale.view(torch.uint8)[3, 1] = 255 if stored is PackedFormat.FP4_ROWS else 127
    third = torch.arange(outputs, device=DEVICE) == 3
    assert torch.equal(kernel.linear(x.to(DEVICE), weight)[0].isnan(), third)
    x[0, inner - 1] = torch.nan
    assert kernel.linear(x.to(DEVICE), weight).isnan().all()


def test_a_long_row_of_groups() -> None:
    """Not rounded, as wo_a's; on compute capability 9.0 by kernel_long.py."""
    groups, rank, inner = (8, 1024, 4096) if ON_HOPPER else (3, 32, 4096)
    draw = torch.Generator().manual_seed(groups)
    values = torch.randn(groups * rank, inner, generator=draw)
    values *= 2.0 ** -torch.randint(9, (len(values), 1), generator=draw)
    rounding = packed_weight(values, PackedFormat.FP8_BLOCKS, torch.bfloat16)
    kept = PackedLinearWeight(rounding.packed, quantized_input=False)
    weight = moved_weight(kept)
    o = torch.randn(1, groups * inner // 512, 512, generator=draw)
    o = (o * 10.0 ** torch.randint(-3, 3, o.shape, generator=draw)).to(torch.bfloat16)
    stored = kernel.packed_weight(weight)
    assert kernel.takes_long(o.to(DEVICE).flatten(1), weight, stored, groups) == ON_HOPPER
    ours = wo_a(o.to(DEVICE), weight, groups)
    x, of_groups = o.double().view(groups, inner, 1), kept.value.double().view(groups, rank, inner)
    expected = (of_groups @ x).view(1, -1)
    assert ours.dtype == torch.bfloat16
    assert relative(ours.cpu(), expected) < TOLERANCE[torch.bfloat16]
    o.view(groups, inner)[1, inner - 1] = torch.nan
    of_second = torch.arange(groups * rank, device=DEVICE) // rank == 1
    assert torch.equal(wo_a(o.to(DEVICE), weight, groups)[0].isnan(), of_second)
