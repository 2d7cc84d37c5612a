"""Experts of a few tokens, which Hopper multiplies by kernels of their own."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
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


def _halves(register: int) -> torch.Tensor:
    return torch.tensor([register & 0xFFFF, register >> 16]).to(torch.uint16).view(torch.float16)


def _register(halves: torch.Tensor) -> int:
    low, high = halves.half().view(torch.uint16).tolist()
    return low | high << 16


def _followed(assembly: str, registers: dict[str, int]) -> dict[str, int]:
    """What the instructions leave in registers, of which no interpreter runs them."""
    operations = {
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "shr.u32": lambda a, b: a >> b,
        "and.b32": lambda a, b: a & b,
        "lop3.b32": lambda a, b, c, which: (a & b | c) if which == 0xEA else None,
        "cvt.u16.u32": lambda a: a & 0xFFFF,
        "cvt.rn.f16x2.e4m3x2": lambda a: _register(
            torch.tensor([a & 0xFF, a >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        ),
        "prmt.b32": lambda a, b, which: sum(
            ((a | b << 32) >> 8 * (which >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4)
        ),
        "mul.f16x2": lambda a, b: _register(_halves(a).float() * _halves(b).float()),
    }
    for name, text in re.findall(r"(\w[\w.]+) ([^;]*);", assembly):
        if name.startswith("reg"):
            continue
        if name == "mov.b32":
            low, high, source = re.findall(r"\w+", text)
            registers |= {low: registers[source] & 0xFFFF, high: registers[source] >> 16}
            continue
        target, *operands = text.split(", ")
        values = [registers[x] if x in registers else int(x, 0) for x in operands]
        registers[target] = operations[name](*values)
    return registers


def test_scales_of_nvfp4() -> None:
    """Two E4M3 codes, each twice in a register; NaN stays NaN."""
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for code in range(256):
        made = _followed(kernel_nvfp4.TWO_SCALES.value, {"$2": code | (255 - code) << 8})
        ours = torch.stack([_halves(made["$0"]), _halves(made["$1"])]).float()
        expected = torch.stack([scales[code], scales[255 - code]])[:, None].expand(2, 2)
        assert torch.equal(ours.nan_to_num(1e4), expected.nan_to_num(1e4))


@pytest.mark.parametrize("scale", [2.0**-9, 3 * 2.0**-9, 1.875 * 2.0**-6, 1.125, 240.0, 448.0])
def test_nvfp4_codes_times_their_scale_are_exact(scale: float) -> None:
    for first in range(0, 256, 4):
        word = int.from_bytes(range(first, first + 4), "little")
        step = _register(torch.tensor([scale, scale]))
        made = _followed(kernel_nvfp4.EIGHT_VALUES.value, {"$4": word, "$5": step})
        ours = torch.cat([_halves(made[f"${i}"]) for i in range(4)]).double()
        nibbles = torch.tensor([word >> 4 * i & 15 for i in (0, 2, 4, 6, 1, 3, 5, 7)])
        values = E2M1.double()[nibbles & 7] * (1.0 - 2.0 * (nibbles >> 3))
        assert torch.equal(ours * kernel_nvfp4.UNIT.value, values * scale)
