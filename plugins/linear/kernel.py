"""Linear layers over packed weights in the Triton language; docs/kernels/linear.md has their floor.

A program decodes a tile of the weight as it streams by and multiplies it with a few rows, so that
few rows cost what reading the stored bytes costs. Many rows are the library's work: then the weight
is decoded once. Here is what every format and width can do; kernel_planes.py does most of the work.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, Limits, limits, needs_reference, padded, unit_stride
from plugins.device.numbers import mxfp8_round
from plugins.device.overlap import after_previous, overlaps
from plugins.device.weights import NVFP4, DeviceWeight, device_weight, load_weight
from plugins.linear.kernel_codes import two_a_byte
from plugins.linear.kernel_few import few_products, takes_few
from plugins.linear.kernel_long import long_product, takes_long
from plugins.linear.kernel_one import one_products, takes_one
from plugins.linear.kernel_planes import product_planes, spread_rows
from plugins.linear.kernel_row import row_products, takes_row
from plugins.linear.kernel_split import split_product
from plugins.linear.weight import LinearWeight, PackedLinearWeight
from plugins.registry import OPERATORS

# From so many rows on a weight is decoded once and multiplied by the library.
DECODED_ROWS = 512
# Weights whose rows are a multiple of this are taken apart in planes.
PLANE_STEP = 256
# So many rows share one tile; more are cut into larger ones.
_FEW_ROWS = 64
# Programs that run at a time, two on each of an H200's multiprocessors. Where outputs give fewer,
# the inner dim is cut into parts of at least _LEAST columns.
_PROGRAMS = 264
_LEAST = 512
_TILE = 1024
_JOIN_TILE = 512


class Tiles(NamedTuple):
    """Of one program: outputs, rows, and inner columns a step."""

    outputs: int
    rows: int
    inner: int
    warps: int
    stages: int


def tiles(rows: int, device: Limits, *, wide: bool) -> Tiles:
    """`wide`: float32 inputs."""
    row_tile = min(padded(rows), 32 if wide else 128)
    outputs = 128 if row_tile == 128 else 64
    inner = 128
    step = inner * (outputs + row_tile * (4 if wide else 2))
    # The decoded tile may pass through shared memory too.
    room = device.shared_memory - inner * outputs * (4 if wide else 2)
    stages = max(2, min(4, room // step))
    return Tiles(outputs, row_tile, inner, 8 if outputs * row_tile >= 128 * 128 else 4, stages)


def plane_tiles(rows: int, outputs: int, device: Limits, *, stored: int) -> Tiles:
    """As `tiles`, where a weight is taken apart in planes; `outputs`: of all groups."""
    fp4 = two_a_byte(stored)
    # Wide tiles read the rows fewer times.
    wide = outputs > 64 * _PROGRAMS
    if rows > _FEW_ROWS:
        output_tile, row_tile, warps, inner = 128, 128, 4, 64
        stages = 3 if fp4 else 4
    elif rows > 16:
        output_tile, warps = (128, 8) if wide else (64, 4)
        row_tile, inner = _FEW_ROWS, 128 if wide or stored != NVFP4.value else 256
        stages = 3 if wide else 512 // inner
    elif fp4:
        # Two programs fill a multiprocessor where there are two for each: if there were room for
        # more, the next launch's programs would take it, and lie unevenly.
        output_tile, row_tile, inner, warps, stages = 64, 16, 256, 4, 3 if wide else 6
    else:
        # One takes a multiprocessor, which pays where there are two for each.
        wide = outputs > 120 * _PROGRAMS
        output_tile, warps, stages = (128, 8, 3) if wide else (64, 4, 4)
        row_tile, inner = 16, 256
    step = inner * (output_tile // (2 if fp4 else 1) + 2 * row_tile)
    room = device.shared_memory * 15 // 16  # the scales' words take little
    return Tiles(output_tile, row_tile, inner, warps, max(2, min(stages, room // step)))


def parts_of(rows: int, programs: int, inner: int) -> int:
    """Into how many parts the sums over `inner` columns are cut, for `programs` tiles of outputs.
    The same for all rows of a class: a row's bits and the launches' kernels depend on it."""
    usual = 2 if rows > _FEW_ROWS else 1  # tiles of rows
    return max(1, min(_PROGRAMS // (usual * programs), inner // _LEAST))


@triton.jit
def _round_rows(x, row_stride, rounded, K, TILE: tl.constexpr, FLOAT8: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    column = first + tl.arange(0, TILE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    there = column < K
    value = tl.load(x + row * row_stride + column, mask=there, other=0.0).to(tl.float32)
    value = mxfp8_round(value, FLOAT8)
    tl.store(rounded + row * K + column, value.to(rounded.dtype.element_ty), mask=there)


@triton.jit
def _decode(
    codes, scale, scale_stride, global_scale, STORED: tl.constexpr, WORDS: tl.constexpr,
    values, N, K, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    tile = load_weight(
        codes, scale, scale_stride, global_scale, STORED, WORDS,
        tl.minimum(row, N - 1), first, K, EVEN, COLUMNS, FLOAT8,
    )  # fmt: skip
    column = first + tl.arange(0, COLUMNS)
    at = row[:, None].to(tl.int64) * K + column[None, :]
    there = (row < N)[:, None] & (column < K)[None, :]
    tl.store(values + at, tile.to(values.dtype.element_ty), mask=there)


@triton.jit
def _product(
    x, row_stride,
    codes, scale, scale_stride, global_scale, STORED: tl.constexpr, WORDS: tl.constexpr,
    y, num_rows, N, K, chunk, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    FLOAT8: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """N outputs of every group from K inputs of its own, for ROWS rows; with SPLIT one part of the
    sum over `chunk` inputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    per_group = tl.cdiv(N, OUTPUTS)
    group, part = tl.program_id(1) // per_group, tl.program_id(2)
    output = tl.program_id(1) % per_group * OUTPUTS + tl.arange(0, OUTPUTS)
    # What lies beyond the rows and outputs repeats the last one, and is not stored.
    weight_row = group * N + tl.minimum(output, N - 1)
    inner = tl.arange(0, INNER)
    x_row = tl.minimum(row, num_rows - 1).to(tl.int64) * row_stride + group * K
    x_at = x + x_row[:, None] + inner[None, :]
    start, steps = 0, tl.cdiv(K, INNER)
    if SPLIT:
        start = part * chunk
        steps = tl.cdiv(tl.minimum(chunk, K - start), INNER)
    # Products of a loop that may be skipped are not started ahead of each other.
    tl.assume(steps > 0)
    products = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for i in range(steps):
        first = start + i * INNER
        weight = load_weight(
            codes, scale, scale_stride, global_scale, STORED, WORDS,
            weight_row, first, K, EVEN, INNER, FLOAT8,
        ).to(DOT)  # fmt: skip
        if EVEN:
            value = tl.load(x_at + first)
        else:
            value = tl.load(x_at + first, mask=(first + inner < K)[None, :], other=0.0)
        if WIDEN:
            weight, value = weight.to(tl.float32), value.to(tl.float32)
        products = tl.dot(weight, tl.trans(value), products, input_precision="tf32x3")
    at = row[:, None].to(tl.int64) * (GROUPS * N) + group * N + output[None, :]
    if SPLIT:
        at += part.to(tl.int64) * num_rows * (GROUPS * N)
    there = (row < num_rows)[:, None] & (output < N)[None, :]
    tl.store(y + at, tl.trans(products).to(y.dtype.element_ty), mask=there)


