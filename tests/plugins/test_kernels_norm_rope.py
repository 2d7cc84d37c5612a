"""The normalisation and rotation kernels against float64."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_oracle import DEVICE, load_kernel, moved

from plugins.norm.cases import CASES as NORM_CASES
from plugins.norm.cases import NormCase
from plugins.rope.cases import CASES as ROPE_CASES
from plugins.rope.cases import RopeCase

norm, rope = load_kernel("norm"), load_kernel("rope")

DTYPES = (torch.float32, torch.bfloat16)
# The interpreter cuts float32 down to bfloat16 instead of rounding.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7 if DEVICE == "cpu" else 2**-8}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", NORM_CASES, ids=lambda case: case.name)
def test_norm(case: NormCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    ours = norm.rms_norm(**moved(operands))
    assert ours.dtype == dtype
    x = operands["x"].double()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-20).sqrt() * operands["weight"].double()
    torch.testing.assert_close(ours.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=0)


def turned(operands: dict) -> torch.Tensor:
    """Complex multiplication in float64."""
    x = operands["x"].double()
    rotated = 2 * len(operands["inv_freq"])
    angle = operands["positions"].double()[:, None] * operands["inv_freq"]
    angle = -angle if operands["inverse"] else angle
    factor = torch.polar(torch.ones_like(angle), angle)
    factor = factor.view(len(x), *[1] * (x.dim() - 2), rotated // 2)
    pairs = torch.view_as_complex(x[..., -rotated:].unflatten(-1, (rotated // 2, 2)).contiguous())
    return torch.cat([x[..., :-rotated], torch.view_as_real(pairs * factor).flatten(-2)], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROPE_CASES, ids=lambda case: case.name)
def test_rotation(case: RopeCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    ours = rope.apply_rope(**moved(operands))
    assert ours.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        ours.cpu().double(), turned(operands), rtol=tolerance, atol=4 * tolerance
    )


def test_more_vectors_than_a_program_has_and_strides() -> None:
    operands = moved(RopeCase("many", 3, 32, 16, lead=(5, 9)).operands(torch.float32))
    wide = operands["x"].new_full((3, 5, 9, 64), math.nan)
    operands["x"] = wide[..., ::2].copy_(operands["x"])
    expected = turned({name: x.cpu() if torch.is_tensor(x) else x for name, x in operands.items()})
    ours = rope.apply_rope(**operands)
    torch.testing.assert_close(ours.cpu().double(), expected, rtol=2e-6, atol=8e-6)


def test_what_does_not_turn_is_copied() -> None:
    """An infinity stays alone, and no sign of a zero is lost."""
    operands = moved(RopeCase("copy", 1, 16, 8).operands(torch.bfloat16))
    operands["x"][0, :4] = torch.tensor([math.inf, 1.0, -0.0, -0.0])
    ours = rope.apply_rope(**operands)
    assert torch.equal(ours[0, :8].view(torch.int16), operands["x"][0, :8].view(torch.int16))


def test_float64_runs_the_reference() -> None:
    operands = RopeCase("wide", 2, 16, 8).operands(torch.float64)
    ours = rope.apply_rope(**moved(operands))
    torch.testing.assert_close(ours.cpu(), turned(operands), rtol=1e-13, atol=1e-13)
    operands = NormCase("wide", (2, 16)).operands(torch.float64)
    assert norm.rms_norm(**moved(operands)).dtype == torch.float64
