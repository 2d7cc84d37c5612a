"""The cache write in the Triton language; docs/kernels/kv_write.md has its floor and layout.

One program packs one row, in place in the pool. Codes and scales are the reference's, bit for bit.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import needs_reference, padded, unit_stride
from plugins.device.numbers import (
    E2M1_UNIT,
    E4M3_UNIT,
    ceil_scale_byte,
    e2m1_code,
    e2m1_pair,
    e4m3,
    e4m3_code,
    e4m3_scale,
    e8m0_inverse,
    e8m0_scale,
)
from plugins.device.overlap import after_previous, overlaps
from plugins.device.rotation import cos_sin_of, frequencies, turned
from plugins.device.rows import (
    MXFP4,
    MXFP8,
    NVFP4,
    VALUES,
    device_rows,
    row_offsets,
    scale_offsets,
)
from plugins.formats.rows import RowStore
from plugins.norm.kernel import gains, normalised, rms_norm
from plugins.registry import OPERATORS


@triton.jit
def _group_scale(amax_bits, FORMAT: tl.constexpr):
    """Scale bytes of groups whose largest magnitudes are `amax_bits`, NaN above infinity."""
    if FORMAT == NVFP4:
        amax = amax_bits.to(tl.float32, bitcast=True)
        step = tl.maximum(tl.div_rn(amax, 6.0), 0.001953125)
        return tl.where(amax_bits >= 0x7F800000, 0x7F, e4m3_code(step))
    if FORMAT == MXFP8:
        return ceil_scale_byte(tl.maximum(amax_bits, 0x38D1B717), 0x43E00000)  # 1e-4, 448
    return ceil_scale_byte(tl.maximum(amax_bits, 0x01C00000), 0x40C00000)  # 6 · 2^−126, 6


@triton.jit
def _codes(values, bits, scale_byte, FORMAT: tl.constexpr):
    """int32 codes of values [groups, n], sign included."""
    magnitude = tl.abs(values)
    if FORMAT == NVFP4:
        quotient = tl.div_rn(magnitude, e4m3_scale(scale_byte)[:, None])
        return e2m1_code(quotient) | ((bits >> 28) & 8)
    magnitude *= e8m0_inverse(scale_byte)[:, None]
    if FORMAT == MXFP8:
        return e4m3_code(magnitude) | ((bits >> 24) & 0x80)
    return e2m1_code(magnitude) | ((bits >> 28) & 8)


@triton.jit
def _values(code, scale_byte, FORMAT: tl.constexpr):
    """What codes [groups, n] stand for, in float32."""
    if FORMAT == MXFP8:
        return e4m3(code) * E4M3_UNIT * e8m0_scale(scale_byte)[:, None]
    scale = e4m3_scale(scale_byte) if FORMAT == NVFP4 else e8m0_scale(scale_byte)
    low, _high = e2m1_pair(code)
    return low * E2M1_UNIT * scale[:, None]


@triton.jit
def rounded_groups(value, FORMAT: tl.constexpr):
    """value [N, WIDTH] as it would be read back from rows in the format, in float32."""
    GROUP: tl.constexpr = 16 if FORMAT == NVFP4 else 32
    groups = value.to(tl.float32).reshape(value.numel // GROUP, GROUP)
    bits = groups.to(tl.int32, bitcast=True)
    scale_byte = _group_scale(tl.max(bits & 0x7FFFFFFF, axis=1), FORMAT)
    return _values(_codes(groups, bits, scale_byte, FORMAT), scale_byte, FORMAT).reshape(
        value.shape
    )


@triton.jit
def _write_row(
    value, slot, data, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr,
    STORED: tl.constexpr, FORMAT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """value [PADDED], of which WIDTH are the row, in the record's format at `slot`."""
    target = data + row_offsets(slot, page_stride, ROWS, ROW)
    if FORMAT == VALUES:
        column = tl.arange(0, PADDED)
        tl.store(target + column, value.to(target.dtype.element_ty), mask=column < WIDTH)
    else:
        GROUP: tl.constexpr = 16 if FORMAT == NVFP4 else 32
        GROUPS: tl.constexpr = PADDED // GROUP
        HALF: tl.constexpr = GROUP // 2
        group = tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        there = column < WIDTH
        value = value.to(tl.float32).reshape(GROUPS, GROUP)
        bits = value.to(tl.int32, bitcast=True)
        scale_byte = _group_scale(tl.max(bits & 0x7FFFFFFF, axis=1), FORMAT)
        code = _codes(value, bits, scale_byte, FORMAT)
        if STORED == VALUES:
            rounded = _values(code, scale_byte, FORMAT)
            tl.store(target + column, rounded.to(target.dtype.element_ty), mask=there)
        else:
            if FORMAT == MXFP8:
                tl.store(target + column, code.to(tl.uint8), mask=there)
            else:
                even, odd = tl.split(code.reshape(GROUPS, HALF, 2))
                both = even | (odd << 4)
                if FORMAT == MXFP4:
                    # Where index keys have their signs: plugins/formats/index_keys.py.
                    signs = (code >> 3).reshape(PADDED // 8, 2, 4).permute(0, 2, 1)
                    first, last = tl.split(signs)
                    both = (both & 0x77) | (first.reshape(GROUPS, HALF) << 7)
                    both = both | (last.reshape(GROUPS, HALF) << 3)
                byte = group[:, None] * HALF + tl.arange(0, HALF)[None, :]
                tl.store(target + byte, both.to(tl.uint8), mask=byte < WIDTH // 2)
            scales = data + scale_offsets(slot, page_stride, ROWS, ROW, FORMAT, WIDTH)
            tl.store(scales + group, scale_byte.to(tl.uint8), mask=group < WIDTH // GROUP)


@triton.jit
def _kv_write(
    values, value_stride, slots, data, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr,
    STORED: tl.constexpr, FORMAT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        column = tl.arange(0, PADDED)
        value = tl.load(values + row * value_stride + column, mask=column < WIDTH, other=0.0)
        _write_row(value, slot, data, page_stride, ROWS, ROW, STORED, FORMAT, WIDTH, PADDED)


@triton.jit
def _rotated_row(
    x, row_stride, norm, positions, inv_freq, slots, data, page_stride, eps,
    ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr, FORMAT: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """What no launch writes is loaded before the wait, and all else at once behind it: also for a
    row without a slot."""
    frequency = frequencies(inv_freq, WIDTH, ROTATED, PADDED // 2)
    if NORM:
        scale = gains(norm, WIDTH, PADDED)
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    value = tl.load(x + row * row_stride + column, mask=column < WIDTH, other=0.0)
    if NORM:
        value = normalised(value, scale, eps, WIDTH)
    cos, sin = cos_sin_of(position, frequency)
    value = turned(value[None, :], cos, sin, column, WIDTH, ROTATED, PADDED // 2)
    if slot >= 0:
        written = value.reshape(PADDED)
        _write_row(written, slot, data, page_stride, ROWS, ROW, STORED, FORMAT, WIDTH, PADDED)


@triton.jit
def _rotated_write(
    x, row_stride, norm, positions, inv_freq, slots, data, page_stride, eps,
    ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr, FORMAT: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    _rotated_row(
        x, row_stride, norm, positions, inv_freq, slots, data, page_stride, eps,
        ROWS, ROW, STORED, FORMAT, WIDTH, PADDED, ROTATED, NORM, OVERLAP,
    )  # fmt: skip


@triton.jit
def _norm_and_write(
    latent, latent_stride, latent_norm, normed,
    x, row_stride, norm, positions, inv_freq, slots, data, page_stride, eps,
    ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr, FORMAT: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROTATED: tl.constexpr,
    LATENT: tl.constexpr, PADDED_LATENT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Two programs a row, one for each half of the work."""
    if tl.program_id(1) == 0:
        scale = gains(latent_norm, LATENT, PADDED_LATENT)
        after_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        place = tl.arange(0, PADDED_LATENT)
        there = place < LATENT
        value = tl.load(latent + row * latent_stride + place, mask=there, other=0.0)
        value = normalised(value, scale, eps, LATENT)
        tl.store(normed + row * LATENT + place, value, mask=there)
    else:
        _rotated_row(
            x, row_stride, norm, positions, inv_freq, slots, data, page_stride, eps,
            ROWS, ROW, STORED, FORMAT, WIDTH, PADDED, ROTATED, True, OVERLAP,
        )  # fmt: skip


def kv_write(values: torch.Tensor, rows: RowStore, slots: torch.Tensor) -> None:
    """As the reference, which runs for float64, a gradient or an unknown record."""
    stored = device_rows(rows)
    if stored is None or needs_reference(values):
        OPERATORS["kv_write"].reference(values, rows, slots)
        return
    count, width = values.shape
    if count == 0:
        return
    values = unit_stride(values)
    _kv_write[(count,)](
        values, values.stride(0), slots.contiguous(), *stored.arguments(), stored.rounding,
        width, padded(width, 32), num_warps=1,
    )  # fmt: skip


def rotated_write(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    rows: RowStore,
    slots: torch.Tensor,
    *,
    eps: float,
) -> None:
    """As the reference, in one launch; it runs for float64, a gradient or an unknown record.

    Without a norm, or up to 128 values a row, the bytes are those of rms_norm, apply_rope and
    kv_write one after another. Wider rows' squares are summed by more warps than there, in another
    order.
    """
    stored = device_rows(rows)
    count, width = x.shape
    if stored is None or needs_reference(x, norm) or width % 2 or not count:
        OPERATORS["rotated_write"].reference(x, norm, positions, inv_freq, rows, slots, eps=eps)
        return
    # Copies of what is loaded before the wait are waited for.
    overlap = overlaps(x.device) and (norm is None or norm.stride(-1) == 1)
    x = unit_stride(x)
    _rotated_write[(count,)](
        x, x.stride(0), x if norm is None else unit_stride(norm), positions, inv_freq,
        slots.contiguous(), stored.data, stored.page_stride, eps, *stored.arguments()[2:],
        stored.rounding, width, padded(width, 32), 2 * inv_freq.shape[0], norm is not None,
        overlap, num_warps=_warps(width), launch_pdl=overlap,
    )  # fmt: skip


def _warps(width: int) -> int:
    """A rotation's sines are long: few a thread."""
    return max(1, min(8, padded(width, 32) // 128))


def norm_and_write(
    latent: torch.Tensor,
    latent_norm: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    rows: RowStore,
    slots: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """As the reference, in one launch; it runs for float64, a gradient or an unknown record. The
    bytes written are rotated_write's, bit for bit."""
    stored = device_rows(rows)
    count, width = x.shape
    unknown = stored is None or needs_reference(latent, latent_norm, x, norm)
    if stored is None or unknown or width % 2 or not count:
        rotated_write(x, norm, positions, inv_freq, rows, slots, eps=eps)
        normed: torch.Tensor = rms_norm(latent, latent_norm, eps)
        return normed
    overlap = overlaps(x.device) and latent_norm.stride(-1) == norm.stride(-1) == 1
    latent, x = unit_stride(latent), unit_stride(x)
    normed = torch.empty_like(latent, memory_format=torch.contiguous_format)
    of_latent = latent.shape[1]
    _norm_and_write[(count, 2)](
        latent, latent.stride(0), unit_stride(latent_norm), normed,
        x, x.stride(0), unit_stride(norm), positions, inv_freq, slots.contiguous(),
        stored.data, stored.page_stride, eps, *stored.arguments()[2:], stored.rounding,
        width, padded(width, 32), 2 * inv_freq.shape[0], of_latent, padded(of_latent), overlap,
        num_warps=_warps(width), launch_pdl=overlap,
    )  # fmt: skip
    return normed
