"""Hyper-connections in the Triton language; docs/kernels/mega_mhc.md has their floor and layout.

One kernel passes once over the streams and does what it is asked to: expand, the products and the
squares of the next mix, collapse. A second one adds those up for a few rows, finishes the mix
(Sinkhorn included) and normalises what was collapsed. A row's sums over the width are always made
of the same parts in the same order, whether programs share a row or not.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, Limits, limits, needs_reference, padded, unit_stride
from plugins.mega_mhc.reference import HcMix, mhc_pieces
from plugins.registry import OPERATORS

_ROWS = 64
_TILE = 32
# A part of a row's sums is so many tiles of every stream; four groups of parts make the sum.
_PART_TILES = 4
_GROUPS = 4
# Up to this many rows every part is a program of its own, from there on every group.
_SPREAD_ROWS = 512
# Rows of a program that finishes mixes.
_FINISH_ROWS = 4


@triton.jit
def _load_tile(base, row_at, column, there):
    return tl.load(base + row_at[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def _columns(base, row, WIDTH: tl.constexpr, is_row):
    """Each column of a contiguous [rows, WIDTH] as [ROWS, 1] in float32."""
    columns = ()
    for i in tl.static_range(WIDTH):
        one = tl.load(base + row * WIDTH + i, mask=is_row, other=0.0).to(tl.float32)
        columns = columns + (one[:, None],)  # noqa: RUF005 (kernels know no unpacking)
    return columns


@triton.jit
def _upper(x):
    """The upper half of float32 bits, which is a bfloat16 cut off."""
    bits = x.to(tl.uint32, bitcast=True) >> 16
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _halves(x):
    """float32 as two bfloat16 values whose sum is 2^−16 of it off at most. Cut off instead of
    rounded: moving bits costs a fraction of converting."""
    high = _upper(x)
    return high, _upper(x - high.to(tl.float32))


@triton.jit
def _streams(
    streams, row_stride, stream_stride, y, y_stride, post, comb, pre, fn,
    expanded, collapsed, sums, num_rows, num_tiles,
    WIDTH: tl.constexpr, S: tl.constexpr, MIXES: tl.constexpr, SUMS: tl.constexpr,
    MIX_TILE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
    PARTS: tl.constexpr, EXPAND: tl.constexpr, MIX: tl.constexpr, COLLAPSE: tl.constexpr,
    DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """PARTS parts of ROWS rows. Column MIXES of `sums` takes the squares of the streams, the next
    one those of what was collapsed."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = row < num_rows
    # Mixes are the rows of the product and streams its columns: the other way round, the compiler
    # would compute the streams once for every layout that a product wants.
    mix = tl.arange(0, MIX_TILE)
    total = tl.zeros((MIX_TILE, ROWS), tl.float32)
    products = tl.zeros((MIX_TILE, ROWS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    collapsed_squares = tl.zeros((ROWS,), tl.float32)
    gains, shares, merges = (), (), ()
    if EXPAND:
        gains = _columns(post, row, S, is_row)
        shares = _columns(comb, row, S * S, is_row)
    if COLLAPSE:
        merges = _columns(pre, row, S, is_row)
    first = tl.program_id(1) * (PARTS * PART)
    for tile in range(first, tl.minimum(first + PARTS * PART, num_tiles)):
        column = tile * TILE + tl.arange(0, TILE)
        there = is_row[:, None] & (column < WIDTH)[None, :]
        x = ()
        for s in tl.static_range(S):
            one = _load_tile(streams, row * row_stride + s * stream_stride, column, there)
            x = x + (one,)  # noqa: RUF005
        if EXPAND:
            sublayer = _load_tile(y, row * y_stride, column, there)
        merged = tl.zeros((ROWS, TILE), tl.float32)
        for j in tl.static_range(S):
            value = x[j]
            if EXPAND:
                value = shares[j] * x[0]
                for source in tl.static_range(1, S):
                    value += shares[source * S + j] * x[source]
                value = (gains[j] * sublayer + value).to(expanded.dtype.element_ty)
                at = (row * S + j)[:, None] * WIDTH + column[None, :]
                tl.store(expanded + at, value, mask=there)
                value = value.to(tl.float32)
            if MIX:
                fn_at = fn + mix[:, None] * (S * WIDTH) + j * WIDTH + column[None, :]
                fn_there = (mix < MIXES)[:, None] & (column < WIDTH)[None, :]
                coefficient = tl.load(fn_at, mask=fn_there, other=0.0).to(tl.float32)
                operand = tl.trans(value if WIDEN else value.to(DOT))
                if WIDEN:
                    products = tl.dot(coefficient, operand, products, input_precision="tf32x3")
                else:
                    high, low = _halves(coefficient)
                    products = tl.dot(high, operand, products)
                    products = tl.dot(low, operand, products)
                squares += tl.sum(value * value, axis=1)
            if COLLAPSE:
                merged = merges[j] * value if j == 0 else merged + merges[j] * value
        if COLLAPSE:
            merged = merged.to(collapsed.dtype.element_ty)
            tl.store(collapsed + row[:, None] * WIDTH + column[None, :], merged, mask=there)
            merged = merged.to(tl.float32)
            collapsed_squares += tl.sum(merged * merged, axis=1)
        if MIX & ((tile % PART == PART - 1) | (tile == num_tiles - 1)):
            part = tl.where((mix == MIXES)[:, None], squares[None, :], products)
            total += tl.where((mix == MIXES + 1)[:, None], collapsed_squares[None, :], part)
            products = tl.zeros((MIX_TILE, ROWS), tl.float32)
            squares = tl.zeros((ROWS,), tl.float32)
            collapsed_squares = tl.zeros((ROWS,), tl.float32)
    if MIX:
        at = (tl.program_id(1).to(tl.int64) * num_rows + row)[None, :] * SUMS + mix[:, None]
        tl.store(sums + at, total, mask=is_row[None, :] & (mix < SUMS)[:, None])


@triton.jit
def _total(sums, row, is_row, num_rows, place, SUMS: tl.constexpr, GROUPS, PER: tl.constexpr):
    """The sums at `place` of each row, groups of PER parts each; all of one rank."""
    total = tl.zeros((row + place).shape, tl.float32)
    for group in range(GROUPS):
        one = tl.zeros(total.shape, tl.float32)
        for part in tl.static_range(PER):
            at = ((group * PER + part) * num_rows + row) * SUMS + place
            one += tl.load(sums + at, mask=is_row & (place >= 0), other=0.0)
        total += one
    return total


@triton.jit
def _quotient(x, y):
    """x / y with IEEE rounding; y is broadcast."""
    return tl.div_rn(x, tl.zeros_like(x) + y)


@triton.jit
def _inverse_rms(total, place, at: tl.constexpr, count: tl.constexpr, eps):
    """[rows, 1] from the sum of squares at `at`."""
    squares = tl.sum(tl.where(place == at, total, 0.0), axis=1)[:, None]
    return tl.div_rn(1.0, tl.sqrt_rn(squares / count + eps))


@triton.jit
def _finish(
    sums, base, scale, pre, post, comb, collapsed, weight, normed, num_rows,
    groups, sinkhorn_iters, hc_eps, norm_eps,
    WIDTH: tl.constexpr, S: tl.constexpr, SUMS: tl.constexpr, PER: tl.constexpr,
    NORM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    is_row = row < num_rows
    place = tl.arange(0, SUMS)[None, :]
    total = _total(sums, row, is_row, num_rows, place, SUMS, groups, PER)
    MIXES: tl.constexpr = S * (2 + S)
    inverse = _inverse_rms(total, place, MIXES, S * WIDTH, norm_eps)
    own = place < 2 * S
    shift = tl.load(base + place, mask=own, other=0.0).to(tl.float32)
    factor = tl.load(scale + place // S, mask=own, other=0.0).to(tl.float32)
    gate = 1.0 + tl.exp(-(total * inverse * factor + shift))
    gate = tl.div_rn(1.0, gate)
    tl.store(pre + row * S + place, gate + hc_eps, mask=is_row & (place < S))
    tl.store(post + row * S + place - S, 2.0 * gate, mask=is_row & own & (place >= S))

    row3, is_row3, inverse3 = row[:, :, None], is_row[:, :, None], inverse[:, :, None]
    cell = tl.arange(0, S)[None, :, None] * S + tl.arange(0, S)[None, None, :]
    grid = _total(sums, row3, is_row3, num_rows, 2 * S + cell, SUMS, groups, PER)
    shift = tl.load(base + 2 * S + cell).to(tl.float32)
    grid = grid * inverse3 * tl.load(scale + 2).to(tl.float32) + shift
    grid = tl.exp(grid - tl.max(grid, axis=2, keep_dims=True))
    grid = _quotient(grid, tl.sum(grid, axis=2, keep_dims=True)) + hc_eps
    grid = _quotient(grid, tl.sum(grid, axis=1, keep_dims=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        grid = _quotient(grid, tl.sum(grid, axis=2, keep_dims=True) + hc_eps)
        grid = _quotient(grid, tl.sum(grid, axis=1, keep_dims=True) + hc_eps)
    tl.store(comb + row3 * S * S + cell, grid, mask=is_row3)

    if NORM:
        inverse = _inverse_rms(total, place, MIXES + 1, WIDTH, norm_eps)
        for first in range(0, WIDTH, TILE):
            column = first + tl.arange(0, TILE)[None, :]
            there = is_row & (column < WIDTH)
            value = tl.load(collapsed + row * WIDTH + column, mask=there, other=0.0)
            gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) * inverse * gain).to(normed.dtype.element_ty)
            tl.store(normed + row * WIDTH + column, value, mask=there)


def stages(device: Limits) -> int:
    """Tiles under way; three take 112 KiB."""
    return 3 if device.shared_memory >= 160_000 else 2


class _Pass:
    """One pass over `streams` [T, S, D]: what is given is done."""

    def __init__(self, streams: torch.Tensor) -> None:
        self.streams = unit_stride(streams)
        self.rows, self.count, self.width = streams.shape
        self.tiles = triton.cdiv(self.width, _TILE)
        parts = triton.cdiv(self.tiles, _PART_TILES)
        self.per_group = triton.cdiv(parts, _GROUPS)
        self.spread = self.rows <= _SPREAD_ROWS
        self.mixes = self.count * (2 + self.count)
        self.num_sums = padded(self.mixes + 2)
        self.sums = streams

    def run(
        self,
        *,
        y: torch.Tensor | None = None,
        post: torch.Tensor | None = None,
        comb: torch.Tensor | None = None,
        fn: torch.Tensor | None = None,
        pre: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Expanded streams [T, S, D] if y is given, and [T, D] collapsed by `pre` if that is."""
        s = self.streams
        expanded, collapsed = s, s
        if y is not None:
            expanded = torch.empty_like(s, memory_format=torch.contiguous_format)
            y = unit_stride(y)
        if pre is not None:
            collapsed = s.new_empty((self.rows, self.width))
        parts_each = 1 if self.spread else self.per_group
        programs = _GROUPS * (self.per_group if self.spread else 1)
        if fn is not None:
            shape = (programs, self.rows, self.num_sums)
            self.sums = s.new_empty(shape, dtype=torch.float32)
            fn = fn.contiguous()
        wide = s.dtype == torch.float32 or INTERPRETED
        y_stride = y.stride(0) if y is not None else 0
        _streams[(triton.cdiv(self.rows, _ROWS), programs)](
            s, s.stride(0), s.stride(1), _given(y, s), y_stride, _given(post, s), _given(comb, s),
            _given(pre, s), _given(fn, s), expanded, collapsed, self.sums, self.rows, self.tiles,
            self.width, self.count, self.mixes, self.num_sums, max(64, self.num_sums),
            _ROWS, _TILE, _PART_TILES, parts_each, y is not None, fn is not None, pre is not None,
            tl.float32 if s.dtype == torch.float32 else tl.bfloat16, wide,
            num_warps=8, num_stages=stages(limits(s.device)),
        )  # fmt: skip
        return expanded, collapsed

    def finish(
        self,
        base: torch.Tensor,
        scale: torch.Tensor,
        collapsed: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        *,
        sinkhorn_iters: int,
        hc_eps: float,
        norm_eps: float,
    ) -> tuple[HcMix, torch.Tensor]:
        """The mix of the sums that `run` left, and `collapsed` normalised if that is given."""
        new, s, rows = self.sums.new_empty, self.count, self.rows
        mix = HcMix(new((rows, s)), new((rows, s)), new((rows, s, s)))
        normed = torch.empty_like(collapsed) if collapsed is not None else self.sums
        _finish[(triton.cdiv(rows, _FINISH_ROWS),)](
            self.sums, base, scale, *mix, _given(collapsed, normed), _given(norm, base), normed,
            rows, _GROUPS, sinkhorn_iters, hc_eps, norm_eps, self.width, s, self.num_sums,
            self.per_group if self.spread else 1, norm is not None, _FINISH_ROWS,
            min(1024, padded(self.width)), num_warps=4,
        )  # fmt: skip
        return mix, normed


def _given(x: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """x contiguous but in its first dim, or a tensor that is not read."""
    return stand_in if x is None else x


def _knows(streams: torch.Tensor, *others: torch.Tensor) -> bool:
    streams_in_powers = streams.shape[1] & (streams.shape[1] - 1) == 0
    return streams_in_powers and not needs_reference(streams, *others)


def hc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> HcMix:
    """As the reference, which runs for float64, a gradient, or streams that are no power of two.

    bfloat16 streams are multiplied by two bfloat16 halves of fn (16 bits of it), float32 ones in
    three TF32 products; sums are float32.
    """
    sizes: dict[str, Any] = {
        "sinkhorn_iters": sinkhorn_iters, "hc_eps": hc_eps, "norm_eps": norm_eps
    }  # fmt: skip
    if not streams.numel() or not _knows(streams, fn, base, scale):
        mix: HcMix = OPERATORS["hc_mix"].reference(streams, fn, base, scale, **sizes)
        return mix
    one = _Pass(streams)
    one.run(fn=fn)
    return one.finish(base, scale, **sizes)[0]


def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """As the reference, which runs for float64 or a gradient."""
    if not streams.numel() or not _knows(streams, pre):
        reference: torch.Tensor = OPERATORS["hc_collapse"].reference(streams, pre)
        return reference
    return _Pass(streams).run(pre=pre.contiguous())[1]


def hc_expand(
    streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """As the reference, which runs for float64 or a gradient."""
    if not streams.numel() or not _knows(streams, y, post, comb):
        reference: torch.Tensor = OPERATORS["hc_expand"].reference(streams, y, post, comb)
        return reference
    return _Pass(streams).run(y=y, post=post.contiguous(), comb=comb.contiguous())[0]


def mega_mhc(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, HcMix, torch.Tensor]:
    """As the pieces, in two launches."""
    if not streams.numel() or not _knows(streams, y, post, comb, pre, fn, base, scale, norm):
        return mhc_pieces(
            streams, y, post, comb, pre, fn, base, scale, norm,
            sinkhorn_iters=sinkhorn_iters, hc_eps=hc_eps, norm_eps=norm_eps,
        )  # fmt: skip
    one = _Pass(streams)
    expanded, collapsed = one.run(
        y=y, post=post.contiguous(), comb=comb.contiguous(), pre=pre.contiguous(), fn=fn
    )
    mix, normed = one.finish(
        base, scale, collapsed, norm,
        sinkhorn_iters=sinkhorn_iters, hc_eps=hc_eps, norm_eps=norm_eps,
    )  # fmt: skip
    return expanded, mix, normed
