"""Products of a few tokens' experts on compute capability 9.0, in Gluon; docs/kernels/moe.md says
why in this way.

Nearly all programs run at once, several on a multiprocessor, and each has most of its shared memory
under way. Their weights are asked for before the launch ahead has ended. How a tile is made depends
on how experts are stored: kernel_few_fp4.py, kernel_few_nvfp4.py, kernel_few_float8.py.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from plugins.device.launch import INTERPRETED, limits
from plugins.device.overlap_gluon import let_next_begin, wait
from plugins.device.weights import FP8_BLOCKS, MXFP8, NVFP4
from plugins.moe.device_weights import FLOAT8, DeviceExperts
from plugins.moe.kernel_few_float8 import float8_tile
from plugins.moe.kernel_few_fp4 import fp4_tile
from plugins.moe.kernel_few_nvfp4 import nvfp4_tile
from plugins.moe.kernel_shared import stands_apart

# Rows of an expert on average, at most.
FEW_PAIRS = 32
WARPS = 4
_FLOAT8, _NVFP4 = gl.constexpr(FLOAT8), gl.constexpr(NVFP4.value)


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


@gluon.jit
def _tile(
    tile, expert, start, count, from_row, x, halves, powers, order, weights, table, exponents,
    result, limit,
    STORED: gl.constexpr, CHOSEN: gl.constexpr, TOP_K: gl.constexpr, COLUMNS: gl.constexpr,
    OUTPUTS: gl.constexpr, MATRICES: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A tile for rows from_row on of an expert's, which lie at `start`."""
    if STORED == _FLOAT8:
        fp4_tile(
            tile, expert, start, count, from_row, x, powers, order, weights, table, exponents,
            result, limit,
            TOP_K, COLUMNS, OUTPUTS, MATRICES, N, ROWS, PARTS, STAGES, WARPS,
        )  # fmt: skip
    elif STORED == _NVFP4:
        nvfp4_tile(
            tile, expert, start, count, from_row, halves, powers, order, weights, table, result,
            limit,
            CHOSEN, TOP_K, COLUMNS, OUTPUTS, MATRICES, N, ROWS, PARTS, STAGES, WARPS,
        )  # fmt: skip
    else:
        float8_tile(
            tile, expert, start, count, from_row, x, powers, order, weights, table, result, limit,
            STORED, CHOSEN, TOP_K, COLUMNS, OUTPUTS, MATRICES, N, ROWS, PARTS, STAGES, WARPS,
        )  # fmt: skip


