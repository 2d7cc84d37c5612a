"""The greedy choice behind a token: every tie, both zeros, NaN, rows without a finite value."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_oracle import load_kernel, moved

from plugins.markov.cases import CASES, MarkovCase
from plugins.registry import OPERATORS


@pytest.fixture(params=["reference", "kernel"])
def markov_choice(request: pytest.FixtureRequest) -> Callable:
    if request.param == "reference":
        return OPERATORS["markov_choice"].reference
    return load_kernel("markov").markov_choice


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_first_largest_column(markov_choice: Callable, case: MarkovCase) -> None:
    operands = case.operands(torch.bfloat16)
    token, row = markov_choice(**moved(operands))
    sums = (operands["base"] + operands["correction"]).tolist()
    expected = [
        max(range(case.vocab), key=lambda c: (math.isnan(values[c]), values[c], -c))
        for values in sums
    ]
    if case.rows:
        expected[3] = 5  # NaNs do not compare
    assert token.tolist() == expected
    assert token.dtype == torch.int64
    assert torch.equal(row.cpu(), operands["embed"][expected])
