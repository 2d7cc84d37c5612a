"""Hyper-connections against a per-token NumPy oracle, published numbers and their invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from plugins.mega_mhc import HcMix, hc_collapse, hc_expand, hc_mix
from plugins.mega_mhc.cases import ATTRIBUTES, CASES, MhcCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MIX_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5}
STREAM_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-8}
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def expit(x):
    return np.array([1 / (1 + math.exp(-v)) if v > 0 else 1 - 1 / (1 + math.exp(v)) for v in x])


def oracle_mix(streams, fn, base, scale, iters=20, eps=1e-6):
    """One token's mix in float64, written from the formulas."""
    S = len(streams)
    f = streams.reshape(-1)
    z = (fn @ f) / np.sqrt(np.mean(f**2) + 1e-20)
    pre = expit(z[:S] * scale[0] + base[:S]) + eps
    post = 2 * expit(z[S : 2 * S] * scale[1] + base[S : 2 * S])
    comb = (z[2 * S :] * scale[2] + base[2 * S :]).reshape(S, S)
    for i in range(S):
        e = np.exp(comb[i] - comb[i].max())
        comb[i] = e / e.sum() + eps
    comb = comb / (comb.sum(0) + eps)
    for _ in range(iters - 1):
        for i in range(S):
            comb[i] = comb[i] / (comb[i].sum() + eps)
        for j in range(S):
            comb[:, j] = comb[:, j] / (comb[:, j].sum() + eps)
    return pre, post, comb


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float64).numpy()


def mixed(case: MhcCase, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], HcMix]:
    operands = case.operands(dtype)
    return operands, hc_mix(**operands, **ATTRIBUTES)


def test_the_published_split_of_cosines() -> None:
    """z_k = cos(k), scale (1, 1/2, 2), base 0: numbers of an independent implementation."""
    draw = torch.Generator().manual_seed(3)
    streams = torch.randn(1, 4, 8, generator=draw, dtype=torch.float64)
    flat = streams.flatten()
    # Rows of fn that give exactly these z: projections on the normalised stream.
    rms = flat.square().mean().sqrt()
    fn = torch.cos(torch.arange(24.0, dtype=torch.float64))[:, None] * flat * rms / flat.dot(flat)
    scale = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    mix = hc_mix(streams, fn, torch.zeros(24, dtype=torch.float64), scale, **ATTRIBUTES)
    expected = HcMix(
        torch.tensor([0.731060, 0.631884, 0.397440, 0.270915]),
        torch.tensor([0.838028, 1.070797, 1.235536, 1.186275]),
        torch.tensor(
            [
                [0.229844, 0.126690, 0.196475, 0.446990],
                [0.208999, 0.604928, 0.173882, 0.012190],
                [0.005929, 0.059167, 0.515940, 0.418963],
                [0.555227, 0.209214, 0.113702, 0.121856],
            ]
        ),
    )
    for part, value in zip(mix, expected, strict=True):
        torch.testing.assert_close(part[0], value.double(), rtol=0, atol=6e-7)


@by_case
@by_dtype
def test_mix_matches_the_per_token_oracle(case: MhcCase, dtype: torch.dtype) -> None:
    operands, mix = mixed(case, dtype)
    tolerance = MIX_TOLERANCE[dtype] * max(1.0, case.logit_scale)
    assert mix.comb.shape == (case.rows, case.streams, case.streams)
    assert mix.pre.dtype == torch.promote_types(dtype, torch.float32)
    fn, base, scale = (to_numpy(operands[name]) for name in ("fn", "base", "scale"))
    for t in range(case.rows):
        expected = oracle_mix(to_numpy(operands["streams"][t]), fn, base, scale)
        for name, part, value in zip(HcMix._fields, mix, expected, strict=True):
            np.testing.assert_allclose(
                to_numpy(part[t]), value, rtol=0, atol=tolerance, err_msg=f"{name} of row {t}"
            )


