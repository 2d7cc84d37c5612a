"""The grouped output projection against one matrix product per group."""

import numpy as np
import pytest
import torch

from plugins.formats import mxfp8
from plugins.linear import LinearWeight
from plugins.wo_a import wo_a
from plugins.wo_a.cases import CASES, WoACase


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.3)],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_one_product_per_group(case: WoACase, dtype: torch.dtype, tolerance: float) -> None:
    operands = case.operands(dtype)
    o, weight = operands["o"].contiguous(), operands["weight"].value.double().numpy()
    if case.quantized_input:
        o = mxfp8.ACTIVATION.round(o)  # the format itself is tested against rational arithmetic
    o = o.double().numpy()
    per_group = case.heads // case.groups
    expected = np.zeros((case.rows, case.groups * case.rank))
    for t in range(case.rows):
        for g in range(case.groups):
            joined = o[t, g * per_group : (g + 1) * per_group].reshape(-1)
            for n in range(case.rank):
                expected[t, g * case.rank + n] = joined @ weight[g * case.rank + n]
    got = wo_a(**operands)
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert np.abs(got.double().numpy() - expected).max(initial=0.0) <= tolerance


def test_a_group_reads_its_own_heads_only() -> None:
    o = torch.zeros(1, 4, 2)
    o[0, 2, 1] = 5.0  # group 1, its first head, channel 1
    weight = torch.arange(1.0, 25.0).view(6, 4)
    got = wo_a(o, LinearWeight(weight, quantized_input=False), 2)
    assert got.tolist() == [[0.0, 0.0, 0.0, 5 * 14.0, 5 * 18.0, 5 * 22.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantized_input", [False, True])
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype, quantized_input: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    o = torch.randn(70, 4, 64, generator=draw).to(dtype)
    weight = LinearWeight(torch.randn(64, 128, generator=draw).to(dtype), quantized_input)
    alone = torch.cat([wo_a(row[None], weight, 2) for row in o])
    for rows in range(1, 71):
        order = torch.randperm(70, generator=draw)[:rows]
        assert torch.equal(wo_a(o[order], weight, 2), alone[order]), rows


def test_a_weight_that_does_not_fit_is_refused() -> None:
    weight = LinearWeight(torch.zeros(6, 4), quantized_input=False)
    with pytest.raises(ValueError, match=r"for 3 groups of 4 heads of 2, got \(6, 4\)"):
        wo_a(torch.zeros(1, 4, 2), weight, 3)
