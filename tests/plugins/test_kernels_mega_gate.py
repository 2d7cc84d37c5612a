"""The gate kernel against float64: scores, choice, ties, weights."""

from __future__ import annotations

import pytest
import torch
from kernel_oracle import DEVICE, load_kernel, moved

from plugins.mega_gate import Routing
from plugins.mega_gate.cases import CASES, GateCase

kernel = load_kernel("mega_gate")

DTYPES = (torch.float32, torch.bfloat16)


def in_float64(operands: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and biased scores [T, E] from the formula."""
    x = operands["u"].double() @ operands["weight"].double().T / operands["gate_temp"]
    scores = torch.nn.functional.softplus(x, threshold=1e3).sqrt()
    # softplus(x) of far negative x is exp(x), which log1p keeps and log(1 + exp(x)) loses.
    bias = operands["bias"].double()
    if operands["is_image"] is not None:
        image = operands["bias_image"].double()
        bias = torch.where(operands["is_image"][:, None], image, bias)
    return scores, scores + bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case(case: GateCase, dtype: torch.dtype) -> None:
    if case.width > 1000 and dtype == torch.float32 and DEVICE == "cpu":
        pytest.skip("seconds in the interpreter; bfloat16 runs it")
    operands = case.operands(dtype)
    ours = Routing(*(x.cpu() for x in kernel.mega_gate(**moved(operands))))
    assert ours.ids.dtype == torch.int64
    assert ours.weights.dtype == torch.float32
    assert ours.ids.shape == ours.weights.shape == (case.rows, case.top_k)
    scores, biased = in_float64(operands)
    # The order by descending biased score, of equal ones the lower id; near ties may swap.
    expected = biased.sort(dim=1, descending=True, stable=True).indices[:, : case.top_k]
    if case.logit_scale == 0.0:
        assert torch.equal(ours.ids, expected)
    else:
        torch.testing.assert_close(
            biased.gather(1, ours.ids), biased.gather(1, expected), rtol=0, atol=1e-5
        )
    weights = scores.gather(1, ours.ids)
    if case.top_k > 1:
        weights = weights / weights.sum(1, keepdim=True)
    torch.testing.assert_close(ours.weights.double(), 1.5 * weights, rtol=2e-5, atol=1e-15)


def gate(u: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int) -> Routing:
    operands = {"u": u, "weight": weight, "bias": bias, "bias_image": None, "is_image": None}
    sizes = {"top_k": top_k, "route_scale": 1.0, "gate_temp": 1.0}
    return kernel.mega_gate(**moved(operands), **sizes)


def test_strided_rows_and_weights() -> None:
    """Parts of a projection, and every other column of a wider weight."""
    operands = moved(GateCase("strided", 5, 64, 16, 3).operands(torch.float32))
    whole = kernel.mega_gate(**operands)
    u = operands["u"].new_full((5, 80), torch.nan)
    weight = operands["u"].new_full((16, 128), torch.nan)
    strided = {"u": u[:, 8:72], "weight": weight[:, ::2]}
    for name, part in strided.items():
        part.copy_(operands[name])
    for ours, expected in zip(kernel.mega_gate(**operands | strided), whole, strict=True):
        assert torch.equal(ours, expected)


def test_the_lower_id_wins_a_tie() -> None:
    bias = torch.tensor([0.0, 0.5, 1.0, 0.5, 0.0, 1.0, 0.5])
    routing = gate(torch.ones(3, 4), torch.zeros(7, 4), bias, 4)
    assert routing.ids.tolist() == [[2, 5, 1, 3]] * 3
    torch.testing.assert_close(routing.weights.cpu(), torch.full((3, 4), 0.25))


def test_equal_sums_of_either_sign_of_zero_tie() -> None:
    score = torch.tensor(2.0).log().sqrt()
    routing = gate(torch.ones(1, 4), torch.zeros(3, 4), torch.stack([-score, score, -score]), 3)
    assert routing.ids.tolist() == [[1, 0, 2]]


def test_far_scores_keep_their_relative_precision() -> None:
    """sqrt(softplus(x)) of x = −30, −60 and −80 is exp(x / 2)."""
    x = torch.tensor([[-30.0], [-60.0], [-80.0], [100.0]])
    routing = gate(torch.ones(1, 1), x, torch.zeros(4), 4)
    assert routing.ids.tolist() == [[3, 0, 1, 2]]
    expected = torch.tensor(
        [[10.0, 3.0590232e-07, 9.3576230e-14, 4.2483543e-18]], dtype=torch.float64
    )
    torch.testing.assert_close(routing.weights.cpu().double(), expected / 10.0, rtol=5e-6, atol=0)


def test_rows_of_nan_choose_distinct_experts() -> None:
    """What a padding row holds must not lead the experts' kernels out of bounds."""
    u = torch.ones(2, 8)
    u[1] = torch.nan
    draw = torch.Generator().manual_seed(0)
    routing = gate(u, torch.randn(5, 8, generator=draw), torch.zeros(5), 3)
    assert len(set(routing.ids[1].tolist())) == 3
    assert all(0 <= e < 5 for e in routing.ids[1].tolist())
    assert routing.weights[0].isfinite().all()


def test_a_row_does_not_depend_on_the_batch() -> None:
    operands = GateCase("batch", 70, 150, 24, 6, images=True).operands(torch.float32)
    if DEVICE == "cpu":
        # The interpreter's products add in an order of their own, by shape: values of few bits,
        # whose sums are exact.
        operands |= {name: (4 * operands[name]).round() / 4 for name in ("u", "weight")}
    whole = kernel.mega_gate(**moved(operands))
    for part in (slice(4, 5), slice(0, 17), slice(2, 66)):
        some = {name: operands[name][part] for name in ("u", "is_image")}
        alone = kernel.mega_gate(**moved({**operands, **some}))
        assert torch.equal(alone.ids, whole.ids[part])
        assert torch.equal(alone.weights, whole.weights[part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_library_gives_the_same_choice(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = moved(GateCase("many", 30, 192, 24, 6, images=True).operands(dtype))
    few = kernel.mega_gate(**operands)
    monkeypatch.setattr(kernel, "LIBRARY_ROWS", 0)
    many = kernel.mega_gate(**operands)
    assert torch.equal(many.ids, few.ids)
    torch.testing.assert_close(many.weights, few.weights, rtol=1e-5, atol=0)


def test_more_experts_than_there_are_and_float64_run_the_reference() -> None:
    with pytest.raises(ValueError, match="at most 3, the number of experts, got 4"):
        gate(torch.ones(1, 2), torch.ones(3, 2), torch.zeros(3), 4)
    operands = GateCase("wide", 2, 32, 8, 2).operands(torch.float64)
    assert kernel.mega_gate(**moved(operands)).weights.dtype == torch.float64
