"""The mixture of experts against a per-token oracle that knows MXFP8 on its own."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch
from small_float_oracle import E2M1, E4M3, mx_group, nearest

from plugins.moe import ExpertWeights, moe
from plugins.moe.cases import CASES, MoeCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float64).numpy()


def mxfp8(x: np.ndarray) -> np.ndarray:
    """x rounded in groups of 32 by trying every code in exact arithmetic."""
    result = []
    for group in x.reshape(-1, 32).tolist():
        codes, scale = mx_group(group, 1e-4, E4M3)
        values = [float(E4M3[code & 0x7F]) * 2.0 ** (scale - 127) for code in codes]
        result += [-v if code & 0x80 else v for v, code in zip(values, codes, strict=True)]
    return np.array(result)


def oracle_expert(u, w1, w3, w2, limit, weight, quantized, cast):
    x = mxfp8(u) if quantized else u
    gate, linear = np.minimum(w1 @ x, limit), np.clip(w3 @ x, -limit, limit)
    a = cast(gate / (1 + np.exp(-gate)) * linear * weight)
    return w2 @ (mxfp8(a) if quantized else a)


@pytest.mark.parametrize(
    ("case", "dtype"),
    # In narrow types a value at a rounding border may take the other code; see the test below.
    [(c, d) for c in CASES for d in DTYPES if not (c.quantized_input and d != torch.float64)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_matches_the_per_token_oracle(case: MoeCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    y = moe(**operands)
    assert y.dtype == dtype
    assert y.shape == (case.rows, case.width)

    def cast(a: np.ndarray) -> np.ndarray:
        return to_numpy(torch.from_numpy(a).to(dtype))

    def weights(experts: ExpertWeights, e: int) -> list[np.ndarray]:
        return [to_numpy(w[e]) for w in (experts.w1, experts.w3, experts.w2)]

    for t in range(case.rows):
        u = to_numpy(operands["u"][t])
        args = (case.swiglu_limit,)
        expected = np.zeros(case.width)
        for e, weight in zip(operands["ids"][t].tolist(), operands["weights"][t], strict=True):
            expected += oracle_expert(
                u, *weights(operands["routed"], e), *args, float(weight), case.quantized_input, cast
            )
        for e in range(case.shared):
            expected += oracle_expert(
                u, *weights(operands["shared"], e), *args, 1.0, case.quantized_input, cast
            )
        scale = max(1e-3, np.abs(expected).max())
        np.testing.assert_allclose(to_numpy(y[t]), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_types_stay_near_float64_with_quantised_inputs(dtype: torch.dtype) -> None:
    """One flipped E4M3 code moves one activation by 1/16 of itself, an output by far less."""
    case = next(c for c in CASES if c.name == "many groups")
    narrow = case.operands(dtype)
    wide = {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else ExpertWeights(value.w1.double(), value.w3.double(), value.w2.double(), True)
        if isinstance(value, ExpertWeights)
        else value
        for name, value in narrow.items()
    }
    expected = moe(**wide)
    error = (moe(**narrow).double() - expected).square().mean().sqrt()
    limit = 0.003 if dtype == torch.float32 else 0.03
    assert error < limit * expected.square().mean().sqrt()


def nvfp4(x: np.ndarray, scale: float) -> np.ndarray:
    """x rounded in groups of 16 by trying every code in exact arithmetic, under an input scale."""
    result = []
    for group in x.reshape(-1, 16).tolist():
        exact = Fraction(max(map(abs, group))) / 6 / Fraction(scale)
        step = E4M3[nearest(min(max(exact, Fraction(1, 512)), Fraction(448)), E4M3)]
        step *= Fraction(scale)
        codes = (E2M1[nearest(min(abs(Fraction(v)) / step, Fraction(6)), E2M1)] for v in group)
        result += [
            float(code * step) * (-1) ** (v < 0) for code, v in zip(codes, group, strict=True)
        ]
    return np.array(result)


def test_each_expert_rounds_under_its_own_input_scales() -> None:
    """W4A4: of w1 and w3, and of w2; the shared expert has its own."""
    operands = MoeCase("w4a4", 6, 64, 32, 4, 2, swiglu_limit=5.0).operands(torch.float64)
    scales = {"routed": 2.0 ** -torch.arange(4, 12.0).view(4, 2), "shared": torch.ones(1, 2) / 99}
    for name, scale in scales.items():
        operands[name] = dataclasses.replace(
            operands[name], quantized_input=True, input_scale=scale
        )
    y = moe(**operands)

    def expert(u: np.ndarray, name: str, e: int, weight: float) -> np.ndarray:
        into, inner = scales[name][e].tolist()
        w1, w3, w2 = (to_numpy(w[e]) for w in (operands[name].w1, operands[name].w3,
                                                operands[name].w2))  # fmt: skip
        x = nvfp4(u, into)
        gate, linear = np.minimum(w1 @ x, 5.0), np.clip(w3 @ x, -5.0, 5.0)
        return w2 @ nvfp4(gate / (1 + np.exp(-gate)) * linear * weight, inner)

    for t in range(6):
        u = to_numpy(operands["u"][t])
        chosen = zip(operands["ids"][t].tolist(), operands["weights"][t].tolist(), strict=True)
        expected = sum(expert(u, "routed", e, weight) for e, weight in chosen)
        expected = expected + expert(u, "shared", 0, 1.0)
        np.testing.assert_allclose(to_numpy(y[t]), expected, rtol=0, atol=1e-12)
    alone = [moe(**{**operands, **{n: operands[n][t:][:1] for n in ("u", "ids", "weights")}})
             for t in range(6)]  # fmt: skip
    torch.testing.assert_close(torch.cat(alone), y, rtol=1e-13, atol=0)


@pytest.mark.parametrize("quantized", [False, True])
def test_equal_experts_give_the_sum_of_their_weights(quantized: bool) -> None:
    """Weights that sum to 1.5, plus the shared expert: 2.5 · expert(u)."""
    operands = MoeCase("equal", 7, 64, 32, 4, 2).operands(torch.float64)
    one = operands["shared"]
    routed = ExpertWeights(*(w.expand(4, -1, -1) for w in (one.w1, one.w3, one.w2)), False)
    # Powers of two keep the MXFP8 rounding of the weighted activation scale-free.
    weights = torch.tensor([[1.0, 0.5]], dtype=torch.float64).expand(7, -1)
    if quantized:
        one, routed = (dataclasses.replace(w, quantized_input=True) for w in (one, routed))
    only_shared = moe(operands["u"], operands["ids"], 0.0 * weights, routed, one, swiglu_limit=1.0)
    y = moe(operands["u"], operands["ids"], weights, routed, one, swiglu_limit=1.0)
    torch.testing.assert_close(y, 2.5 * only_shared, rtol=1e-12, atol=1e-14)


def test_experts_that_no_row_chose_are_not_read() -> None:
    operands = MoeCase("unread", 6, 32, 32, 8, 2).operands(torch.float32)
    operands["ids"] = torch.tensor([[0, 6], [6, 2], [0, 2], [2, 0], [6, 0], [2, 6]])
    expected = moe(**operands)
    for w in (operands["routed"].w1, operands["routed"].w3, operands["routed"].w2):
        w[[1, 3, 4, 5, 7]] = torch.nan
    assert torch.equal(moe(**operands), expected)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 15, 17])
def test_a_row_does_not_depend_on_the_batch(rows: int, quantized: bool) -> None:
    case = MoeCase("batch", 41, 128, 64, 8, 3, quantized_input=quantized)
    operands = case.operands(torch.float32)
    whole = moe(**operands)
    for start in range(0, 41 - rows, 5):
        part = slice(start, start + rows)
        row_operands = {name: operands[name][part].clone() for name in ("u", "ids", "weights")}
        assert torch.equal(moe(**{**operands, **row_operands}), whole[part])


def test_the_order_of_a_rows_experts_does_not_matter() -> None:
    operands = MoeCase("order", 9, 64, 32, 8, 4).operands(torch.float32)
    flipped = {name: operands[name].flip(1) for name in ("ids", "weights")}
    assert torch.equal(moe(**operands), moe(**{**operands, **flipped}))


def test_gradients() -> None:
    case = MoeCase("gradient", 4, 3, 2, 3, 2, swiglu_limit=1e3)
    operands = case.operands(torch.float64)
    routed, shared = operands["routed"], operands["shared"]
    inputs = [operands["u"], operands["weights"]]
    inputs += [w for e in (routed, shared) for w in (e.w1, e.w3, e.w2)]

    def run(u, weights, *w):
        return moe(
            u,
            operands["ids"],
            weights,
            ExpertWeights(*w[:3], False),
            ExpertWeights(*w[3:], False),
            swiglu_limit=1e3,
        )

    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in inputs])