@triton.jit
def _join(parts, y, numel, PARTS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """The sum of the parts, first to last."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < numel
    after_previous(OVERLAP)
    total = tl.zeros((TILE,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * numel.to(tl.int64) + at, mask=there, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=there)


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] float32 or bfloat16, rounded to MXFP8 as the input of a quantised layer is."""
    rows, width = x.shape
    if width % 32:
        raise ValueError(
            f"expected rows that are a multiple of 32 long, got {width}; MXFP8 scales whole groups"
        )
    rounded = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        x = unit_stride(x)
        tile = min(_TILE, padded(width, 32))
        _round_rows[(rows, triton.cdiv(width, tile))](
            x, x.stride(0), rounded, width, tile, _takes_float8(x)
        )
    return rounded


def round_input(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """As the weight's own, in one launch where it rounds to MXFP8."""
    if weight.quantized_input and weight.input_scale is None:
        return round_rows(x)
    return weight.round_input(x)


def decode(weight: DeviceWeight, dtype: torch.dtype) -> torch.Tensor:
    """The values [N, K] in float32 or bfloat16, in new memory."""
    outputs, inner = weight.shape
    values = torch.empty(weight.shape, dtype=dtype, device=weight.codes.device)
    columns = min(256, padded(inner, 128))
    grid = (triton.cdiv(outputs, 32), triton.cdiv(inner, columns))
    _decode[grid](
        *weight.arguments(), values, outputs, inner, inner % columns == 0, 32, columns,
        _takes_float8(values),
    )  # fmt: skip
    return values


def product(x: torch.Tensor, kept: LinearWeight, weight: DeviceWeight, groups: int) -> torch.Tensor:
    """x [T, G·K], rounded as the weight asks for, times the transpose of the weight [G·N, K], group
    by group: [T, G·N]. `weight`: the form of `kept` on the device.

    For fewer rows than DECODED_ROWS. The sum over K may be cut into parts that another launch adds
    up, first to last.
    """
    if takes_long(x, kept, weight, groups):
        return long_product(x, weight, groups, rounds=kept.quantized_input)
    if takes_one(x, kept, weight, groups):
        return one_products(x, (weight,))[0]
    if takes_few(x, kept, weight, groups):
        return few_products(x, (weight,), groups)[0]
    rows, inner, outputs = x.shape[0], weight.shape[1], weight.shape[0] // groups
    wide = x.dtype == torch.float32
    by_planes = not wide and weight.words and inner % PLANE_STEP == 0
    device = limits(x.device)
    tile = tiles(rows, device, wide=wide)
    if by_planes:
        tile = plane_tiles(rows, weight.shape[0], device, stored=weight.stored)
    row_tiles, programs = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs) * groups
    steps = triton.cdiv(inner, tile.inner)
    chunk = triton.cdiv(steps, parts_of(rows, programs, inner)) * tile.inner
    parts = triton.cdiv(inner, chunk)
    y = x.new_empty((rows, groups * outputs))
    sums = y if parts == 1 else x.new_empty((parts, *y.shape), dtype=torch.float32)
    shape = (rows, outputs, inner, chunk, groups, parts > 1)
    grid = (row_tiles, programs, parts)
    overlap = overlaps(x.device)
    if by_planes:
        planes = _spread(x, kept, weight)
        product_planes[grid](
            planes, planes.stride(0), planes.stride(1), *weight.arguments()[:-1], sums, *shape,
            tile.outputs, tile.rows, tile.inner, INTERPRETED, overlap,
            num_warps=tile.warps, num_stages=tile.stages, launch_pdl=overlap,
        )  # fmt: skip
    else:
        x = unit_stride(round_input(x, kept))
        _product[grid](
            x, x.stride(0), *weight.arguments(), sums, *shape, inner % tile.inner == 0,
            tile.outputs, tile.rows, tile.inner, _takes_float8(x),
            tl.float32 if wide else tl.bfloat16, INTERPRETED,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if parts > 1:
        _join[(triton.cdiv(y.numel(), _JOIN_TILE),)](
            sums, y, y.numel(), parts, _JOIN_TILE, overlap, launch_pdl=overlap
        )
    return y


def _spread(x: torch.Tensor, kept: LinearWeight, weight: DeviceWeight) -> torch.Tensor:
    """x [T, G·K], rounded as the weight asks for, as planes [2, T, G·K / 2] of its columns."""
    rounds = kept.quantized_input and kept.input_scale is None
    x = unit_stride(x if rounds else kept.round_input(x))
    rows, width = x.shape
    overlap = overlaps(x.device)
    planes = x.new_empty((2, rows, width // 2))
    # Of few rows, more programs are on the way at a time.
    tile = min(_TILE if rows <= 16 else 2 * _TILE, padded(width, 128))
    spread_rows[(rows, triton.cdiv(width, tile))](
        x, x.stride(0), planes, planes.stride(0), width, tile, two_a_byte(weight.stored), rounds,
        _takes_float8(x), overlap, launch_pdl=overlap,
    )  # fmt: skip
    return planes


def _takes_float8(x: torch.Tensor) -> bool:
    return limits(x.device).float8 and not INTERPRETED


def packed_weight(weight: LinearWeight) -> DeviceWeight | None:
    """None for a weight that is kept as values, or that kernels do not decode."""
    return device_weight(weight.packed) if isinstance(weight, PackedLinearWeight) else None


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """As the reference, whose arguments and result these are.

    Products take bfloat16 operands for bfloat16 inputs and three TF32 products for float32 ones;
    sums are float32. With float64 or a gradient the reference runs.
    """
    packed = packed_weight(weight)
    value = weight.value if packed is None else None
    if needs_reference(x, value):
        reference: torch.Tensor = OPERATORS["linear"].reference(x, weight)
        return reference
    if packed is not None and 0 < x.shape[0] < DECODED_ROWS:
        return product(x, weight, packed, 1)
    value = decode(packed, x.dtype) if packed is not None else value
    assert value is not None
    x = round_input(x, weight)
    if takes_row(x, value):
        return row_products(x, (value,), x.dtype)
    if (x.dtype, value.dtype) == (torch.float32, torch.bfloat16):
        return split_product(x, value)
    return x @ value.T


def linear_pair(
    x: torch.Tensor, first: LinearWeight, second: LinearWeight
) -> tuple[torch.Tensor, torch.Tensor]:
    """linear(x, first) and linear(x, second), bit for bit; in one launch where rows are few."""
    a, b = packed_weight(first), packed_weight(second)
    if a is not None and b is not None and not needs_reference(x):
        alike = (a.stored, a.shape[1], a.scale_stride) == (b.stored, b.shape[1], b.scale_stride)
        # Of a long row either layer has a launch, whose bits are no other's.
        alike = alike and not (takes_long(x, first, a, 1) or takes_long(x, second, b, 1))
        if alike and takes_one(x, first, a) and takes_one(x, second, b):
            one, other = one_products(x, (a, b))
            return one, other
        if alike and takes_few(x, first, a) and takes_few(x, second, b):
            one, other = few_products(x, (a, b))
            return one, other
    return linear(x, first), linear(x, second)


def wide_linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """As the reference. bfloat16 rows and weights are multiplied as such, into float32 sums: the
    same exact products, and nothing is widened first."""
    if not _is_half(x, weight):
        return linear(x.to(torch.promote_types(x.dtype, torch.float32)), weight)
    value = weight.value
    if takes_row(x, value):
        return row_products(x, (value,), torch.float32)
    if INTERPRETED:
        return x.float() @ value.float().T
    return torch.mm(x, value.T, out_dtype=torch.float32)


def wide_linear_pair(x: torch.Tensor, first: LinearWeight, second: LinearWeight) -> torch.Tensor:
    """As the reference, with the bits of wide_linear; one launch where that takes one row."""
    if _is_half(x, first) and _is_half(x, second) and takes_row(x, first.value, second.value):
        return row_products(x, (first.value, second.value), torch.float32)
    return torch.cat([wide_linear(x, first), wide_linear(x, second)], dim=-1)


def _is_half(x: torch.Tensor, weight: LinearWeight) -> bool:
    """Whether bfloat16 values multiply bfloat16 rows that are not rounded first."""
    if isinstance(weight, PackedLinearWeight) or weight.quantized_input:
        return False
    return x.dtype == weight.value.dtype == torch.bfloat16 and not needs_reference(x, weight.value)
