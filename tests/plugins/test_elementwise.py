"""Sigmoid, SiLU and softplus: values, position independence, gradients at the extremes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from plugins.elementwise import sigmoid, silu, softplus

Function = Callable[[torch.Tensor], torch.Tensor]
EXACT: dict[Function, Callable[[float], float]] = {
    sigmoid: lambda x: 1 / (1 + math.exp(-x)),
    silu: lambda x: x / (1 + math.exp(-x)),
    softplus: lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
}
by_function = pytest.mark.parametrize("fn", EXACT, ids=lambda fn: fn.__name__)


@by_function
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(fn: Function, dtype: torch.dtype) -> None:
    x = torch.linspace(-80, 80, 801).to(dtype)
    expected = torch.tensor([EXACT[fn](v) for v in x.tolist()], dtype=torch.float64)
    # −x/2 ulp in the exponent: the relative error grows with |x|.
    rtol = 1e-14 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(fn(x).double(), expected, rtol=rtol, atol=1e-45)


@by_function
def test_an_element_does_not_depend_on_its_place(fn: Function) -> None:
    """torch's own kernels fail this: they switch to scalar code for a tensor's remainder."""
    x = 3.0 * torch.randn(3000, generator=torch.Generator().manual_seed(0))
    whole = fn(x)
    for start in range(0, 300, 7):
        for length in (1, 3, 17, 33):
            part = slice(start, start + length)
            assert torch.equal(fn(x[part].clone()), whole[part])


@by_function
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_extremes_stay_finite_with_their_gradients(fn: Function, dtype: torch.dtype) -> None:
    x = torch.tensor([-1e30, -1000.0, -100.0, 0.0, 100.0, 1000.0, 1e30], dtype=dtype)
    x.requires_grad_()
    y = fn(x)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
    limits = {sigmoid: (0.0, 1.0), silu: (0.0, 1000.0), softplus: (0.0, 1000.0)}[fn]
    assert y[1].item() == pytest.approx(limits[0], abs=1e-30)
    assert y[5].item() == pytest.approx(limits[1], rel=1e-6)
