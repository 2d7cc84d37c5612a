"""Sparse attention of many rows on Hopper in Gluon; docs/kernels/mega_attention.md has its layout.

Of a block of sixteen warps, two warp groups multiply in turn: each has the scores of every other
tile of keys and half the columns of the sum, so that one exponentiates while the other multiplies.
Eight warps decode packed rows for both.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from plugins.mega_attention.kernel_hopper_ahead import decode_rows
from plugins.mega_attention.kernel_hopper_queries import (
    PAIRS,
    keep_angles,
    keep_queries,
    load_frequencies,
    load_queries,
    store_output,
    turned_output,
)

_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _keep_queries(
    blocks, position, frequency, query, turn, free, queried, n, ME: gl.constexpr
):  # fmt: skip
    """The queries of this program's n-th row: either warp group has half the heads, and waits for
    the other one's, as soon as neither multiplies the last row's."""
    HALF: gl.constexpr = query.shape[0] // 2
    keep_angles(position, frequency, turn)
    mbarrier.wait(free, (n & 1) ^ 1)
    keep_queries(blocks, turn, query.slice(HALF * ME, HALF), True)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(queried, count=1)
    mbarrier.wait(queried, n & 1)


@gluon.jit
def _pass_on(p, peak, peaks, sums, ready):
    """With a tile's probabilities, which are stored: the new maximum and their share of the
    denominator, for both warp groups."""
    peaks.store(peak)
    of_tile = gl.sum(p, axis=1)
    sums.store(of_tile)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready, count=1)
    return of_tile


@gluon.jit
def _add_values(probabilities, values, shrink, low, high, ME: gl.constexpr):
    """`low` and `high`, shrunk, and on their way a tile's values for the columns of this group."""
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, low.type.layout))[:, None]
    low, high = low * shrink, high * shrink
    low = warpgroup_mma(probabilities, values.slice(128 * ME, 128, dim=1), low, is_async=True)
    high = warpgroup_mma(
        probabilities, values.slice(256 + 128 * ME, 128, dim=1), high, is_async=True
    )
    return low, high


@gluon.jit
def _give_back(low, high, empty):
    """A stage, once its values are added."""
    low, high = warpgroup_mma_wait(0, deps=[low, high])
    gl.thread_barrier()
    mbarrier.arrive(empty, count=1)
    return low, high


@gluon.jit
def _multiply(
    q, row_stride, head_stride, positions, inv_freq, sink, o, scale,
    queries, keys, bias, probabilities, peaks, sums, turn, full, empty, ready, free, queried,
    window_keys, main_keys, num_rows,
    ME: gl.constexpr, H: gl.constexpr, WIDTH: gl.constexpr, HEADS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Warp group ME: of every pair of tiles the scores of the one in stage ME, and of all tiles the
    columns [HEADS, 128] of the sum from 128 · ME and from 256 + 128 · ME on."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_KEYS: gl.constexpr = gl.SliceLayout(0, SCORES)
    HALF: gl.constexpr = HEADS // 2
    head = gl.arange(0, HEADS, layout=OF_SCORES)
    pairs = (gl.cdiv(window_keys, TILE) + gl.cdiv(main_keys, TILE) + 1) // 2
    done = 0
    position = gl.load(positions + gl.program_id(0))
    frequency = load_frequencies(inv_freq, 4)
    row = gl.program_id(0).to(gl.int64)
    for item in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        n = item // gl.num_programs(0)
        logit = gl.load(sink + head, mask=head < H, other=0.0).to(gl.float32) * _LOG2_E
        blocks = load_queries(q + row * row_stride, head_stride, HALF * ME, HALF, H, 4, True)
        _keep_queries(
            blocks, position, frequency, queries.index(n >> 24), turn, free, queried, n, ME
        )
        following = gl.minimum(item + gl.num_programs(0), num_rows - 1)
        # Long before it is asked for.
        position = gl.load(positions + following)
        # The reference's bound: keeps the maximum finite without keys, or with a +inf sink.
        peak = gl.minimum(gl.maximum(logit, -1e30), 1e30)
        total = gl.zeros([HEADS], gl.float32, layout=OF_SCORES)
        none = gl.zeros([HEADS, TILE], gl.float32, layout=SCORES)
        low = gl.zeros([HEADS, 128], gl.float32, layout=SUM)
        high = gl.zeros([HEADS, 128], gl.float32, layout=SUM)
        end = done + pairs
        if pairs > 0:
            mbarrier.wait(full.index(ME), done & 1)
            # In place of a fence by those who decoded it.
            fence_async_shared()
            tile = keys.index((done >> 24) + ME).permute((1, 0))
            scores = warpgroup_mma(queries.index(done >> 24), tile, none, use_acc=False)
            for at in range(done, end):
                # Zero. If the compiler knew, it would keep the addresses of every operand of every
                # product in registers, and spill them.
                zero = at >> 24
                first, second = keys.index(zero), keys.index(zero + 1)
                p0, p1 = probabilities.index(zero), probabilities.index(zero + 1)
                scores = scores * scale + bias.index(zero + ME).load(OF_KEYS)[None, :]
                own = gl.max(scores, axis=1)
                if ME == 0:
                    higher = gl.maximum(peak, own)
                    shrink = gl.exp2(peak - higher)
                    p = gl.exp2(scores - higher[:, None])
                    p0.store(p.to(gl.bfloat16))
                    of_tile = _pass_on(
                        p, higher, peaks.index(zero), sums.index(zero), ready.index(zero)
                    )
                    total = total * shrink + of_tile
                    low, high = _add_values(p0, first, shrink, low, high, ME)
                    low, high = _give_back(low, high, empty.index(zero))
                    mbarrier.wait(ready.index(zero + 1), at & 1)
                    peak, higher = higher, peaks.index(zero + 1).load(OF_SCORES)
                    shrink = gl.exp2(peak - higher)
                    total = total * shrink + sums.index(zero + 1).load(OF_SCORES)
                else:
                    mbarrier.wait(ready.index(zero), at & 1)
                    higher = peaks.index(zero).load(OF_SCORES)
                    shrink = gl.exp2(peak - higher)
                    total = total * shrink + sums.index(zero).load(OF_SCORES)
                    low, high = _add_values(p0, first, shrink, low, high, ME)
                    peak, higher = higher, gl.maximum(higher, own)
                    shrink = gl.exp2(peak - higher)
                    p = gl.exp2(scores - higher[:, None])
                    p1.store(p.to(gl.bfloat16))
                    low, high = _give_back(low, high, empty.index(zero))
                    of_tile = _pass_on(
                        p, higher, peaks.index(zero + 1), sums.index(zero + 1),
                        ready.index(zero + 1),
                    )  # fmt: skip
                    total = total * shrink + of_tile
                peak = higher
                low, high = _add_values(p1, second, shrink, low, high, ME)
                low, high = _give_back(low, high, empty.index(zero + 1))
                if at + 1 < end:
                    mbarrier.wait(full.index(zero + ME), (at + 1) & 1)
                    fence_async_shared()
                    tile = keys.index(zero + ME).permute((1, 0))
                    scores = warpgroup_mma(queries.index(zero), tile, none, use_acc=False)
        mbarrier.arrive(free, count=1)
        done = end
        total += gl.exp2(logit - peak)
        inverse = 256.0 / gl.where(total > 0, total, 1.0)
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, SUM))[:, None]
        output = turned_output(low * inverse, high * inverse, turn, ME)
        store_output(output, o + row * H * WIDTH, ME, H)
        row = following.to(gl.int64)


