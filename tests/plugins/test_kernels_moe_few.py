"""Experts of a few tokens, which Hopper multiplies by kernels of their own."""

from __future__ import annotations

import importlib

import pytest
import torch
from expert_oracle import experts, in_float64, no_experts, on_device, relative
from kernel_oracle import DEVICE, load_kernel

kernel = load_kernel("moe")
# Where the operator's module loads, so do its others.
device_weights, kernel_few = (
    importlib.import_module(f"plugins.moe.{name}") for name in ("device_weights", "kernel_few")
)


@pytest.mark.parametrize("stored", ["fp8", "mxfp8", None])
@pytest.mark.parametrize("rows", [1, 8, 12])
@pytest.mark.parametrize(
    ("hidden", "inter"), [(256, 256)] if DEVICE == "cpu" else [(1536, 1280), (1280, 1536)]
)
def test_few_tokens(hidden: int, inter: int, rows: int, stored: str | None) -> None:
    """On compute capability 9.0 by kernel_few.py. A token's bits are those that it has alone."""
    dtype = torch.bfloat16
    of = experts(7, hidden, inter, "fp4", dtype, spread=5)
    shared = no_experts(hidden, inter, dtype)
    if stored is not None:
        shared = experts(1, hidden, inter, stored, dtype)
    draw = torch.Generator().manual_seed(rows)
    operands = on_device(
        {
            "u": torch.randn(rows, hidden, generator=draw).to(dtype),
            "ids": torch.rand(rows, 7, generator=draw).argsort(1)[:, :3],
            "weights": torch.rand(rows, 3, generator=draw),
            "routed": of,
            "shared": shared,
            "swiglu_limit": 10.0,
        }
    )
    on_hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    known = (device_weights.device_experts(operands[name], dtype) for name in ("routed", "shared"))
    assert kernel_few.takes_few(operands["u"], *known) == on_hopper
    whole = kernel.moe(**operands)
    assert relative(whole, in_float64(operands)) < 4e-2
    if not on_hopper:
        return
    assert torch.equal(kernel.moe(**operands), whole)
    for row in range(rows):
        one = {name: operands[name][row : row + 1] for name in ("u", "ids", "weights")}
        assert torch.equal(kernel.moe(**{**operands, **one}), whole[row : row + 1])
    operands["u"][0, 5] = torch.nan
    poisoned = kernel.moe(**operands)
    assert poisoned[0].isnan().all()
    assert torch.equal(poisoned[1:], whole[1:])
