"""The linear layer: values, input rounding, and results that do not depend on the batch."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from small_float_oracle import E4M3, mx_group

from plugins.formats.nvfp4 import quantize_weight
from plugins.linear import (
    ROW_TILE,
    LinearWeight,
    PackedFormat,
    PackedLinearWeight,
    PackedMatrix,
    linear,
    row_tiled,
)
from plugins.linear.cases import CASES, LinearCase


def rounded(row: list[float]) -> list[float]:
    """MXFP8 rounding of one row by rational arithmetic."""
    result = []
    for start in range(0, len(row), 32):
        codes, byte = mx_group(row[start : start + 32], 1e-4, E4M3)
        scale = Fraction(2) ** (byte - 127)
        result += [float((-1 if c & 0x80 else 1) * E4M3[c & 0x7F] * scale) for c in codes]
    return result


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2.0**-8)],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_the_definition(case: LinearCase, dtype: torch.dtype, tolerance: float) -> None:
    operands = case.operands(dtype)
    x, weight = operands["x"].double(), operands["weight"].value.double()
    if case.quantized_input:
        x = torch.tensor([rounded(row) for row in x.tolist()], dtype=torch.float64)
    x = x.reshape(case.rows, case.in_features)
    expected = x.numpy() @ weight.T.numpy()
    got = linear(**operands)
    assert got.dtype == dtype
    assert got.shape == (case.rows, case.out_features)
    # One rounding of the result, and the rounding of sums whose terms partly cancel.
    terms = np.abs(x.numpy()) @ np.abs(weight.T.numpy())
    error = np.abs(got.double().numpy() - expected)
    assert (error <= tolerance * (np.abs(expected) + terms / 32)).all()


def test_only_a_quantised_weight_rounds_its_input() -> None:
    x = torch.full((1, 32), 1.03)
    identity = torch.eye(32)
    assert torch.equal(linear(x, LinearWeight(identity, quantized_input=False)), x)
    # amax 1.03: scale 2^-8, 1.03 · 256 = 263.7 rounds to 256.
    got = linear(x, LinearWeight(identity, quantized_input=True))
    assert torch.equal(got, torch.ones(1, 32))


def test_an_input_scale_rounds_to_nvfp4() -> None:
    """Under input scale 1/2. Largest 6: block scale E4M3(6 / 6 / 0.5) = 2, a code counts 1. Largest
    12000: the block scale saturates at 448, a code counts 224, and 6 · 224 = 1344 is the most."""
    row = [6.0, -2.4, 2.5, 5.1, 0.24, 0.26, -0.75, 0.0] * 2 + [12000.0, -100.0, 300.0, 0.0] * 4
    expected = [6.0, -2.0, 2.0, 6.0, 0.0, 0.5, -1.0, 0.0] * 2 + [1344.0, -112.0, 336.0, 0.0] * 4
    weight = LinearWeight(torch.eye(32), quantized_input=True, input_scale=torch.tensor(0.5))
    assert linear(torch.tensor([row]), weight).tolist() == [expected]
    packed = quantize_weight(torch.eye(32))
    matrix = PackedMatrix(PackedFormat.NVFP4, (32, 32), *packed, torch.float32)
    weight = PackedLinearWeight(matrix, True, torch.tensor(0.5))
    assert linear(torch.tensor([row]), weight).tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs", "quantized_input"),
    [(64, 96, False), (64, 96, True), (33, 7, False), (1280, 200, True), (160, 1, True)],
)
def test_a_row_does_not_depend_on_the_batch(
    inputs: int, outputs: int, quantized_input: bool, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(70, inputs, generator=draw).to(dtype)
    weight = LinearWeight(torch.randn(outputs, inputs, generator=draw).to(dtype), quantized_input)
    alone = torch.cat([linear(row[None], weight) for row in x])
    for rows in range(1, 71):
        order = torch.randperm(70, generator=draw)[:rows]
        assert torch.equal(linear(x[order], weight), alone[order]), rows


def test_row_tiles_have_one_shape_and_padding_is_cut() -> None:
    shapes = []

    def twice(tile: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tile.shape))
        return 2 * tile

    for rows in (1, ROW_TILE - 1, ROW_TILE, ROW_TILE + 1, 3 * ROW_TILE):
        x = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
        assert torch.equal(row_tiled(x, twice), 2 * x)
    assert set(shapes) == {(ROW_TILE, 3)}
    assert len(shapes) == 1 + 1 + 1 + 2 + 3


def test_float64_and_training_see_all_rows_at_once() -> None:
    for x in (torch.zeros(40, 3, dtype=torch.float64), torch.zeros(40, 3, requires_grad=True)):
        shapes = []
        row_tiled(x, lambda tile, shapes=shapes: (shapes.append(tile.shape[0]), tile)[1])
        assert shapes == [40]


def test_gradients_reach_input_and_weight() -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    value = torch.ones(2, 32, requires_grad=True)
    linear(x, LinearWeight(value, quantized_input=True)).sum().backward()
    assert x.grad.tolist() == [[2.0] * 32] * 5
    expected = torch.tensor([rounded(row) for row in x.detach().tolist()]).sum(0)
    assert torch.allclose(value.grad, expected.expand(2, 32), atol=1e-5)
