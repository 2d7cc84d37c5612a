"""Experts of many rows: which of them kernel_hopper.py takes, how it decodes MXFP8, in which order
rows in float16 lie; where there is compute capability 9.0, its products."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from assembly_oracle import followed, register
from expert_oracle import experts, in_float64, no_experts, on_device, relative
from kernel_oracle import DEVICE, load_kernel

kernel = load_kernel("moe")
device_weights, operand, kernel_route = (
    importlib.import_module(f"plugins.moe.{name}")
    for name in ("device_weights", "kernel_hopper_operand", "kernel_route")
)
ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)


def spoiled(name: str, matrix: str, byte: int) -> object:
    """Experts one of whose matrices has such a code."""
    of = experts(2, 256, 256, name, torch.bfloat16, 3)
    w1, _, w2 = of.matrices()
    (w1 if matrix == "w1" else w2)[1].codes.view(torch.uint8)[3, 5] = byte
    return of


@pytest.mark.parametrize(
    ("of", "many"),
    [
        (lambda: experts(2, 256, 256, "fp4", torch.bfloat16, 5), True),
        (lambda: experts(2, 256, 256, "fp4", torch.bfloat16, 14), False),
        (lambda: experts(2, 256, 256, "mxfp8", torch.bfloat16, 5), True),
        (lambda: experts(2, 256, 256, "mxfp8", torch.bfloat16, 12), False),
        (lambda: experts(2, 256, 256, "nvfp4", torch.bfloat16, 12), True),
        (lambda: experts(2, 256, 256, "fp8", torch.bfloat16), False),
        (lambda: spoiled("mxfp8", "w1", 0xFF), False),
        (lambda: spoiled("mxfp8", "w2", 0x7F), False),
    ],
)
def test_which_experts_it_takes(of: Callable, many: bool) -> None:
    assert device_weights.device_experts(of(), torch.bfloat16).many == many


@pytest.mark.parametrize("power", [0, 1, 4, 8, 15])
def test_the_inline_assembly_shifts_mxfp8_codes(power: int) -> None:
    """Every code times 2^-power, to the nearest E4M3 value."""
    factor = register(torch.full((2,), 2.0**-power))
    for first in range(0, 256, 4):
        codes = torch.arange(first, first + 4, dtype=torch.uint8)
        if bool(((codes & 0x7F) == 0x7F).any()):
            continue
        word = int.from_bytes(codes.tolist(), "little")
        found = followed(operand.SHIFTED.value, {"$1": word, "$2": factor})["$0"]
        ours = torch.tensor([*found.to_bytes(4, "little")], dtype=torch.uint8)
        exact = codes.view(torch.float8_e4m3fn).double() * 2.0**-power
        # From 2^-6 on E4M3 has as many bits as its codes, below it multiples of 2^-9.
        nearest = torch.where(exact.abs() < 2.0**-6, (exact * 512).round() / 512, exact)
        assert torch.equal(ours.view(torch.float8_e4m3fn).double(), nearest)


@pytest.mark.skipif(not ON_HOPPER, reason="no compute capability 9.0")
@pytest.mark.parametrize("name", ["fp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("rows", [60, 120, 230, 1000])
def test_many_rows(name: str, rows: int) -> None:
    """Blocks that are full and blocks that are not, of few rows too."""
    dtype, width = torch.bfloat16, 512
    draw = torch.Generator().manual_seed(4)
    operands = on_device(
        {
            "u": torch.randn(rows, width, generator=draw).to(dtype),
            "ids": torch.rand(rows, 3, generator=draw).argsort(1)[:, :2],
            "weights": torch.rand(rows, 2, generator=draw),
            "routed": experts(3, width, width, name, dtype, spread=5),
            "shared": no_experts(width, width, dtype),
            "swiglu_limit": 10.0,
        }
    )
    known = device_weights.device_experts(operands["routed"], dtype)
    assert kernel._takes_hopper(operands["u"], known, 2 * rows)
    whole = kernel.moe(**operands)
    assert relative(whole, in_float64(operands)) < 2e-2
    for _ in range(20):
        assert torch.equal(kernel.moe(**operands), whole)
    operands["u"][7, 5] = torch.nan
    poisoned = kernel.moe(**operands)
    assert poisoned[7].isnan().all()
    others = torch.arange(rows, device=whole.device) != 7
    assert torch.equal(poisoned[others], whole[others])
