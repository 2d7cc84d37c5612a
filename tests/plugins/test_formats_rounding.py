"""Rounding to E4M3, E2M1 and E8M0 against exact rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from small_float_oracle import E2M1, E4M3, ceil_power, midpoints, nearest

from plugins.formats.rounding import (
    ceil_scale,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    pack_e2m1,
    raw_bytes,
    round_e2m1,
    round_e4m3,
    unpack_e2m1,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
FORMATS = {"e4m3": (round_e4m3, E4M3), "e2m1": (round_e2m1, E2M1)}


def around(points: list[Fraction], dtype: torch.dtype) -> torch.Tensor:
    """The points that `dtype` represents, and the values just above and below each point."""
    values = []
    for point in points:
        x = torch.tensor(float(point), dtype=torch.float64).to(dtype)
        up = torch.tensor(float("inf"), dtype=dtype)
        values += [x, torch.nextafter(x, up), torch.nextafter(x, -up)]
    return torch.stack(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_and_every_tie_round_exactly(name: str, dtype: torch.dtype) -> None:
    rounding, table = FORMATS[name]
    ties = midpoints(table)
    x = around([*table, *ties, table[-1] + 1, 10 * table[-1]], dtype)
    x = torch.cat([x, -x])
    got = rounding(x)
    assert got.dtype == dtype
    for value, result in zip(x.tolist(), got.tolist(), strict=True):
        expected = table[nearest(abs(Fraction(value)), table)]
        assert abs(Fraction(result)) == expected, value
        assert math.copysign(1.0, result) == math.copysign(1.0, value), value


@pytest.mark.parametrize("name", FORMATS)
def test_random_values_of_every_magnitude(name: str) -> None:
    rounding, table = FORMATS[name]
    draw = torch.Generator().manual_seed(1)
    exponent = torch.randint(-14, 11, (1500,), generator=draw).double()
    x = torch.randn(1500, generator=draw, dtype=torch.float64) * 2.0**exponent
    for value, result in zip(x.tolist(), rounding(x).tolist(), strict=True):
        assert abs(Fraction(result)) == table[nearest(abs(Fraction(value)), table)], value


def test_float64_values_that_a_chain_of_casts_rounds_twice() -> None:
    ties = midpoints(E4M3)
    # A hair off each tie: float32 cannot tell it from the tie, float64 can.
    x = torch.tensor(
        [float(t) * (1 + s * 2.0**-40) for t in ties for s in (-1, 1)], dtype=torch.float64
    )
    expected = [float(E4M3[nearest(Fraction(v), E4M3)]) for v in x.tolist()]
    assert round_e4m3(x).tolist() == expected
    twice = x.to(torch.float32).to(torch.float8_e4m3fn).to(torch.float64)
    assert twice.tolist() != expected  # or the values above prove nothing


def test_e2m1_known_values() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.2, 6.7, 0.26])
    got = round_e2m1(x)
    assert got.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, 6.0, 0.5]
    assert got[7].signbit()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_saturate_and_nan_stays(dtype: torch.dtype) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    for rounding, table in FORMATS.values():
        got = rounding(x)
        assert got[:2].tolist() == [float(table[-1]), -float(table[-1])]
        assert got[2].isnan()
    codes = encode_e4m3(x).tolist()
    assert codes[:2] == [0x7E, 0xFE]
    assert codes[2] & 0x7F == 0x7F


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_e4m3_codes(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode_e4m3(codes, dtype)
    for code, value in enumerate(values.tolist()):
        if code & 0x7F == 0x7F:
            assert math.isnan(value)
        else:
            assert abs(Fraction(value)) == E4M3[code & 0x7F]
            assert math.copysign(1.0, value) == (-1.0 if code & 0x80 else 1.0)
    finite = values.isfinite()
    assert torch.equal(encode_e4m3(values[finite]), codes[finite])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_e2m1_nibbles(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    values = unpack_e2m1(packed.unsqueeze(-1), dtype)
    for byte, pair in enumerate(values.tolist()):
        for code, value in zip((byte & 15, byte >> 4), pair, strict=True):
            assert abs(Fraction(value)) == E2M1[code & 7]
            assert math.copysign(1.0, value) == (-1.0 if code & 8 else 1.0)
    assert torch.equal(pack_e2m1(values).squeeze(-1), packed)
    assert torch.equal(unpack_e2m1(packed.view(torch.int8).unsqueeze(-1), dtype), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_e8m0_codes(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for stored in (codes, codes.view(torch.float8_e8m0fnu)):
        values = decode_e8m0(stored, dtype).tolist()
        assert values[:255] == [math.ldexp(1.0, byte - 127) for byte in range(255)]
        assert math.isnan(values[255])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("largest", [448, 6])
def test_ceil_scale_at_every_power_and_its_neighbours(largest: int, dtype: torch.dtype) -> None:
    exponents = [*range(-126, -100), *range(-3, 4), *range(100, 119)]
    amax = around([largest * Fraction(2) ** e for e in exponents], dtype)
    expected = [ceil_power(Fraction(v), largest) + 127 for v in amax.tolist()]
    assert ceil_scale(amax, float(largest)).tolist() == expected
    assert expected[:6] == [1, 2, 1, 2, 3, 2]  # exact power keeps its exponent, one above does not


def test_ceil_scale_saturates_and_marks_what_is_not_finite() -> None:
    amax = torch.tensor([1e300, 1e-300, math.inf, math.nan], dtype=torch.float64)
    assert ceil_scale(amax, 448.0).tolist() == [254, 0, 255, 255]
    assert ceil_scale(torch.tensor([math.inf, math.nan]), 448.0).tolist() == [255, 255]


def test_codes_are_viewed_never_cast() -> None:
    with pytest.raises(ValueError, match="expected codes of one byte"):
        raw_bytes(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="expected float64, float32, bfloat16 or float16"):
        round_e4m3(torch.tensor([1]))
