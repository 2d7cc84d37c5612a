"""Sparse attention in the Triton language; docs/kernels/mega_attention.md has its floor and layout.

One program attends for one row and up to 64 heads: queries are rotated on the way in, packed rows
are decoded once for all heads, the output is rotated back on the way out. Few rows would leave most
of the device idle, so a row's keys are then cut into chunks whose parts a second kernel joins.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from plugins.device.launch import (
    INTERPRETED,
    Limits,
    limits,
    needs_reference,
    padded,
    unit_stride,
)
from plugins.device.rotation import cos_sin
from plugins.device.rows import NVFP4, NVFP4_WORDS, device_rows, load_rows
from plugins.mega_attention import kernel_hopper as hopper
from plugins.mega_attention import kernel_hopper_few as few
from plugins.mega_attention import kernel_hopper_whole as whole
from plugins.registry import OPERATORS

if TYPE_CHECKING:
    from plugins.formats.rows import RowStore

# Up to this many rows a row's keys are cut into chunks; from there on rows alone fill a device.
SPLIT_ROWS = 32
_CHUNK = 128
# Heads of a program that joins, and the parts that it adds at a time.
_JOIN_HEADS, _JOIN_PARTS = 4, 16
# The reference's bound: keeps the running maximum finite without keys, or with a +inf sink.
_MAX_BOUND = tl.constexpr(1e30)
# Softmaxes are powers of two: scores and sinks are multiplied by this.
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_tile(
    even, odd, scale, peak, total, out_even, out_odd,
    data, slots, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One more tile of keys in a running softmax."""
    key_even, key_odd = load_rows(data, slots, page_stride, ROWS, ROW, STORED, WIDTH, PAIRS)
    key_even, key_odd = key_even.to(DOT), key_odd.to(DOT)
    if WIDEN:
        key_even, key_odd = key_even.to(tl.float32), key_odd.to(tl.float32)
    scores = tl.dot(even, tl.trans(key_even), input_precision="tf32x3")
    scores = tl.dot(odd, tl.trans(key_odd), scores, input_precision="tf32x3") * scale
    scores = tl.where((slots >= 0)[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    shrink = tl.exp2(peak - higher)
    p = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    p = p.to(DOT)
    if WIDEN:
        p = p.to(tl.float32)
    out_even = tl.dot(p, key_even, out_even * shrink[:, None], input_precision="tf32x3")
    out_odd = tl.dot(p, key_odd, out_odd * shrink[:, None], input_precision="tf32x3")
    return higher, total, out_even, out_odd


@triton.jit
def _store_output(
    o, row, head, out_even, out_odd, total, cos, sin,
    H: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Divide, rotate back, write."""
    inverse = 1.0 / tl.where(total > 0, total, 1.0)[:, None]
    out_even, out_odd = out_even * inverse, out_odd * inverse
    turned = tl.join(
        out_even * cos[None, :] + out_odd * sin[None, :],
        out_odd * cos[None, :] - out_even * sin[None, :],
    )
    column = tl.arange(0, 2 * PAIRS)
    at = (row * H + head)[:, None] * WIDTH + column[None, :]
    there = (head < H)[:, None] & (column < WIDTH)[None, :]
    turned = turned.reshape(head.shape[0], 2 * PAIRS)
    tl.store(o + at, turned.to(o.dtype.element_ty), mask=there)


@triton.jit
def _bounded_sink(sink, head, H: tl.constexpr):
    logit = tl.load(sink + head, mask=head < H, other=0.0).to(tl.float32) * _LOG2_E
    return logit, tl.minimum(tl.maximum(logit, -_MAX_BOUND), _MAX_BOUND)


@triton.jit
def _attention(
    q, row_stride, head_stride, positions, inv_freq, sink, o, parts, stats, scale,
    window, window_pages, WINDOW_ROWS: tl.constexpr, WINDOW_ROW: tl.constexpr,
    WINDOW_STORED: tl.constexpr,
    main, main_pages, MAIN_ROWS: tl.constexpr, MAIN_ROW: tl.constexpr, MAIN_STORED: tl.constexpr,
    window_slots, window_stride, window_keys, main_slots, main_stride, main_keys,
    H: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
    DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cos, sin = cos_sin(tl.load(positions + row), inv_freq, WIDTH, ROTATED, PAIRS)
    column = tl.arange(0, 2 * PAIRS)
    q_at = row * row_stride + head[:, None] * head_stride + column[None, :]
    there = (head < H)[:, None] & (column < WIDTH)[None, :]
    query = tl.load(q + q_at, mask=there, other=0.0).to(tl.float32)
    even, odd = tl.split(query.reshape(HEADS, PAIRS, 2))
    turned = even * cos[None, :] - odd * sin[None, :]
    odd = (even * sin[None, :] + odd * cos[None, :]).to(DOT)
    even = turned.to(DOT)
    if WIDEN:
        even, odd = even.to(tl.float32), odd.to(tl.float32)

    if SPLIT:
        part = tl.program_id(2)
        window_parts = tl.cdiv(window_keys, CHUNK)
        window_first = part * CHUNK
        main_first = (part - window_parts) * CHUNK
        window_end = tl.minimum(window_first + CHUNK, window_keys)
        main_end = tl.minimum(main_first + CHUNK, main_keys)
        main_end = tl.where(part < window_parts, main_first, main_end)
        peak = tl.full((HEADS,), -_MAX_BOUND, tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
    else:
        window_first, main_first = 0, 0
        window_end, main_end = window_keys, main_keys
        logit, peak = _bounded_sink(sink, head, H)
        total = tl.exp2(logit - peak)
    scale *= _LOG2_E
    out_even = tl.zeros((HEADS, PAIRS), tl.float32)
    out_odd = tl.zeros((HEADS, PAIRS), tl.float32)
    for first in range(window_first, window_end, TILE):
        key = first + tl.arange(0, TILE)
        slots = tl.load(window_slots + row * window_stride + key, mask=key < window_end, other=-1)
        peak, total, out_even, out_odd = _attend_tile(
            even, odd, scale, peak, total, out_even, out_odd,
            window, slots, window_pages, WINDOW_ROWS, WINDOW_ROW, WINDOW_STORED,
            WIDTH, PAIRS, DOT, WIDEN,
        )  # fmt: skip
    for first in range(main_first, main_end, TILE):
        key = first + tl.arange(0, TILE)
        slots = tl.load(main_slots + row * main_stride + key, mask=key < main_end, other=-1)
        peak, total, out_even, out_odd = _attend_tile(
            even, odd, scale, peak, total, out_even, out_odd,
            main, slots, main_pages, MAIN_ROWS, MAIN_ROW, MAIN_STORED,
            WIDTH, PAIRS, DOT, WIDEN,
        )  # fmt: skip

    if SPLIT:
        at = (row * tl.num_programs(2) + part) * H + head
        pair = tl.arange(0, PAIRS)
        of_pair = (at * (2 * PAIRS))[:, None] + pair[None, :]
        is_head = head < H
        tl.store(parts + of_pair, out_even, mask=is_head[:, None])
        tl.store(parts + of_pair + PAIRS, out_odd, mask=is_head[:, None])
        tl.store(stats + 2 * at, peak, mask=is_head)
        tl.store(stats + 2 * at + 1, total, mask=is_head)
    else:
        _store_output(o, row, head, out_even, out_odd, total, cos, sin, H, WIDTH, PAIRS)


@triton.jit
def _join(
    positions, inv_freq, sink, o, parts, stats, num_parts,
    H: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < H
    cos, sin = cos_sin(tl.load(positions + row), inv_freq, WIDTH, ROTATED, PAIRS)
    logit, peak = _bounded_sink(sink, head, H)
    pair = tl.arange(0, PAIRS)
    even_at, odd_at = pair, pair + PAIRS
    for first in range(0, num_parts, GROUP):
        part = first + tl.arange(0, GROUP)
        at = (row * num_parts + part[:, None]) * H + head[None, :]
        there = (part < num_parts)[:, None] & is_head[None, :]
        peaks = tl.load(stats + 2 * at, mask=there, other=-_MAX_BOUND)
        peak = tl.maximum(peak, tl.max(peaks, axis=0))
    total = tl.exp2(logit - peak)
    out_even = tl.zeros((HEADS, PAIRS), tl.float32)
    out_odd = tl.zeros((HEADS, PAIRS), tl.float32)
    for first in range(0, num_parts, GROUP):
        for i in tl.static_range(GROUP):
            at = (row * num_parts + first + i) * H + head
            there = is_head & (first + i < num_parts)
            part_peak = tl.load(stats + 2 * at, mask=there, other=-_MAX_BOUND)
            part_total = tl.load(stats + 2 * at + 1, mask=there, other=0.0)
            columns = parts + (at * (2 * PAIRS))[:, None]
            part_even = tl.load(columns + even_at[None, :], mask=there[:, None], other=0.0)
            part_odd = tl.load(columns + odd_at[None, :], mask=there[:, None], other=0.0)
            grow = tl.exp2(part_peak - peak)
            total += part_total * grow
            out_even += part_even * grow[:, None]
            out_odd += part_odd * grow[:, None]
    _store_output(o, row, head, out_even, out_odd, total, cos, sin, H, WIDTH, PAIRS)


@triton.jit
def _highest(peak, stats, at, stride, there, count, GROUP: tl.constexpr):
    """The maximum of `peak` and those of `count` parts, at most GROUP."""
    for i in tl.static_range(GROUP):
        of_part = stats + 2 * (at + i * stride)
        peak = tl.maximum(peak, tl.load(of_part, mask=there & (i < count), other=-_MAX_BOUND))
    return peak


@triton.jit
def _add_parts(
    peak, total, out, stats, parts, at, stride, there, count,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`total` and `out` [heads, COLUMNS] with `count` parts more, at most GROUP."""
    column = tl.arange(0, COLUMNS)
    for i in tl.static_range(GROUP):
        of_part = at + i * stride
        is_there = there & (i < count)
        grow = tl.exp2(tl.load(stats + 2 * of_part, mask=is_there, other=-_MAX_BOUND) - peak)
        total += tl.load(stats + 2 * of_part + 1, mask=is_there, other=0.0) * grow
        columns = parts + (of_part * COLUMNS)[:, None] + column[None, :]
        out += tl.load(columns, mask=is_there[:, None], other=0.0) * grow[:, None]
    return total, out


@triton.jit
def _join_kept(
    positions, inv_freq, sink, o, parts, stats, num_parts,
    H: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Join parts whose columns are in the order of kernel_hopper_decode.py, and whose kernel may
    still run when this one begins: in groups of GROUP, of which there are MORE than one. The loads
    of a group wait for nothing."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < H
    position = tl.load(positions + row)
    logit, peak = _bounded_sink(sink, head, H)
    at = row * num_parts * H + head
    peak = _highest(peak, stats, at, H, there, num_parts, GROUP)
    if MORE:
        for first in range(GROUP, num_parts, GROUP):
            peak = _highest(peak, stats, at + first * H, H, there, num_parts - first, GROUP)
    total = tl.exp2(logit - peak)
    out = tl.zeros((HEADS, 2 * PAIRS), tl.float32)
    total, out = _add_parts(
        peak, total, out, stats, parts, at, H, there, num_parts, 2 * PAIRS, GROUP
    )
    if MORE:
        for first in range(GROUP, num_parts, GROUP):
            total, out = _add_parts(
                peak, total, out, stats, parts, at + first * H, H, there, num_parts - first,
                2 * PAIRS, GROUP,
            )  # fmt: skip
    out = out.reshape(HEADS, 4, PAIRS // 16, 2, 2, 2).permute(0, 2, 1, 5, 3, 4)
    out_even, out_odd = tl.split(out.reshape(HEADS, PAIRS, 2))
    # Behind the loads of the parts, which do not wait for the position.
    cos, sin = cos_sin(position, inv_freq, WIDTH, ROTATED, PAIRS)
    _store_output(o, row, head, out_even, out_odd, total, cos, sin, H, WIDTH, PAIRS)


def most_heads(device: Limits, dtype: torch.dtype) -> int:
    """Heads of a program. In bfloat16 64 take 115 KiB of shared memory on sm_90 and 149 on sm_80,
    32 take 83; with 64, two sums [64, 256] and the scores are more than the tensor memory has. In
    float32 16 heads and half a tile of keys take 98 KiB."""
    if dtype == torch.float32:
        return 16
    return 64 if device.shared_memory >= 160_000 and not device.tensor_memory else 32


def mega_attention(
    q: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    window: RowStore,
    window_slots: torch.Tensor,
    main: RowStore | None,
    main_slots: torch.Tensor | None,
    sink: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """As the reference, whose arguments and result these are.

    Products take bfloat16 operands for bfloat16 queries and three TF32 products for float32 ones;
    sums are float32. With float64, a gradient or an unknown record the reference runs.
    """
    has_main = main is not None and main_slots is not None
    window_rows = device_rows(window)
    main_rows = device_rows(main) if main is not None and has_main else window_rows
    if window_rows is None or main_rows is None or needs_reference(q, sink):
        reference: torch.Tensor = OPERATORS["mega_attention"].reference(
            q, positions, inv_freq, window, window_slots, main, main_slots, sink, scale=scale
        )
        return reference
    rows, heads, width = q.shape
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    if rows == 0:
        return o
    q, window_slots = unit_stride(q), unit_stride(window_slots)
    entry_slots = unit_stride(main_slots) if main_slots is not None and has_main else window_slots
    main_keys = entry_slots.shape[1] if has_main else 0
    pairs, exact = padded(width // 2), q.dtype == torch.float32
    if exact and main_rows.stored == NVFP4_WORDS.value:
        # Triton 3.6 multiplies 16 keys read by words wrongly in TF32, on a device only.
        main_rows = main_rows._replace(stored=NVFP4.value)
    sizes = heads, width, 2 * inv_freq.shape[0]
    slots = (
        window_slots, window_slots.stride(0), window_slots.shape[1],
        entry_slots, entry_slots.stride(0), main_keys,
    )  # fmt: skip
    operands = q, q.stride(0), q.stride(1), positions, inv_freq
    by_warp_groups = hopper.takes(q, sizes[2], window_rows, main_rows if has_main else None)
    of_few = few.cut(rows, window_slots.shape[1], main_keys) if by_warp_groups else None
    cut = hopper.cut(rows, window_slots.shape[1], main_keys)
    if of_few is not None:
        parts, split = of_few.parts, True
    elif by_warp_groups:
        parts, split = (cut.parts, True) if cut is not None else (1, False)
    else:
        parts = triton.cdiv(window_slots.shape[1], _CHUNK) + triton.cdiv(main_keys, _CHUNK)
        split = rows <= SPLIT_ROWS and parts > 1
        parts = parts if split else 1
    partial, stats = o, o
    if split:
        partial = q.new_empty((rows, parts, heads, 2 * pairs), dtype=torch.float32)
        stats = q.new_empty((rows, parts, heads, 2), dtype=torch.float32)
    results = sink, o, partial, stats, scale
    if of_few is not None:
        few.attention_few[(parts, triton.cdiv(heads, of_few.heads), rows)](
            *operands, partial, stats, scale, *window_rows.arguments()[:-1],
            *main_rows.arguments()[:-1], *slots, of_few.window_parts, parts, heads, width,
            of_few.heads, of_few.keys, num_warps=8, launch_pdl=True,
        )  # fmt: skip
    elif by_warp_groups and cut is not None:
        programs = min(rows * parts, limits(q.device).multiprocessors)
        hopper.attention_hopper[(programs,)](
            *operands, partial, stats, scale, *window_rows.arguments()[:-1],
            *main_rows.arguments()[:-1], *slots, *cut, rows * parts, heads, width, hopper.HEADS,
            hopper.TILE, num_warps=8, launch_pdl=True,
        )  # fmt: skip
    elif by_warp_groups:
        whole.attention_whole[(min(rows, limits(q.device).multiprocessors),)](
            *operands, sink, o, scale, *window_rows.arguments()[:-1], *main_rows.arguments()[:-1],
            *slots, rows, heads, width, hopper.HEADS, hopper.TILE, num_warps=4,
        )  # fmt: skip
    else:
        head_block = min(most_heads(limits(q.device), q.dtype), padded(heads))
        launch: dict[str, Any] = {"num_warps": 8 if head_block * pairs >= 32 * 256 else 4}
        if exact:
            launch["num_stages"] = 1
        _attention[(rows, triton.cdiv(heads, head_block), parts)](
            *operands, *results, *window_rows.arguments(), *main_rows.arguments(), *slots,
            *sizes, pairs, head_block, 16 if exact else 32, _CHUNK, split,
            tl.float32 if exact else tl.bfloat16, INTERPRETED, **launch,
        )  # fmt: skip
    if split:
        of_row = positions, inv_freq, sink, o, partial, stats, parts, *sizes, pairs
        if by_warp_groups:
            group = min(_JOIN_PARTS, parts)
            _join_kept[(rows, heads)](*of_row, 1, group, parts > group, launch_pdl=True)
        else:
            group = min(_JOIN_PARTS, triton.next_power_of_2(parts))
            _join[(rows, triton.cdiv(heads, _JOIN_HEADS))](*of_row, _JOIN_HEADS, group)
    return o
