"""Exact rounding to the small float formats, and their codes.

Everything rounds once, from the exact value of the input, to nearest with ties to the even code.
A chain of casts (float64 → float32 → E4M3) would round twice and miss by one code near a tie, so
the grid step is taken from the exponent bits of the value itself and the rest is exact arithmetic.

Formats (OCP 8-bit floating point 1.0, OCP microscaling formats 1.0): E4M3 without infinities,
largest value 448; E2M1, largest value 6; E8M0, a bare power of two 2^(byte − 127), byte 255 = NaN.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E8M0_BIAS = 127
E8M0_NAN = 255
SMALLEST_NORMAL_SCALE = 2.0**-126  # E8M0 byte 1: the smallest scale that no device flushes to 0

# (integer type of the same size, mantissa bits, exponent bias)
_BITS: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float32: (torch.int32, 23, 127),
    torch.float64: (torch.int64, 52, 1023),
}


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are handled exactly: float64 stays, others widen."""
    if dtype == torch.float64:
        return dtype
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        return torch.float32
    raise ValueError(
        f"expected float64, float32, bfloat16 or float16 values, got {dtype}; convert them first"
    )


def _round_to_grid(
    values: torch.Tensor, largest: float, min_exponent: int, mantissa_bits: int
) -> torch.Tensor:
    """Nearest representable value, ties to even, saturating; float32 or float64 in and out."""
    integer, mantissa, bias = _BITS[values.dtype]
    clipped = values.clamp(-largest, largest)
    exponent_mask = (2 * bias + 1) << mantissa
    exponent = clipped.view(integer).bitwise_and(exponent_mask)
    # Below the smallest normal the grid keeps the step of the smallest normal.
    exponent.clamp_(min=(bias + min_exponent) << mantissa)
    step = exponent.sub_(mantissa_bits << mantissa).view(values.dtype)
    return clipped.div_(step).round_().mul_(step)


def round_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 value in the dtype of `values`; beyond ±448 saturates, −0 and NaN stay."""
    wide = values.to(work_dtype(values.dtype))
    return _round_to_grid(wide, E4M3_MAX, -6, 3).to(values.dtype)


def round_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and negatives; saturates, −0 and NaN stay."""
    wide = values.to(work_dtype(values.dtype))
    return _round_to_grid(wide, E2M1_MAX, 0, 1).to(values.dtype)


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """uint8 E4M3 codes of round_e4m3(values); a NaN becomes a NaN code."""
    exact = round_e4m3(values).to(torch.float32)
    return exact.to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of uint8 or float8_e4m3fn codes; exact in every float dtype but float16's edge."""
    return raw_bytes(codes).view(torch.float8_e4m3fn).to(dtype)


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes of round_e2m1(values), two a byte, uint8 [..., n/2]; the code of a NaN is arbitrary.

    The even element is in the low nibble; bit 3 of a nibble is the sign.
    """
    exact = round_e2m1(values).to(torch.float32)
    bits = exact.view(torch.int32)
    sign = bits.bitwise_right_shift(28).bitwise_and_(8)
    # From 1.0 on, a code is the exponent and the top mantissa bit; below, it is twice the value.
    codes = bits.bitwise_and(0x7FFFFFFF).bitwise_right_shift_(22).sub_(252)
    small = exact.abs().mul_(2).clamp_(max=1).to(torch.int32)
    torch.maximum(codes, small, out=codes)
    codes = codes.bitwise_and_(7).bitwise_or_(sign).to(torch.uint8)
    pairs = codes.contiguous().view(torch.int16)  # little endian: the even element is the low byte
    return pairs.bitwise_or(pairs >> 4).to(torch.uint8)


def unpack_e2m1(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of pack_e2m1: uint8 or int8 [..., n/2] → values [..., n] in `dtype`."""
    table = _nibble_pairs().to(device=packed.device, dtype=dtype)
    return table[raw_bytes(packed).to(torch.int32)].flatten(-2)


def _nibble_pairs() -> torch.Tensor:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)


def _bit_pattern(value: float, mantissa: int) -> int:
    """The bits of a positive float64 or float32, by its number of mantissa bits."""
    return int.from_bytes(struct.pack(">d" if mantissa == 52 else ">f", value), "big")


def ceil_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """E8M0 byte of the smallest power of two s with largest·s ≥ amax; uint8, shape of `amax`.

    `amax` is float32 or float64, zero or normal; `largest` is E4M3_MAX or E2M1_MAX. Powers of two
    outside E8M0 saturate, a non-finite amax gives E8M0_NAN.
    """
    integer, mantissa, bias = _BITS[amax.dtype]
    bits = amax.view(integer)
    limit = _bit_pattern(largest, mantissa)
    fraction_mask = (1 << mantissa) - 1
    exponent = bits.bitwise_right_shift(mantissa)
    above = bits.bitwise_and(fraction_mask) > limit & fraction_mask
    byte = exponent - (limit >> mantissa) + above + E8M0_BIAS
    byte = byte.clamp_(0, E8M0_NAN - 1)
    return byte.masked_fill_(exponent == 2 * bias + 1, E8M0_NAN).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Powers of two 2^(byte − 127) of uint8 or float8_e8m0fnu bytes; byte 255 is NaN."""
    return raw_bytes(codes).view(torch.float8_e8m0fnu).to(torch.float32).to(dtype)


def raw_bytes(codes: torch.Tensor) -> torch.Tensor:
    """The bytes of a one-byte tensor as uint8: a view, because a numeric cast changes codes."""
    if codes.element_size() != 1:
        raise ValueError(
            f"expected codes of one byte (uint8, int8, float8), got {codes.dtype}; "
            "load the tensor in its stored dtype"
        )
    return codes.view(torch.uint8)


def grouped(values: torch.Tensor, group: int) -> torch.Tensor:
    """[..., n] → [..., n/group, group], in the exact work dtype."""
    if values.shape[-1] % group:
        raise ValueError(
            f"expected a last dim that is a multiple of {group}, got {tuple(values.shape)}; "
            "this format scales whole groups"
        )
    return split_last(values.to(work_dtype(values.dtype)), group)


def split_last(values: torch.Tensor, size: int) -> torch.Tensor:
    """[..., n] → [..., n/size, size], also for no rows at all."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        return rounding(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def straight_through(
    rounding: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor
) -> torch.Tensor:
    """rounding(values), with the identity as gradient (quantisation-aware training)."""
    if values.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _StraightThrough.apply(values, rounding)  # type: ignore[no-untyped-call]
        return result
    return rounding(values)