@gluon.jit(do_not_specialize=["window_keys", "main_keys", "num_rows"])
def attention_whole(
    q, row_stride, head_stride, positions, inv_freq, sink, o, scale,
    window, window_pages, WINDOW_ROWS: gl.constexpr, WINDOW_ROW: gl.constexpr,
    main, main_pages, MAIN_ROWS: gl.constexpr, MAIN_ROW: gl.constexpr,
    window_slots, window_stride, window_keys, main_slots, main_stride, main_keys, num_rows,
    H: gl.constexpr, WIDTH: gl.constexpr, HEADS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Programs take rows in turn."""
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CODES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, WIDTH], ROWS)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, WIDTH], ROWS)
    probabilities = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, TILE], ROWS)
    buffer = gl.allocate_shared_memory(gl.uint32, [TILE, WIDTH // 8], CODES)
    bias = gl.allocate_shared_memory(gl.float32, [2, TILE], FLAT)
    peaks = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    turn0 = gl.allocate_shared_memory(gl.float32, [2, PAIRS], FLAT)
    turn1 = gl.allocate_shared_memory(gl.float32, [2, PAIRS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    queried = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
        mbarrier.init(ready.index(stage), count=1)
    mbarrier.init(free, count=2)
    mbarrier.init(queried, count=2)
    scale *= 256.0 * _LOG2_E
    gl.warp_specialize(
        [
            (_multiply, (
                q, row_stride, head_stride, positions, inv_freq, sink, o, scale,
                queries, keys, bias, probabilities, peaks, sums, turn0, full, empty, ready, free,
                queried, window_keys, main_keys, num_rows, 0, H, WIDTH, HEADS, TILE,
            )),
            (_multiply, (
                q, row_stride, head_stride, positions, inv_freq, sink, o, scale,
                queries, keys, bias, probabilities, peaks, sums, turn1, full, empty, ready, free,
                queried, window_keys, main_keys, num_rows, 1, H, WIDTH, HEADS, TILE,
            )),
            (decode_rows, (
                q, row_stride, head_stride, keys, bias, buffer, full, empty,
                window, window_pages, WINDOW_ROWS, WINDOW_ROW,
                main, main_pages, MAIN_ROWS, MAIN_ROW,
                window_slots.to(gl.pointer_type(gl.int32), bitcast=True), window_stride,
                window_keys, main_slots.to(gl.pointer_type(gl.int32), bitcast=True), main_stride,
                main_keys, num_rows, H, WIDTH, TILE, 8,
            )),
        ],
        [4, 8], [192, 64],
    )  # fmt: skip