@by_case
@by_dtype
def test_collapse_and_expand_match_the_oracle(case: MhcCase, dtype: torch.dtype) -> None:
    operands, mix = mixed(case, dtype)
    streams, y = operands["streams"], case.output(dtype)
    collapsed, expanded = hc_collapse(streams, mix.pre), hc_expand(streams, y, mix.post, mix.comb)
    assert collapsed.dtype == expanded.dtype == dtype
    X, pre, post, comb = (to_numpy(v) for v in (streams, *mix))
    tolerance = STREAM_TOLERANCE[dtype] * max(1.0, float(np.abs(X).max(initial=0.0))) * 4
    for t in range(case.rows):
        expected = sum(pre[t, s] * X[t, s] for s in range(case.streams))
        np.testing.assert_allclose(to_numpy(collapsed[t]), expected, rtol=0, atol=tolerance)
        for j in range(case.streams):
            expected = post[t, j] * to_numpy(y[t])
            for i in range(case.streams):
                expected = expected + comb[t, i, j] * X[t, i]
            np.testing.assert_allclose(to_numpy(expanded[t, j]), expected, rtol=0, atol=tolerance)


@by_case
def test_columns_of_the_combination_sum_to_one(case: MhcCase) -> None:
    _, mix = mixed(case, torch.float64)
    columns = mix.comb.sum(1)
    torch.testing.assert_close(columns, torch.ones_like(columns), rtol=0, atol=2e-6)
    if case.logit_scale == 1.0:
        rows = mix.comb.sum(2)
        torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-3)


def test_comb_is_indexed_by_source_then_destination() -> None:
    streams = torch.arange(8.0).view(1, 4, 2)
    comb = torch.zeros(1, 4, 4)
    comb[0, 1, 3] = 1.0
    expanded = hc_expand(streams, torch.zeros(1, 2), torch.zeros(1, 4), comb)
    assert expanded.tolist() == [[[0, 0], [0, 0], [0, 0], [2, 3]]]


@by_dtype
def test_identity_combination_and_no_output_change_nothing(dtype: torch.dtype) -> None:
    streams = torch.randn(5, 4, 16).to(dtype)
    unchanged = hc_expand(
        streams, torch.randn(5, 16).to(dtype), torch.zeros(5, 4), torch.eye(4).expand(5, -1, -1)
    )
    assert torch.equal(unchanged, streams)
    one_hot = torch.tensor([[1.0, 0, 0, 0]]).expand(5, -1)
    assert torch.equal(hc_collapse(streams, one_hot), streams[:, 0])


@pytest.mark.parametrize("rows", [1, 2, 15, 17])
def test_a_row_does_not_depend_on_the_batch(rows: int) -> None:
    case = MhcCase("batch", 41, 4, 128)
    operands, mix = mixed(case, torch.float32)
    streams, y = operands.pop("streams"), case.output(torch.float32)
    collapsed, expanded = hc_collapse(streams, mix.pre), hc_expand(streams, y, mix.post, mix.comb)
    for start in range(0, 41 - rows, 3):
        part = slice(start, start + rows)
        alone = hc_mix(streams[part].clone(), **operands, **ATTRIBUTES)
        for name, ours, whole in zip(HcMix._fields, alone, mix, strict=True):
            assert torch.equal(ours, whole[part]), f"{name} of rows {part}"
        assert torch.equal(hc_collapse(streams[part].clone(), alone.pre), collapsed[part])
        again = hc_expand(streams[part].clone(), y[part], alone.post, alone.comb)
        assert torch.equal(again, expanded[part])


def test_gradients() -> None:
    operands = MhcCase("gradient", 2, 2, 3).operands(torch.float64)
    inputs = [operands[name].requires_grad_() for name in ("streams", "fn", "base", "scale")]
    y = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def step(streams, fn, base, scale, y):
        mix = hc_mix(streams, fn, base, scale, sinkhorn_iters=3, hc_eps=1e-6, norm_eps=1e-20)
        return hc_expand(streams, y, mix.post, mix.comb), hc_collapse(streams, mix.pre)

    assert torch.autograd.gradcheck(step, (*inputs, y))
