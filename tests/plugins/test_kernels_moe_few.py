"""Experts of a few tokens, which Hopper multiplies by kernels of their own."""

from __future__ import annotations

import importlib

import pytest
import torch
from assembly_oracle import followed, halves, register
from expert_oracle import experts, in_float64, no_experts, on_device, relative
from kernel_oracle import DEVICE, load_kernel

kernel = load_kernel("moe")
# Where the operator's module loads, so do its others.
device_weights, kernel_few, kernel_nvfp4 = (
    importlib.import_module(f"plugins.moe.{name}")
    for name in ("device_weights", "kernel_few", "kernel_nvfp4")
)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.mark.parametrize(
    ("chosen", "stored"),
    [
        *(("fp4", stored) for stored in ("fp8", "mxfp8", None)),
        *(("nvfp4", stored) for stored in ("nvfp4", "fp8", "mxfp8", None)),
        *(("mxfp8", stored) for stored in ("mxfp8", "fp8", "nvfp4", None)),
    ],
)
@pytest.mark.parametrize("rows", [3] if DEVICE == "cpu" else [1, 8, 12, 24, 40])
@pytest.mark.parametrize(
    ("hidden", "inter"), [(256, 256)] if DEVICE == "cpu" else [(1536, 1280), (1280, 1536)]
)
def test_few_tokens(hidden: int, inter: int, rows: int, chosen: str, stored: str | None) -> None:
    """On compute capability 9.0 by kernel_few.py. A token's bits are those that it has alone."""
    dtype = torch.bfloat16
    of = experts(7, hidden, inter, chosen, dtype, spread=5)
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
    pairs = -(-rows * 3 // min(7, rows * 3))
    assert kernel_few.takes_few(operands["u"], pairs, *known) == on_hopper
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


def test_scales_of_nvfp4() -> None:
    """Two E4M3 codes, each twice in a register; NaN stays NaN."""
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for code in range(256):
        made = followed(kernel_nvfp4.TWO_SCALES.value, {"$2": code | (255 - code) << 8})
        ours = torch.stack([halves(made["$0"]), halves(made["$1"])]).float()
        expected = torch.stack([scales[code], scales[255 - code]])[:, None].expand(2, 2)
        assert torch.equal(ours.nan_to_num(1e4), expected.nan_to_num(1e4))


@pytest.mark.parametrize("scale", [2.0**-9, 3 * 2.0**-9, 1.875 * 2.0**-6, 1.125, 240.0, 448.0])
def test_nvfp4_codes_times_their_scale_are_exact(scale: float) -> None:
    for first in range(0, 256, 4):
        word = int.from_bytes(range(first, first + 4), "little")
        step = register(torch.tensor([scale, scale]))
        made = followed(kernel_nvfp4.EIGHT_VALUES.value, {"$4": word, "$5": step})
        ours = torch.cat([halves(made[f"${i}"]) for i in range(4)]).double()
        nibbles = torch.tensor([word >> 4 * i & 15 for i in (0, 2, 4, 6, 1, 3, 5, 7)])
        values = E2M1.double()[nibbles & 7] * (1.0 - 2.0 * (nibbles >> 3))
        assert torch.equal(ours * kernel_nvfp4.UNIT.value, values * scale)
