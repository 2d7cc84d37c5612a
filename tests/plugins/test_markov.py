"""The greedy choice behind a token: every tie, both zeros, NaN, rows without a finite value."""

from __future__ import annotations

import importlib
import math
import types

import pytest
import torch
from kernel_oracle import DEVICE

import plugins.markov


@pytest.fixture(params=["pieces", "kernel"])
def made(request: pytest.FixtureRequest) -> types.ModuleType:
    if request.param == "pieces":
        return plugins.markov
    triton = pytest.importorskip("triton")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("the kernels are not interpreted (TRITON_INTERPRET=1)")
    return importlib.import_module("plugins.device.markov")


@pytest.mark.parametrize("vocab", [7, 2048, 6001])
def test_the_first_largest_column(made: types.ModuleType, vocab: int) -> None:
    draw = torch.Generator().manual_seed(vocab)
    base = torch.randint(-3, 3, (6, 2, vocab), generator=draw).float()[:, 1]
    correction = torch.randint(-3, 3, (6, vocab), generator=draw).float()
    correction[1] = -base[1]  # all zeros
    base[1, ::2], correction[1, ::2] = -0.0, -0.0
    base[2], base[3, 5], base[3, 2], base[4] = -math.inf, math.nan, math.inf, -math.inf
    base[3, 6] = math.nan
    base[4, vocab - 1] = -1e30
    embed = torch.randn(vocab, 24, generator=draw).bfloat16()
    token, row = made.markov_choice(*(x.to(DEVICE) for x in (base, correction, embed)))
    sums = (base + correction).tolist()
    expected = [
        max(range(vocab), key=lambda c: (math.isnan(values[c]), values[c], -c)) for values in sums
    ]
    expected[3] = 5  # NaNs do not compare
    assert token.tolist() == expected
    assert token.dtype == torch.int64
    assert torch.equal(row.cpu(), embed[expected])


def test_no_rows(made: types.ModuleType) -> None:
    token, row = made.markov_choice(
        torch.empty(0, 9, device=DEVICE), torch.empty(0, 9, device=DEVICE),
        torch.empty(9, 4, device=DEVICE),
    )  # fmt: skip
    assert (token.shape, row.shape) == ((0,), (0, 4))
