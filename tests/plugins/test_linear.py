"""The linear layer: values, input rounding, and results that do not depend on the batch."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from small_float_oracle import E4M3, mx_group

from plugins.linear import ROW_TILE, LinearWeight, linear, row_tiled
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
