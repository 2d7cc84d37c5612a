"""Engram in the Triton language: hash, look-up and gate; docs/kernels/engram.md has the floors.

A table may lie in the device's memory or in pinned memory of the host, which the look-up then reads
across the link: nothing is staged, and only the rows that are named are moved.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, limits, needs_reference, padded, unit_stride
from plugins.device.numbers import (
    E2M1_UNIT,
    E4M3_UNIT,
    e2m1_pair,
    e4m3,
    e4m3_scale,
    e8m0_scale,
)
from plugins.device.overlap import after_previous, overlaps
from plugins.engram.layout import EngramLayout
from plugins.formats.mxfp8 import MxFp8
from plugins.formats.nvfp4 import NvFp4
from plugins.formats.rows import PackedRows, RowStore, ValueRows
from plugins.registry import OPERATORS

# How a table row is stored, a compile-time number.
VALUES = tl.constexpr(0)
MXFP8 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)
_TOKENS = 32
# Of a program; fewer up to as many in all: with more of them, programs of four that wait crowd out
# those of the launch before.
_TABLE_ROWS, _FEW_TABLE_ROWS, _FEW = 8, 4, 3072
_GATE_TILE = 1024
_SQRT_FLOOR = tl.constexpr(1e-6)


@triton.jit
def _rows(
    tokens, request, query_start, history, token_class, multipliers, primes, offsets, rows,
    num_tokens, pad_class, dead_token,
    REACH: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = row < num_tokens
    owner = tl.load(request + row, mask=there, other=0)
    offset = row - tl.load(query_start + owner)
    head = tl.arange(0, PADDED)
    is_head = head < HEADS
    usable = there
    hashes = tl.zeros((TOKENS,), tl.int64)
    for back in tl.static_range(REACH + 1):
        inside = offset >= back
        token = tl.load(tokens + row - back, mask=there & inside, other=0)
        if back > 0:
            at = tl.maximum(REACH + offset - back, 0)
            before = tl.load(history + owner * REACH + at, mask=there & (offset < back), other=0)
            token = tl.where(inside, token, before)
        usable = usable & (token >= 0) & (token != dead_token)
        known = tl.load(token_class + tl.maximum(token, 0), mask=usable, other=0)
        hashes = hashes ^ (tl.where(usable, known, pad_class) * tl.load(multipliers + back))
        if back > 0:
            column = (back - 1) * HEADS + head
            prime = tl.load(primes + column, mask=is_head, other=1)
            first = tl.load(offsets + column, mask=is_head, other=0)
            place = hashes[:, None] % prime[None, :] + first[None, :]
            out = row[:, None].to(tl.int64) * (REACH * HEADS) + column[None, :]
            tl.store(rows + out, place, mask=there[:, None] & is_head[None, :])


@triton.jit
def _lookup(
    data, rows, memory, count, factor,
    ROW: tl.constexpr, STORED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, FLOAT8: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS table rows; ROW is their distance, so that the compiler knows how they are aligned."""
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    after_previous(OVERLAP)
    slot = tl.load(rows + index, mask=index < count, other=-1)
    there = slot >= 0
    row = data + tl.maximum(slot, 0) * ROW
    column = tl.arange(0, PADDED)
    out = memory + index[:, None] * WIDTH + column[None, :]
    wanted = (index < count)[:, None] & (column < WIDTH)[None, :]
    if STORED == VALUES:
        values = tl.load(row[:, None] + column[None, :], mask=wanted & there[:, None], other=0.0)
    else:
        GROUP: tl.constexpr = 16 if STORED == NVFP4 else 32
        GROUPS: tl.constexpr = PADDED // GROUP
        BYTES: tl.constexpr = WIDTH // 2 if STORED == NVFP4 else WIDTH
        PLACES: tl.constexpr = PADDED // 2 if STORED == NVFP4 else PADDED
        group, place = tl.arange(0, GROUPS), tl.arange(0, PLACES)
        read = there[:, None] & (place < BYTES)[None, :]
        code = tl.load(row[:, None] + place[None, :], mask=read, other=0)
        read_scale = there[:, None] & (group < WIDTH // GROUP)[None, :]
        byte = tl.load(row[:, None] + BYTES + group[None, :], mask=read_scale, other=0)
        byte = byte.to(tl.int32)
        if STORED == NVFP4:
            step = (e4m3_scale(byte) * factor * E2M1_UNIT)[:, :, None]
            low, high = e2m1_pair(code.to(tl.int32).reshape(ROWS, GROUPS, GROUP // 2))
            values = tl.join(low * step, high * step)
        else:
            step = e8m0_scale(byte)
            if FLOAT8:
                value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            else:
                value, step = e4m3(code.to(tl.int32)), step * E4M3_UNIT
            values = value.reshape(ROWS, GROUPS, GROUP) * step[:, :, None]
        values = values.reshape(ROWS, PADDED)
    tl.store(out, values.to(memory.dtype.element_ty), mask=wanted)


@triton.jit
def _add(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _gate(
    streams, x_row, x_stream, keys, k_row, k_stream, value, v_row, q_weight, k_weight, alive, out,
    norm_eps, STREAMS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One stream of one token, which stays in registers."""
    TILES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    stream = tl.program_id(0) % STREAMS
    token = (tl.program_id(0) // STREAMS).to(tl.int64)
    x_at = streams + token * x_row + stream * x_stream
    k_at = keys + token * k_row + stream * k_stream
    v_at = value + token * v_row
    x, k, v, weights = (), (), (), ()
    for i in tl.static_range(TILES):
        column = i * TILE + tl.arange(0, TILE)
        there = column < WIDTH
        x = x + (tl.load(x_at + column, mask=there, other=0.0),)  # noqa: RUF005 (no unpacking here)
        k = k + (tl.load(k_at + column, mask=there, other=0.0),)  # noqa: RUF005
        v = v + (tl.load(v_at + column, mask=there, other=0.0),)  # noqa: RUF005
        at = stream * WIDTH + column
        weight = tl.load(q_weight + at, mask=there, other=0.0).to(tl.float32)
        weight *= tl.load(k_weight + at, mask=there, other=0.0).to(tl.float32)
        weights = weights + (weight,)  # noqa: RUF005
    x_squares = tl.zeros((TILE,), tl.float32)
    k_squares = tl.zeros((TILE,), tl.float32)
    products = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(TILES):
        wide, key = x[i].to(tl.float32), k[i].to(tl.float32)
        x_squares += wide * wide
        k_squares += key * key
        products += wide * weights[i] * key
    # One reduction of three sums: the program's warps wait for each other once.
    x_squares, k_squares, score = tl.reduce((x_squares, k_squares, products), 0, _add)
    inverse = tl.rsqrt(x_squares / WIDTH + norm_eps) * tl.rsqrt(k_squares / WIDTH + norm_eps)
    score = score * inverse * tl.rsqrt(tl.cast(WIDTH, tl.float32))
    size = tl.maximum(tl.abs(score), _SQRT_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    root = tl.sqrt(size)
    signed = tl.where(score == 0.0, 0.0, tl.where(score < 0.0, -root, root))
    share = 1.0 / (1.0 + tl.exp(-signed))
    out_at = out + (token * STREAMS + stream) * WIDTH
    for i in tl.static_range(TILES):
        column = i * TILE + tl.arange(0, TILE)
        injected = x[i].to(tl.float32) + v[i].to(tl.float32) * share
        injected = injected.to(out.dtype.element_ty)
        if MASKED:
            injected = tl.where(tl.load(alive + token) != 0, injected, x[i])
        tl.store(out_at + column, injected, mask=column < WIDTH)


class _Table(NamedTuple):
    data: torch.Tensor
    row_stride: int
    stored: int
    factor: float


def _table(store: RowStore) -> _Table | None:
    """None for a store that kernels do not know."""
    if isinstance(store, ValueRows):
        data, stored, factor = store.values, VALUES.value, 1.0
    elif isinstance(store, PackedRows) and isinstance(store.layout.format, MxFp8):
        data, stored, factor = store.data, MXFP8.value, 1.0
    elif isinstance(store, PackedRows) and isinstance(store.layout.format, NvFp4):
        scale = store.layout.format.global_scale
        if isinstance(scale, torch.Tensor):
            return None
        data, stored, factor = store.data, NVFP4.value, 1.0 if scale is None else scale
    else:
        return None
    if data.dim() != 2 or data.stride(1) != 1 or data.dtype == torch.float64:
        return None
    return _Table(data, data.stride(0), stored, factor)


@functools.cache
def _on_device(numbers: bytes, device: torch.device) -> torch.Tensor:
    """int64 numbers, copied once."""
    return torch.frombuffer(bytearray(numbers), dtype=torch.int64).to(device)


def engram_rows(
    tokens: torch.Tensor,
    request: torch.Tensor,
    query_start: torch.Tensor,
    history: torch.Tensor,
    token_class: torch.Tensor,
    layout: EngramLayout,
    *,
    pad_class: int,
    dead_token_id: int | None = None,
) -> torch.Tensor:
    """As the reference, whose arguments and result these are. The layout's numbers are copied to
    the device at the first call, which a graph must not capture."""
    reach, columns = layout.max_ngram_size - 1, len(layout.primes)
    rows = tokens.new_empty((tokens.shape[0], columns))
    if rows.numel():
        heads = columns // reach
        numbers = (layout.multipliers, layout.primes, layout.offsets)
        _rows[(triton.cdiv(len(tokens), _TOKENS),)](
            tokens, request, query_start, history.contiguous(), token_class,
            *(_on_device(array.tobytes(), tokens.device) for array in numbers),
            rows, len(tokens), pad_class, -1 if dead_token_id is None else dead_token_id,
            reach, heads, padded(heads, 1), _TOKENS,
        )  # fmt: skip
    return rows


def engram_lookup(table: RowStore, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the reference, which runs for float64 and unknown stores. Raises ValueError for a table in
    memory of the host that is not pinned."""
    found = _table(table)
    if found is None or dtype == torch.float64:
        reference: torch.Tensor = OPERATORS["engram_lookup"].reference(table, rows, dtype)
        return reference
    if rows.is_cuda and not found.data.is_cuda and not found.data.is_pinned():
        raise ValueError(
            "expected an Engram table in the device's memory or in pinned memory of the host, got "
            "pageable memory, which the device cannot read; pin the table once after loading it"
        )
    width, count = table.width, rows.numel()
    memory = torch.empty(rows.shape[0], rows.shape[1] * width, dtype=dtype, device=rows.device)
    if count:
        overlap = overlaps(rows.device)
        table_rows = _FEW_TABLE_ROWS if count <= _FEW else _TABLE_ROWS
        _lookup[(triton.cdiv(count, table_rows),)](
            found.data, rows.contiguous(), memory, count, found.factor,
            found.row_stride, found.stored, width, padded(width, 32), table_rows,
            limits(rows.device).float8 and not INTERPRETED, overlap, launch_pdl=overlap,
        )  # fmt: skip
    return memory


def engram_gate(
    streams: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    alive: torch.Tensor | None,
    *,
    norm_eps: float,
) -> torch.Tensor:
    """As the reference, which runs for float64 or a gradient. Sums are float32."""
    if needs_reference(streams, keys, value, q_weight, k_weight):
        reference: torch.Tensor = OPERATORS["engram_gate"].reference(
            streams, keys, value, q_weight, k_weight, alive, norm_eps=norm_eps
        )
        return reference
    rows, num_streams, width = streams.shape
    injected = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if streams.numel():
        streams, keys, value = unit_stride(streams), unit_stride(keys), unit_stride(value)
        _gate[(num_streams * rows,)](
            streams, streams.stride(0), streams.stride(1), keys, keys.stride(0), keys.stride(1),
            value, value.stride(0), q_weight.contiguous(), k_weight.contiguous(),
            injected if alive is None else alive.view(torch.uint8), injected, norm_eps,
            num_streams, width, min(_GATE_TILE, padded(width)), alive is not None, num_warps=4,
        )  # fmt: skip
    return injected
