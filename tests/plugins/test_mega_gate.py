"""The expert gate against a per-token oracle, hand-computed scores and its tie rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from plugins.mega_gate import mega_gate
from plugins.mega_gate.cases import CASES, GateCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-6}
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float64).numpy()


def test_scores_are_the_root_of_softplus() -> None:
    """Top-1 weights are 1.5 · score, not normalised: sqrt-softplus of −2, 0, 1, 3."""
    u = torch.tensor([[-2.0], [0.0], [1.0], [3.0]], dtype=torch.float64)
    routing = mega_gate(
        u,
        torch.ones(2, 1, dtype=torch.float64),
        torch.tensor([0.0, 1.0]),
        None,
        None,
        top_k=1,
        route_scale=1.5,
        gate_temp=1.0,
    )
    assert routing.ids.flatten().tolist() == [1, 1, 1, 1]
    expected = 1.5 * torch.tensor([0.35626958, 0.83255461, 1.14597630, 1.74602043])
    torch.testing.assert_close(routing.weights[:, 0], expected.double(), rtol=0, atol=1e-7)


@by_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_the_per_token_oracle(case: GateCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    routing = mega_gate(**operands)
    assert routing.ids.dtype == torch.int64
    assert routing.weights.dtype == torch.promote_types(dtype, torch.float32)
    assert routing.ids.shape == routing.weights.shape == (case.rows, case.top_k)
    for t in range(case.rows):
        logits = to_numpy(operands["weight"]) @ to_numpy(operands["u"][t]) / case.gate_temp
        scores = np.array([math.sqrt(max(x, 0) + math.log1p(math.exp(-abs(x)))) for x in logits])
        image = case.images and bool(operands["is_image"][t])
        biased = scores + to_numpy(operands["bias_image" if image else "bias"])
        ids = routing.ids[t].tolist()
        assert len(set(ids)) == case.top_k
        # Selection by meaning: rounding may swap near-ties, so allow its size.
        slack = 10 * TOLERANCE[dtype] * (1 + np.abs(biased).max())
        rest = np.delete(biased, ids)
        assert biased[ids].min() >= rest.max(initial=-np.inf) - slack
        assert (np.diff(biased[ids]) <= slack).all(), "ids are not by descending biased score"
        expected = scores[ids]
        if case.top_k > 1:
            expected = expected / expected.sum()
        np.testing.assert_allclose(
            to_numpy(routing.weights[t]), 1.5 * expected, rtol=20 * TOLERANCE[dtype], atol=1e-15
        )


def test_the_lower_id_wins_a_tie() -> None:
    bias = torch.tensor([0.0, 0.5, 1.0, 0.5, 0.0, 1.0, 0.5])
    routing = mega_gate(
        torch.randn(3, 4),
        torch.zeros(7, 4),
        bias,
        None,
        None,
        top_k=4,
        route_scale=1.0,
        gate_temp=1.0,
    )
    assert routing.ids.tolist() == [[2, 5, 1, 3]] * 3
    torch.testing.assert_close(routing.weights, torch.full((3, 4), 0.25))


def test_the_image_bias_moves_image_rows_only() -> None:
    bias, bias_image = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    routing = mega_gate(
        torch.randn(4, 5),
        torch.zeros(3, 5),
        bias,
        bias_image,
        torch.tensor([False, True, True, False]),
        top_k=1,
        route_scale=1.0,
        gate_temp=1.0,
    )
    assert routing.ids.flatten().tolist() == [0, 2, 2, 0]


def test_a_bias_never_enters_the_weights() -> None:
    operands = GateCase("bias", 6, 16, 4, 4).operands(torch.float64)
    plain = mega_gate(**operands)
    shifted = mega_gate(**{**operands, "bias": operands["bias"] * 100.0})
    torch.testing.assert_close(
        torch.zeros(6, 4, dtype=torch.float64).scatter(1, plain.ids, plain.weights),
        torch.zeros(6, 4, dtype=torch.float64).scatter(1, shifted.ids, shifted.weights),
        rtol=1e-14,
        atol=0,
    )
    torch.testing.assert_close(plain.weights.sum(1), torch.full((6,), 1.5, dtype=torch.float64))


def test_more_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match="at most 3, the number of experts, got 4"):
        mega_gate(
            torch.randn(1, 2),
            torch.randn(3, 2),
            torch.zeros(3),
            None,
            None,
            top_k=4,
            route_scale=1.0,
            gate_temp=1.0,
        )


@pytest.mark.parametrize("rows", [1, 2, 15, 17])
def test_a_row_does_not_depend_on_the_batch(rows: int) -> None:
    operands = GateCase("batch", 41, 128, 24, 6, images=True).operands(torch.float32)
    whole = mega_gate(**operands)
    for start in range(0, 41 - rows, 3):
        part = slice(start, start + rows)
        row_operands = {name: operands[name][part].clone() for name in ("u", "is_image")}
        alone = mega_gate(**{**operands, **row_operands})
        assert torch.equal(alone.ids, whole.ids[part])
        assert torch.equal(alone.weights, whole.weights[part])


def test_gradients() -> None:
    operands = GateCase("gradient", 3, 5, 6, 2).operands(torch.float64)
    u, weight = (operands.pop(name).requires_grad_() for name in ("u", "weight"))

    def weights(u, weight):
        return mega_gate(u, weight, **operands).weights

    assert torch.autograd.gradcheck(weights, (u, weight))
