"""Brute-force rounding in exact rational arithmetic: every code is tried, nothing is shared."""

from fractions import Fraction
from itertools import pairwise

import torch

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def e4m3_value(code: int) -> Fraction:
    """Value of a non-negative, non-NaN E4M3 code, from the format's definition."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) * Fraction(1, 2**6)
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


E4M3 = [e4m3_value(code) for code in range(0x7F)]


def nearest(magnitude: Fraction, table: list[Fraction]) -> int:
    """Code of the nearest table entry, ties to the even code, saturating."""
    return min(range(len(table)), key=lambda c: (abs(table[c] - magnitude), c & 1))


def midpoints(table: list[Fraction]) -> list[Fraction]:
    """The values that lie exactly between two neighbouring codes."""
    return [(a + b) / 2 for a, b in pairwise(table)]


def signed_code(value: float, scale: Fraction, table: list[Fraction], sign_bit: int) -> int:
    code = nearest(abs(Fraction(value)) / scale, table)
    negative = torch.tensor(value, dtype=torch.float64).signbit().item()
    return code | (sign_bit if negative else 0)


def ceil_power(amax: Fraction, largest: int) -> int:
    """Smallest e with largest · 2^e ≥ amax."""
    e = amax.numerator.bit_length() - amax.denominator.bit_length() - largest.bit_length() - 2
    while largest * Fraction(2) ** e < amax:
        e += 1
    return e


def mx_group(values: list[float], floor: float, table: list[Fraction]) -> tuple[list[int], int]:
    """Codes (sign bit on top of the magnitude bits) and the E8M0 byte of one group."""
    amax = max([Fraction(floor)] + [abs(Fraction(v)) for v in values])
    exponent = ceil_power(amax, int(table[-1]))
    scale = Fraction(2) ** exponent
    sign_bit = 0x80 if len(table) > 8 else 8
    return [signed_code(v, scale, table, sign_bit) for v in values], exponent + 127


def nvfp4_group(values: list[float]) -> tuple[list[int], int]:
    """Codes and the E4M3 scale code of one group of the cache form."""
    amax = max([Fraction(6, 512)] + [abs(Fraction(v)) for v in values])
    scale_code = nearest(amax / 6, E4M3)
    return [signed_code(v, E4M3[scale_code], E2M1, 8) for v in values], scale_code


def nibbles(codes: list[int]) -> list[int]:
    return [low | (high << 4) for low, high in zip(codes[0::2], codes[1::2], strict=True)]
