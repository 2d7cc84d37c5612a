"""Row stores as kernels see them, and the load of a tile of rows.

Kernels keep a row as two halves, its even and its odd elements: an FP4 byte holds one of each, and
a rotation turns (even, odd) pairs, so neither ever has to be interleaved inside a kernel.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from plugins.device.numbers import (
    E2M1_UNIT,
    E4M3_UNIT,
    e2m1_pair,
    e2m1_word,
    e4m3,
    e4m3_scale,
    e8m0_scale,
    signs_joined,
)
from plugins.formats.rows import PackedRows, RowStore, ValueRows

# How a row is stored, a compile-time number of every kernel that reads or writes rows.
VALUES = tl.constexpr(0)
NVFP4 = tl.constexpr(1)  # main entries: E2M1, an E4M3 scale per 16
MXFP8 = tl.constexpr(2)  # window rows: E4M3, an E8M0 scale per 32
MXFP4 = tl.constexpr(3)  # index keys: E2M1, an E8M0 scale per 32
# The same FP4 rows where words of four bytes are aligned, as the released sizes are.
NVFP4_WORDS = tl.constexpr(4)
MXFP4_WORDS = tl.constexpr(5)
_WORDS = {1: 4, 3: 5}
_FORMATS = {"main": 1, "window": 2, "index": 3}


class DeviceRows(NamedTuple):
    """Slot s is row s % rows_per_page of page s // rows_per_page; strides count elements of
    `data`, of index keys those of a row's codes (scales lie behind all codes of their page).
    `rounding` is the format that a written row goes through, `stored` the one that it is kept in:
    packed rows in the same, or its form in words, value rows in VALUES."""

    data: torch.Tensor
    page_stride: int
    rows_per_page: int
    row_stride: int
    stored: int
    rounding: int

    def arguments(self) -> tuple[Any, ...]:
        """data, page_stride, and the compile-time rows_per_page, row_stride, stored."""
        return self.data, self.page_stride, self.rows_per_page, self.row_stride, self.stored


def device_rows(store: RowStore) -> DeviceRows | None:
    """None for a store that kernels do not know: float64 values, or a fallback record."""
    layout = store.layout if isinstance(store, PackedRows | ValueRows) else None
    rounding = 0 if layout is None else _FORMATS.get(layout.name, -1)
    if isinstance(store, PackedRows):
        data, stored = store.data, rounding
        if _words_are_aligned(data, store.width):
            stored = _WORDS.get(stored, stored)
    elif isinstance(store, ValueRows) and store.values.dtype != torch.float64:
        data, stored = store.values, 0
    else:
        return None
    if rounding < 0 or data.stride(-1) != 1:
        return None
    rows_per_page = 1 if data.dim() == 2 else data.shape[1]
    row_stride = data.stride(-2)
    if isinstance(store, PackedRows) and store.layout.split:
        row_stride = store.layout.data_bytes
    return DeviceRows(data, data.stride(0), rows_per_page, row_stride, stored, rounding)


def _words_are_aligned(data: torch.Tensor, width: int) -> bool:
    strides = (data.data_ptr(), *data.stride()[:-1], width // 2)
    return all(stride % 4 == 0 for stride in strides)


@triton.jit
def row_offsets(slots, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr):
    """Element offsets int64 of int64 slots, which must not be negative."""
    slot = slots.to(tl.int32)
    return (slot // ROWS).to(tl.int64) * page_stride + (slot % ROWS) * ROW


@triton.jit
def scale_offsets(
    slots, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Element offsets int64 of the scales of row_offsets' rows, packed in FORMAT."""
    if FORMAT == MXFP4:
        slot = slots.to(tl.int32)
        page = (slot // ROWS).to(tl.int64) * page_stride
        offset = page + ROWS * ROW + (slot % ROWS) * (WIDTH // 32)
    else:
        data: tl.constexpr = WIDTH if FORMAT == MXFP8 else WIDTH // 2
        offset = row_offsets(slots, page_stride, ROWS, ROW) + data
    return offset


@triton.jit
def _load_words(row, word, read, WORDS: tl.constexpr):
    """uint32 words, numbered `word`, of rows at `row`, zeros where not `read`. WORDS: aligned."""
    if WORDS:
        words = row.to(tl.pointer_type(tl.uint32), bitcast=True)
        value = tl.load(words + word, mask=read, other=0)
    else:
        byte = row + 4 * word
        value = tl.load(byte, mask=read, other=0).to(tl.uint32)
        for place in tl.static_range(1, 4):
            value |= tl.load(byte + place, mask=read, other=0).to(tl.uint32) << (8 * place)
    return value


@triton.jit
def load_rows(
    data, slots, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, STORED: tl.constexpr,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Even and odd elements [N, PAIRS] in float32 of the rows at `slots` [N]; zeros at −1.

    WIDTH is the row's number of elements, PAIRS ≥ WIDTH / 2 a power of two from 16 on.
    """
    N: tl.constexpr = slots.shape[0]
    there = slots >= 0
    slot = tl.maximum(slots, 0)
    row = data + row_offsets(slot, page_stride, ROWS, ROW)
    IS_NV: tl.constexpr = (STORED == NVFP4) | (STORED == NVFP4_WORDS)
    IS_MX: tl.constexpr = (STORED == MXFP4) | (STORED == MXFP4_WORDS)
    if IS_NV | IS_MX:
        FORMAT: tl.constexpr = NVFP4 if IS_NV else MXFP4
        BYTES: tl.constexpr = 8 if IS_NV else 16  # of a group
        GROUPS: tl.constexpr = PAIRS // BYTES
        group = tl.arange(0, GROUPS)
        read_scale = there[:, None] & (group < WIDTH // 2 // BYTES)[None, :]
        scale_at = data + scale_offsets(slot, page_stride, ROWS, ROW, FORMAT, WIDTH)
        scale_byte = tl.load(scale_at[:, None] + group[None, :], mask=read_scale, other=0)
        scale_byte = scale_byte.to(tl.int32)
        scale = e4m3_scale(scale_byte) if IS_NV else e8m0_scale(scale_byte)
        scale = (scale * E2M1_UNIT)[:, :, None]
        if STORED == NVFP4:
            byte = group[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
            read = there[:, None, None] & (byte < WIDTH // 2)[None, :, :]
            codes = tl.load(row[:, None, None] + byte[None, :, :], mask=read, other=0)
            even, odd = e2m1_pair(codes.to(tl.int32))
            even, odd = even * scale, odd * scale
        else:
            WORDS: tl.constexpr = BYTES // 4
            word = group[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
            read = there[:, None, None] & (word < WIDTH // 8)[None, :, :]
            codes = _load_words(row[:, None, None], word[None, :, :], read, STORED != MXFP4)
            if IS_MX:
                codes = signs_joined(codes)
            e0, e1, e2, e3, e4, e5, e6, e7 = e2m1_word(codes)
            # The last two dims count in which half of the word, and where in it.
            even = tl.join(tl.join(e0 * scale, e4 * scale), tl.join(e2 * scale, e6 * scale))
            odd = tl.join(tl.join(e1 * scale, e5 * scale), tl.join(e3 * scale, e7 * scale))
        even, odd = even.reshape(N, PAIRS), odd.reshape(N, PAIRS)
    else:
        column = tl.arange(0, 2 * PAIRS)
        read = there[:, None] & (column < WIDTH)[None, :]
        values = tl.load(row[:, None] + column[None, :], mask=read, other=0)
        if STORED == MXFP8:
            group = tl.arange(0, PAIRS // 16)
            read_scale = there[:, None] & (group < WIDTH // 32)[None, :]
            scale_at = row[:, None] + WIDTH + group[None, :]
            scale_byte = tl.load(scale_at, mask=read_scale, other=0).to(tl.int32)
            groups = e4m3(values.to(tl.int32)).reshape(N, PAIRS // 16, 32)
            values = groups * (e8m0_scale(scale_byte) * E4M3_UNIT)[:, :, None]
        even, odd = tl.split(values.to(tl.float32).reshape(N, PAIRS, 2))
    return even, odd


@triton.jit
def entry_slots(first, at, entry, read, PER_PAGE: tl.constexpr):
    """Slots int64 of the entries to `read` of a request whose pages begin at `at`, −1 where there
    is none; see plugins/indexer/slots.py."""
    slots = tl.load(first + at + entry // PER_PAGE, mask=read, other=-1)
    if PER_PAGE > 1:
        slots = tl.where(slots >= 0, slots + entry % PER_PAGE, -1)
    return slots
