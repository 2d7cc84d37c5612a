"""Inline assembly, of which no interpreter runs the instructions: they are followed here."""

from __future__ import annotations

import re

import torch


def halves(register: int) -> torch.Tensor:
    return torch.tensor([register & 0xFFFF, register >> 16]).to(torch.uint16).view(torch.float16)


def register(halves: torch.Tensor) -> int:
    low, high = halves.half().view(torch.uint16).tolist()
    return low | high << 16


def codes(values: torch.Tensor) -> int:
    """Two E4M3 codes, ties to even."""
    low, high = values.to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    return low | high << 8


def followed(assembly: str, registers: dict[str, int]) -> dict[str, int]:
    """What the instructions leave in registers, of which no interpreter runs them."""
    operations = {
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "shr.u32": lambda a, b: a >> b,
        "and.b32": lambda a, b: a & b,
        "lop3.b32": lambda a, b, c, which: (a & b | c) if which == 0xEA else None,
        "cvt.u16.u32": lambda a: a & 0xFFFF,
        "cvt.rn.f16x2.e4m3x2": lambda a: register(
            torch.tensor([a & 0xFF, a >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        ),
        "prmt.b32": lambda a, b, which: sum(
            ((a | b << 32) >> 8 * (which >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4)
        ),
        "cvt.rn.satfinite.e4m3x2.f16x2": lambda a: codes(halves(a)),
        "mul.f16x2": lambda a, b: register(halves(a).float() * halves(b).float()),
    }
    for name, text in re.findall(r"(\w[\w.]+) ([^;]*);", assembly):
        if name.startswith("reg"):
            continue
        if name == "mov.b32":
            first, second, third = re.findall(r"[$\w]+", text)
            if text.startswith("{"):
                word = registers[third]
                registers |= {first: word & 0xFFFF, second: word >> 16}
            else:
                registers[first] = registers[second] | registers[third] << 16
            continue
        target, *operands = text.split(", ")
        values = [registers[x] if x in registers else int(x, 0) for x in operands]
        registers[target] = operations[name](*values)
    return registers
