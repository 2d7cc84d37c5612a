"""Pair pooling against a per-channel oracle and its limits."""

from __future__ import annotations

import math

import pytest
import torch

from plugins.compressor import pool_pairs, previous_rows
from plugins.compressor.cases import CASES, PoolCase
from plugins.formats.rows import ValueRows

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-6}


def oracle(a: list[float], b: list[float]) -> float:
    """Softmax over two logits, as a logistic of their difference."""
    difference = min(max(b[1] - b[0], -700.0), 700.0)
    weight = 1.0 / (1.0 + math.exp(difference))
    return weight * a[0] + (1.0 - weight) * a[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_the_per_channel_oracle(case: PoolCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    pooled = pool_pairs(**operands)
    assert pooled.dtype == torch.promote_types(dtype, torch.float32)
    assert pooled.shape == (case.pairs, case.width)
    a, b = (operands[name].double().transpose(1, 2).flatten(0, 1).tolist() for name in ("a", "b"))
    expected = torch.tensor([oracle(*pair) for pair in zip(a, b, strict=True)]).double()
    torch.testing.assert_close(
        pooled.double().flatten(), expected, rtol=0, atol=5 * max(TOLERANCE[dtype], 1e-7)
    )


def test_hand_computed_pair() -> None:
    """Logits 0 and ln 3: weights 1/4 and 3/4."""
    a = torch.tensor([[[4.0], [8.0]]], dtype=torch.float64)
    b = torch.tensor([[[0.0], [math.log(3.0)]]], dtype=torch.float64)
    torch.testing.assert_close(pool_pairs(a, b), torch.tensor([[7.0]], dtype=torch.float64))


def test_equal_logits_give_the_mean_and_equal_values_stay() -> None:
    a = torch.randn(5, 2, 33, dtype=torch.float64)
    torch.testing.assert_close(pool_pairs(a, torch.full_like(a, 3.0)), a.mean(1))
    same = a[:, :1].expand(-1, 2, -1)
    torch.testing.assert_close(pool_pairs(same, torch.randn_like(a)), same[:, 0])


def test_a_pair_does_not_depend_on_the_batch() -> None:
    operands = PoolCase("batch", 41, 64).operands(torch.float32)
    whole = pool_pairs(**operands)
    for start in range(41):
        for pairs in (1, 2, 17):
            part = slice(start, start + pairs)
            alone = pool_pairs(operands["a"][part].clone(), operands["b"][part].clone())
            assert torch.equal(alone, whole[part])


def test_gradients() -> None:
    operands = PoolCase("gradient", 3, 4).operands(torch.float64)
    inputs = [operands[name].requires_grad_() for name in ("a", "b")]
    assert torch.autograd.gradcheck(pool_pairs, inputs)


def test_the_row_before_comes_from_the_batch_or_the_tail() -> None:
    """Three requests; the first one's chunk overwrites the very slot that its first row reads."""
    tail = ValueRows(torch.tensor([[10.0], [11], [12], [13], [14], [15]]))
    previous = previous_rows(
        torch.tensor([[1.0], [2], [3], [4], [5]]),
        tail,
        request=torch.tensor([0, 0, 0, 1, 2]),
        is_first=torch.tensor([True, False, False, True, True]),
        read_slots=torch.tensor([1, 2, -1]),
        write_slots=torch.tensor([-1, 0, 1, 3, 4]),
    )
    assert previous.flatten().tolist() == [11, 1, 2, 12, 0]
    assert tail.values.flatten().tolist() == [2, 3, 12, 4, 5, 15]