@gluon.jit
def _tiles(
    tile, expert, start, count, x, halves, powers, order, weights, table, exponents, result, limit,
    STORED: gl.constexpr, CHOSEN: gl.constexpr, TOP_K: gl.constexpr, COLUMNS: gl.constexpr,
    OUTPUTS: gl.constexpr, MATRICES: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, MANY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A tile for all rows of an expert, more than ROWS of them where MANY."""
    if MANY:
        for block in range((count + ROWS - 1) // ROWS):
            # Nothing is copied over what another warp still reads.
            gl.thread_barrier()
            _tile(
                tile, expert, start, count, block * ROWS, x, halves, powers, order, weights, table,
                exponents, result, limit,
                STORED, CHOSEN, TOP_K, COLUMNS, OUTPUTS, MATRICES, N, ROWS, PARTS, STAGES, WARPS,
            )  # fmt: skip
    else:
        _tile(
            tile, expert, start, count, 0, x, halves, powers, order, weights, table, exponents,
            result, limit,
            STORED, CHOSEN, TOP_K, COLUMNS, OUTPUTS, MATRICES, N, ROWS, PARTS, STAGES, WARPS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "num_pairs"])
def experts_few(
    x, halves, powers, ids, segments, order, weights, table, exponents, shared_table, result,
    num_rows, num_pairs, limit,
    STORED: gl.constexpr, SHARED: gl.constexpr, SHARED_STORED: gl.constexpr, TOP_K: gl.constexpr,
    COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, MATRICES: gl.constexpr, ROWS: gl.constexpr,
    MANY: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    SHARED_N: gl.constexpr, SHARED_PARTS: gl.constexpr, SHARED_STAGES: gl.constexpr,
):  # fmt: skip
    """As kernel_product.gate_up with MATRICES 2, and as `down` with 1 and TOP_K 1: N / MATRICES
    outputs for all tokens of an expert, ROWS at a time.

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
            _tiles(
                program % SHARED_TILES, expert, num_pairs + expert * num_rows, num_rows, x, halves,
                powers, order, weights, shared_table, exponents, result, limit,
                SHARED_STORED, False, 1, COLUMNS, OUTPUTS, MATRICES, SHARED_N, ROWS, SHARED_PARTS,
                SHARED_STAGES, MANY, WARPS,
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
            _tiles(
                program % TILES, expert, start, count, x, halves, powers, order, weights, table,
                exponents, result, limit,
                STORED, True, TOP_K, COLUMNS, OUTPUTS, MATRICES, N, ROWS, PARTS, STAGES, MANY,
                WARPS,
            )  # fmt: skip


class FewTile(NamedTuple):
    """Weight rows of a program, parts of a step and stages. A part is 256 columns, of E4M3 128."""

    weights: int
    parts: int
    stages: int


def few_tile(stored: int, columns: int, rows: int, *, shared: bool = False) -> FewTile:
    """The tile of products over so many columns by programs of so many rows. A shared expert's
    takes no more shared memory than a chosen one's in FP4 or NVFP4, or little more."""
    if stored == NVFP4.value and rows > 8:
        return FewTile(64, 1, 3 if rows <= 16 else 2)
    if stored in (FLOAT8, NVFP4.value):
        return FewTile(64, 1, 4) if columns % 512 else FewTile(64, 2, 2)
    if rows > 16:
        return FewTile(64, 1, 4)
    return FewTile(64, 1, 5) if shared else FewTile(64, 2, 3)


def row_tile(tokens: int, pairs: int) -> int:
    """Rows of a program for so many tokens and pairs of an expert on average: half as many again
    for most experts, because a second pass over the weights costs more than empty rows."""
    if tokens <= 8:
        return 8
    return 16 if pairs <= 12 else 32


def few_constants(
    tokens: int, pairs: int, columns: int, stored: int, shared_stored: int, num_shared: int
) -> dict[str, int | bool]:
    """Compile-time arguments of experts_few for so many tokens and pairs of an expert on average,
    by how experts are stored."""
    rows = row_tile(tokens, pairs)
    chosen = few_tile(stored, columns, rows)
    shared = few_tile(shared_stored, columns, rows, shared=True)
    return {
        "STORED": stored, "SHARED": num_shared, "SHARED_STORED": shared_stored, "COLUMNS": columns,
        "ROWS": rows, "MANY": tokens > rows, "N": chosen.weights, "PARTS": chosen.parts,
        "STAGES": chosen.stages, "SHARED_N": shared.weights, "SHARED_PARTS": shared.parts,
        "SHARED_STAGES": shared.stages,
    }  # fmt: skip


def takes_few(u: torch.Tensor, pairs: int, routed: DeviceExperts, shared: DeviceExperts) -> bool:
    """Whether experts_few multiplies rows u [T, D] with so many pairs of an expert on average:
    packed experts of whole steps, and shared ones in the same launches."""
    if INTERPRETED or not limits(u.device).warp_groups or pairs > FEW_PAIRS or stands_apart(u):
        return False
    whole = u.dtype == torch.bfloat16 and u.shape[1] % 256 == routed.inter % 256 == 0
    known = shared.num_experts == 0 or _known_format(shared)
    return whole and known and _known_format(routed, FLOAT8)


def _known_format(experts: DeviceExperts, *more: int) -> bool:
    """Whether all matrices are stored in one way that a tile is made of, or in one of `more`."""
    one = experts.gate_up
    known = one.stored in (FP8_BLOCKS.value, MXFP8.value, NVFP4.value, *more) and one.words
    return known and one == experts.down and experts.quantized


def few_products(
    x: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ids: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    experts: tuple[DeviceExperts, DeviceExperts],
    result: torch.Tensor,
    limit: float,
    *,
    matrices: int,
) -> None:
    """Rows x, codes and float16 [R, W] and powers [R], times w1 and w3 (matrices 2) or w2 (1),
    to result [R, W']. Formats that no expert has may be stand-ins. places: segments and order that
    `route` writes; experts: chosen, shared."""
    (codes, halves, powers), (segments, order), (routed, shared) = x, places, experts
    rows, pairs, outputs = ids.shape[0], ids.numel(), result.shape[1]
    constants = few_constants(
        rows, triton.cdiv(pairs, segments.shape[0]), codes.shape[1], routed.gate_up.stored,
        shared.gate_up.stored, shared.num_experts,
    )  # fmt: skip
    chosen = segments.shape[0] * triton.cdiv(outputs * matrices, constants["N"])
    always = shared.num_experts * triton.cdiv(outputs * matrices, constants["SHARED_N"])
    experts_few[(always + chosen,)](
        codes, halves, powers, ids, segments, order, weights, routed.table,
        routed.gate_up_exponents if matrices == 2 else routed.down_exponents, shared.table, result,
        rows, pairs, limit,
        TOP_K=ids.shape[1] if matrices == 2 else 1, OUTPUTS=outputs, MATRICES=matrices,
        **constants, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
