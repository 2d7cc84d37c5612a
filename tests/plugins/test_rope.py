"""Rotary embedding against complex multiplication in Python."""

import cmath

import pytest
import torch

from plugins.rope import apply_rope
from plugins.rope.cases import CASES, RopeCase


def oracle(row: list[float], position: int, inv_freq: list[float], inverse: bool) -> list[float]:
    """The last 2·len(inv_freq) values as adjacent (real, imaginary) pairs, turned."""
    plain = len(row) - 2 * len(inv_freq)
    result = row[:plain]
    for k, frequency in enumerate(inv_freq):
        pair = complex(row[plain + 2 * k], row[plain + 2 * k + 1])
        angle = position * frequency
        turned = pair * cmath.rect(1.0, -angle if inverse else angle)
        result += [turned.real, turned.imag]
    return result


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_the_definition(case: RopeCase, dtype: torch.dtype, tolerance: float) -> None:
    operands = case.operands(dtype)
    x, positions = operands["x"], operands["positions"].tolist()
    got = apply_rope(**operands)
    assert got.dtype == dtype
    assert got.shape == x.shape
    plain = case.width - case.rotated
    assert torch.equal(got[..., :plain], x[..., :plain])
    frequencies = operands["inv_freq"].tolist()
    for t, position in enumerate(positions):
        rows = x[t].double().reshape(-1, case.width).tolist()
        results = got[t].double().reshape(-1, case.width).tolist()
        for row, result in zip(rows, results, strict=True):
            expected = oracle(row, position, frequencies, case.inverse)
            for e, value in zip(expected, result, strict=True):
                assert abs(e - value) <= tolerance * 4.0


def test_a_quarter_turn() -> None:
    x = torch.tensor([[7.0, 1.0, 0.0, 0.0, 2.0]], dtype=torch.float64)[:, :5]
    frequency = torch.tensor([cmath.pi / 2, cmath.pi], dtype=torch.float64)
    got = apply_rope(x, torch.tensor([1]), frequency)
    expected = torch.tensor([[7.0, 0.0, 1.0, 0.0, -2.0]], dtype=torch.float64)
    assert torch.allclose(got, expected, atol=1e-15)


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(apply_rope(x, torch.tensor([0]), torch.ones(8).double()), x)


def test_inverse_undoes_the_rotation_at_a_long_position() -> None:
    x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.tensor([0, 1, 127, 1_048_575])
    frequency = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turned = apply_rope(x, positions, frequency)
    back = apply_rope(turned, positions, frequency, inverse=True)
    assert torch.allclose(back, x, atol=1e-14)
    assert not torch.allclose(turned[1:], x[1:], atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pairs", [1, 3, 8, 32])
def test_a_row_does_not_depend_on_the_batch(pairs: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(37, 3, 2 * pairs + 4, generator=draw).to(dtype)
    positions = torch.randint(0, 1_000_000, (37,), generator=draw)
    frequency = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    alone = torch.cat(
        [apply_rope(x[t : t + 1], positions[t : t + 1], frequency) for t in range(37)]
    )
    for first, last in ((0, 37), (0, 16), (5, 22), (35, 37)):
        got = apply_rope(x[first:last], positions[first:last], frequency)
        assert torch.equal(got, alone[first:last])
