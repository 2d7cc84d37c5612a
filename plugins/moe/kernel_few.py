"""Released FP4 experts of a few tokens, and a shared expert in E4M3 beside them, on compute
capability 9.0, in Gluon; docs/kernels/moe.md says why in this way.

Nearly all programs run at once, several on a multiprocessor, and each has most of its shared memory
under way. Their weights are asked for before the launch ahead has ended.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from plugins.device.launch import INTERPRETED, limits
from plugins.device.overlap_gluon import let_next_begin, wait
from plugins.device.weights import FP8_BLOCKS, MXFP8
from plugins.moe.device_weights import FLOAT8, DeviceExperts
from plugins.moe.kernel_few_parts import address, apart_of, copy_rows, copy_weights
from plugins.moe.kernel_few_shared import shared_tile
from plugins.moe.kernel_float8 import EIGHT_CODES
from plugins.moe.kernel_hopper_operand import groups, operand, sums, tables, words_layout
from plugins.moe.kernel_hopper_tile import largest_of, line, output_of, rows_of, store

# Tokens of a launch, at most.
FEW_ROWS = 16
WARPS = 4

# An operand is one register here, and so is 0x40404040: the compiler would move a constant to one
# again for every word.
_EIGHT_CODES = gl.constexpr(EIGHT_CODES.value.replace("$7", "$4").replace("0x40404040", "$5"))


@gluon.jit
def _decoded(words, low, high, forty):
    return gl.inline_asm_elementwise(
        _EIGHT_CODES, "=&r,=&r,r,r,r,r", [words, low, high, forty], dtype=(gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _product_256(codes, four, rows, at, top, forty, WARPS: gl.constexpr):
    """256 columns of weight rows [N] times those of `rows`, two buffers from `at` on."""
    N: gl.constexpr = top.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    SUMS: gl.constexpr = sums(ROWS, WARPS)
    ONE: gl.constexpr = words_layout(1, WARPS)
    SCALES: gl.constexpr = gl.SliceLayout(1, groups(WARPS))
    halves = gl.split(gl.permute(codes.reshape([N, 2, 16]), (0, 2, 1)))
    fours = gl.split(four)
    part = gl.zeros([N, ROWS], gl.float32, SUMS)
    # What the product under way reads: held until it ends, so that nothing is decoded over it.
    first = gl.zeros([N, 4], gl.int32, ONE)
    last = first
    for half in gl.static_range(2):
        low, high = tables(gl.convert_layout(fours[half], SCALES), top, WARPS)
        low, high = gl.convert_layout(low, ONE), gl.convert_layout(high, ONE)
        even, odd = gl.split(halves[half].reshape([N, 4, 2, 2]))
        word_0, word_2 = gl.split(even)
        word_1, word_3 = gl.split(odd)
        for i in gl.static_range(4):
            word = gl.convert_layout((word_0, word_1, word_2, word_3)[i], ONE)
            new_first, new_last = _decoded(word, low, high, forty)
            x = rows.index(at + half).slice(i * 32, 32, dim=1).permute((1, 0))
            weight = operand(new_first, new_last, SUMS, WARPS)
            product = warpgroup_mma(weight, x, part, is_async=True)
            part, _, _, first, last = warpgroup_mma_wait(
                1, deps=[product, first, last, new_first, new_last]
            )
    part, _, _ = warpgroup_mma_wait(0, deps=[part, first, last])
    return part


@gluon.jit
def _routed(
    tile, expert, start, count, x, powers, order, weights, table, exponents, result, limit,
    TOP_K: gl.constexpr, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr,
    N: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A tile of a chosen expert in steps of PARTS times 256 columns."""
    EACH: gl.constexpr = N // MATRICES
    STEPS: gl.constexpr = COLUMNS // (PARTS * 256)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CODES: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    PAIR: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    OF_BYTES: gl.constexpr = gl.SliceLayout(1, BYTES)
    WORD: gl.constexpr = gl.pointer_type(gl.uint32)
    codes = gl.allocate_shared_memory(gl.uint32, [STAGES * PARTS, N, 32], CODES)
    scales = gl.allocate_shared_memory(gl.uint32, [STAGES * PARTS, N, 2], FLAT)
    rows = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES * PARTS, ROWS, 128], SWIZZLED)

    FIRST: gl.constexpr = 0 if MATRICES == 2 else 6
    code = address(table, expert, FIRST, WORD)
    scale = address(table, expert, FIRST + 1, WORD)
    apart, scales_apart = 0, 0
    if MATRICES == 2:
        apart = apart_of(table, expert, 0) // 4
        scales_apart = apart_of(table, expert, 1) // 4
    first = tile * EACH
    place = gl.arange(0, N, layout=gl.SliceLayout(1, WORDS))
    row = gl.minimum(first + output_of(place, N, MATRICES, WARPS), OUTPUTS - 1)
    offset = (place // EACH).to(gl.int64) * gl.multiple_of(apart, 4) + row * (COLUMNS // 8)
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))
    code_at = code + (gl.expand_dims(offset, 1) + gl.expand_dims(column, 0))
    place = gl.arange(0, N, layout=gl.SliceLayout(1, PAIR))
    row = gl.minimum(first + output_of(place, N, MATRICES, WARPS), OUTPUTS - 1)
    offset = (place // EACH).to(gl.int64) * gl.multiple_of(scales_apart, 4) + row * (COLUMNS // 128)
    column = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIR))
    scale_at = scale + (gl.expand_dims(offset, 1) + gl.expand_dims(column, 0))
    for i in gl.static_range(STAGES - 1):
        if i < STEPS:
            copy_weights(codes, scales, i, i, code_at, scale_at, PARTS)
        async_copy.commit_group()
    top = largest_of(
        exponents, expert, tile, tile + 1, N, OUTPUTS, MATRICES, (OUTPUTS + EACH - 1) // EACH,
        gl.SliceLayout(1, groups(WARPS)), WARPS,
    ).to(gl.int32)  # fmt: skip
    wait()
    if MATRICES == 2:
        let_next_begin()
    row = rows_of(order, start, count, 0, ROWS, MATRICES, OF_BYTES)
    byte = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, BYTES)), 0)
    x_at = x + (gl.expand_dims(row // TOP_K * COLUMNS, 1) + byte)
    there = gl.expand_dims(gl.arange(0, ROWS, layout=OF_BYTES) < count, 1)
    for i in gl.static_range(STAGES - 1):
        if i < STEPS:
            copy_rows(rows, i, i, x_at, there, 2 * PARTS)
        async_copy.commit_group()
    row = rows_of(order, start, count, 0, ROWS, MATRICES, line(WARPS))
    power = gl.load(powers + row // TOP_K)
    weight = power
    if MATRICES == 2:
        weight = gl.load(weights + row).to(gl.float32)

    # More than the compiler knows to be constant.
    forty = gl.full([N, 4], 0x40404040, gl.int32, words_layout(1, WARPS)) + (count >> 30)
    total = gl.zeros([N, ROWS], gl.float32, sums(ROWS, WARPS))
    stage, next_stage = tile * 0, tile * 0 + (STAGES - 1)
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        ahead = step + STAGES - 1
        if ahead < STEPS:
            copy_weights(codes, scales, next_stage, ahead, code_at, scale_at, PARTS)
            copy_rows(rows, next_stage, ahead, x_at, there, 2 * PARTS)
        async_copy.commit_group()
        for nth in gl.static_range(PARTS):
            part = stage * PARTS + nth
            words = codes.index(part).load(words_layout(4, WARPS))
            four = scales.index(part).load(words_layout(2, WARPS))
            total += _product_256(words, four, rows, 2 * part, top, forty, WARPS)
        next_stage = stage
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    store(
        total, power, weight, 0, start, count, first, expert, exponents, result, limit,
        OUTPUTS, MATRICES, WARPS,
    )  # fmt: skip


@gluon.jit
def _known(segment):
    """Expert, first place and number of pairs: not out of a cache that may be older than these."""
    expert = gl.load(segment, cache_modifier=".cg")
    start = gl.load(segment + 1, cache_modifier=".cg")
    return expert, start, gl.load(segment + 2, cache_modifier=".cg")


@gluon.jit
def _nth_of_one(ids, nth, TOP_K: gl.constexpr):
    """What `route` will write of the only token's nth expert."""
    expert = nth * 0
    for i in gl.static_range(TOP_K):
        mine = gl.load(ids + i, cache_modifier=".cg").to(gl.int32)
        less = nth * 0
        for j in gl.static_range(TOP_K):
            other = gl.load(ids + j, cache_modifier=".cg").to(gl.int32)
            less += (other < mine).to(gl.int32)
        expert += gl.where(less == nth, mine, 0)
    return expert, nth, nth * 0 + 1


@gluon.jit(do_not_specialize=["num_rows", "num_pairs"])
def experts_few(
    x, powers, ids, segments, order, weights, table, exponents, shared_table, result, num_rows,
    num_pairs, limit,
    SHARED: gl.constexpr, SHARED_STORED: gl.constexpr, TOP_K: gl.constexpr, COLUMNS: gl.constexpr,
    OUTPUTS: gl.constexpr, MATRICES: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, SHARED_N: gl.constexpr, SHARED_STAGES: gl.constexpr,
):  # fmt: skip
    """As kernel_product.gate_up with MATRICES 2, and as `down` with 1 and TOP_K 1: N / MATRICES
    outputs for all tokens of an expert, ROWS at most.

    Grid [tiles of shared experts, then of chosen ones]. `route` lets this begin after its own wait,
    when ids are known, and this lets `round_rows` begin after its own, when `route` has ended:
    `down` finds the segments there before it waits.
    """
    WARPS: gl.constexpr = gl.num_warps()
    TILES: gl.constexpr = (OUTPUTS + N // MATRICES - 1) // (N // MATRICES)
    SHARED_TILES: gl.constexpr = (OUTPUTS + SHARED_N // MATRICES - 1) // (SHARED_N // MATRICES)
    if MATRICES == 1:
        let_next_begin()
    program = gl.program_id(0)
    if SHARED > 0:  # noqa: SIM102
        if program < SHARED * SHARED_TILES:
            expert = program // SHARED_TILES
            first_row = expert * 0 if MATRICES == 2 else num_pairs + expert * num_rows
            shared_tile(
                program % SHARED_TILES, expert, first_row, x, powers, num_rows, num_pairs,
                shared_table, result, limit,
                SHARED_STORED, COLUMNS, OUTPUTS, MATRICES, SHARED_N, ROWS, SHARED_STAGES, WARPS,
            )  # fmt: skip
    if program >= SHARED * SHARED_TILES:
        program -= SHARED * SHARED_TILES
        segment = segments + program // TILES * 3
        if MATRICES == 1:
            expert, start, count = _known(segment)
        elif num_pairs == TOP_K:
            expert, start, count = _nth_of_one(ids, program // TILES, TOP_K)
        else:
            wait()
            expert, start, count = _known(segment)
        if count > 0:
            _routed(
                program % TILES, expert, start, count, x, powers, order, weights, table, exponents,
                result, limit,
                TOP_K, COLUMNS, OUTPUTS, MATRICES, N, ROWS, PARTS, STAGES, WARPS,
            )  # fmt: skip


class FewTile(NamedTuple):
    """Weight rows of a program and stages, of chosen experts, whose steps are so many times 256
    columns, and of shared ones."""

    weights: int
    parts: int
    stages: int
    shared_weights: int
    shared_stages: int

    def constants(self) -> dict[str, int]:
        return {
            "N": self.weights, "PARTS": self.parts, "STAGES": self.stages,
            "SHARED_N": self.shared_weights, "SHARED_STAGES": self.shared_stages,
        }  # fmt: skip


# Both take as much shared memory.
TILE, LONG_STEPS = FewTile(64, 1, 4, 64, 5), FewTile(64, 2, 2, 64, 5)


def few_tile(columns: int) -> FewTile:
    """The tile of products over so many columns: long steps where they are whole."""
    return TILE if columns % 512 else LONG_STEPS


def row_tile(tokens: int) -> int:
    """Rows of a program for so many tokens."""
    return 8 if tokens <= 8 else FEW_ROWS


def takes_few(u: torch.Tensor, routed: DeviceExperts, shared: DeviceExperts) -> bool:
    """Whether experts_few multiplies rows u [T, D]: released FP4 experts of whole steps, and shared
    ones in E4M3."""
    if INTERPRETED or not limits(u.device).warp_groups or u.shape[0] > FEW_ROWS:
        return False
    known = all(
        one.stored in (FP8_BLOCKS.value, MXFP8.value) and one.words
        for one in (shared.gate_up, shared.down)
    )
    alike = shared.gate_up == shared.down and shared.quantized
    both = routed.gate_up.stored == routed.down.stored == FLOAT8
    whole = u.shape[1] % 256 == routed.inter % 256 == 0
    return both and whole and (shared.num_experts == 0 or (known and alike))


def few_products(
    x: tuple[torch.Tensor, torch.Tensor],
    ids: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    experts: tuple[DeviceExperts, DeviceExperts],
    result: torch.Tensor,
    limit: float,
    *,
    matrices: int,
) -> None:
    """Rows x, codes [R, W] and powers [R], times w1 and w3 (matrices 2) or w2 (1), to result
    [R, W']. places: segments and order that `route` writes; experts: chosen, shared."""
    (codes, powers), (segments, order), (routed, shared) = x, places, experts
    rows, pairs, outputs = ids.shape[0], ids.numel(), result.shape[1]
    tile = few_tile(codes.shape[1])
    chosen = segments.shape[0] * triton.cdiv(outputs * matrices, tile.weights)
    always = shared.num_experts * triton.cdiv(outputs * matrices, tile.shared_weights)
    experts_few[(always + chosen,)](
        codes, powers, ids, segments, order, weights, routed.table,
        routed.gate_up_exponents if matrices == 2 else routed.down_exponents, shared.table, result,
        rows, pairs, limit,
        SHARED=shared.num_experts, SHARED_STORED=shared.gate_up.stored,
        TOP_K=ids.shape[1] if matrices == 2 else 1, COLUMNS=codes.shape[1], OUTPUTS=outputs,
        MATRICES=matrices, ROWS=row_tile(rows), **tile.constants(),
        num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
