"""RMS normalisation against Python arithmetic."""

import math

import pytest
import torch

from plugins.norm import rms_norm
from plugins.norm.cases import CASES, NormCase

EPS = 1e-20


def oracle(row: list[float], weight: list[float]) -> list[float]:
    mean = math.fsum(v * v for v in row) / len(row)
    return [v / math.sqrt(mean + EPS) * w for v, w in zip(row, weight, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-15), (torch.float32, 3e-7), (torch.bfloat16, 2.0**-8)],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_the_definition(case: NormCase, dtype: torch.dtype, tolerance: float) -> None:
    operands = case.operands(dtype)
    got = rms_norm(**operands)
    assert got.dtype == dtype
    assert got.shape == operands["x"].shape
    rows = operands["x"].double().reshape(-1, case.shape[-1]).tolist()
    weight = operands["weight"].double().tolist()
    for row, result in zip(rows, got.double().reshape(-1, case.shape[-1]).tolist(), strict=True):
        for expected, value in zip(oracle(row, weight), result, strict=True):
            assert abs(value - expected) <= tolerance * abs(expected)


def test_bfloat16_rounds_once_at_the_end() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 256, generator=draw).bfloat16()
    weight = (1 + 0.1 * torch.randn(256, generator=draw)).bfloat16()
    assert torch.equal(
        rms_norm(x, weight, EPS), rms_norm(x.float(), weight.float(), EPS).bfloat16()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [33, 64, 5120])
def test_a_row_does_not_depend_on_the_batch(width: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(40, width, generator=draw).to(dtype)
    weight = torch.randn(width, generator=draw).to(dtype)
    alone = torch.cat([rms_norm(row[None], weight, EPS) for row in x])
    for rows in (2, 3, 16, 17, 40):
        assert torch.equal(rms_norm(x[:rows], weight, EPS), alone[:rows])
        assert torch.equal(rms_norm(x[-rows:], weight, EPS), alone[-rows:])
