"""Queries on their way in and outputs on their way out, of the sparse attention on Hopper, by four
or eight warps. Only a row's last 64 elements turn: the others are copied, and nothing is computed
with them.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Elements that turn, and their pairs.
ROTATED = 64
PAIRS = gl.constexpr(32)


@gluon.jit
def _load_block(
    q_row, head_stride, first_head, BLOCK: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr,
    WARPS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """64 elements [HEADS, 64] of the heads from `first_head` on, eight a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4] if WHOLE else [4, 8], [WARPS, 1], [1, 0])
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    column = 64 * BLOCK + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    at = q_row + head[:, None] * head_stride + column[None, :]
    return gl.load(at, mask=(head < H)[:, None], other=0.0)


@gluon.jit
def load_queries(
    q_row, head_stride, first_head, HEADS: gl.constexpr, H: gl.constexpr, WARPS: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """The eight blocks of bfloat16 queries of the heads from `first_head` on."""
    return (
        _load_block(q_row, head_stride, first_head, 0, HEADS, H, WARPS, WHOLE),
        _load_block(q_row, head_stride, first_head, 1, HEADS, H, WARPS, WHOLE),
        _load_block(q_row, head_stride, first_head, 2, HEADS, H, WARPS, WHOLE),
        _load_block(q_row, head_stride, first_head, 3, HEADS, H, WARPS, WHOLE),
        _load_block(q_row, head_stride, first_head, 4, HEADS, H, WARPS, WHOLE),
        _load_block(q_row, head_stride, first_head, 5, HEADS, H, WARPS, WHOLE),
        _load_block(q_row, head_stride, first_head, 6, HEADS, H, WARPS, WHOLE),
        _load_block(q_row, head_stride, first_head, 7, HEADS, H, WARPS, WHOLE),
    )


@gluon.jit
def load_frequencies(inv_freq, WARPS: gl.constexpr):
    """Of every pair, one a lane."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.load(inv_freq + gl.arange(0, PAIRS, layout=LINE))


@gluon.jit
def keep_angles(position, frequency, turn):
    """cos and sin of every pair into `turn` [2, 32], see plugins/device/rotation.py."""
    turns = position.to(gl.float64) * frequency * 0.15915494309189535
    angle = ((turns - gl.floor(turns + 0.5)) * 6.283185307179586).to(gl.float32)
    turn.index(0).store(gl.cos(angle))
    turn.index(1).store(gl.sin(angle))
    gl.thread_barrier()


@gluon.jit
def keep_queries(blocks, turn, query, WHOLE: gl.constexpr):
    """Blocks of queries, the last of them turned, into `query` [HEADS, 512] in the order of a kept
    row (kernel_hopper_decode.py)."""
    HEADS: gl.constexpr = query.shape[0]
    even, odd = gl.split(blocks[7].to(gl.float32).reshape([HEADS, PAIRS, 2]))
    OF_PAIR: gl.constexpr = gl.SliceLayout(0, even.type.layout)
    cos = turn.index(0).load(OF_PAIR)[None, :]
    sin = turn.index(1).load(OF_PAIR)[None, :]
    even, odd = even * cos - odd * sin, even * sin + odd * cos
    last = gl.join(even.to(gl.bfloat16), odd.to(gl.bfloat16)).reshape([HEADS, 64])
    last = gl.convert_layout(last, blocks[0].type.layout, assert_trivial=True)
    low = gl.join(gl.join(blocks[0], blocks[1]), gl.join(blocks[2], blocks[3]))
    high = gl.join(gl.join(blocks[4], blocks[5]), gl.join(blocks[6], last))
    # Of an element's number in its block: l & 1, t, e and j; then l / 2, from its lowest bit on.
    x = gl.join(low, high).reshape([HEADS, 2, 4, 2, 2, 2, 2, 2, 2])
    x = x.permute([0, 4, 8, 5, 7, 6, 1, 2, 3] if WHOLE else [0, 2, 8, 7, 6, 1, 4, 5, 3])
    query.store(x.reshape([HEADS, 512]))


@gluon.jit
def _turn_back(x, turn):
    """A row's last 64 elements, float32 [HEADS, 64]."""
    even, odd = gl.split(x.reshape([x.shape[0], PAIRS, 2]))
    OF_PAIR: gl.constexpr = gl.SliceLayout(0, even.type.layout)
    cos = turn.index(0).load(OF_PAIR)[None, :]
    sin = turn.index(1).load(OF_PAIR)[None, :]
    turned = gl.join(even * cos + odd * sin, odd * cos - even * sin).reshape(x.shape)
    return gl.convert_layout(turned, x.type.layout, assert_trivial=True)


@gluon.jit
def _in_words(x):
    """[HEADS, 16, 2, 2] as a product leaves it, as [HEADS, 64] with the elements of a word in
    neighbouring registers: nothing leaves its thread."""
    HEADS: gl.constexpr = x.shape[0]
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[HEADS, 64],
    )
    return gl.convert_layout(x.reshape([HEADS, 64]), WORDS)


@gluon.jit
def _store_words(x, o_row, BLOCK: gl.constexpr, H: gl.constexpr):
    """64 bfloat16 elements [HEADS, 64] of a row."""
    head = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    element = 64 * BLOCK + gl.arange(0, 64, layout=gl.SliceLayout(0, x.type.layout))
    at = o_row + head[:, None] * 512 + element[None, :]
    gl.store(at, x, mask=(head < H)[:, None])


@gluon.jit
def turned_output(low, high, turn, HALF: gl.constexpr):
    """Half a row turned back, of whose kept columns [HEADS, 256] `low` and `high` are a half each:
    four blocks of 64 elements in bfloat16, from element 256 · HALF on."""
    HEADS: gl.constexpr = low.shape[0]
    # Of a kept column: j % 2, l / 4 % 2, l / 2 % 2, and l % 2, t and e; then j / 2.
    x = gl.join(low, high).reshape([HEADS, 2, 2, 2, 16, 2]).permute([0, 4, 5, 1, 3, 2])
    low, high = gl.split(x)
    x0, x1 = gl.split(low)
    x2, x3 = gl.split(high)
    last = _in_words(x3)
    if HALF == 1:
        last = _turn_back(last, turn)
    return (
        _in_words(x0).to(gl.bfloat16),
        _in_words(x1).to(gl.bfloat16),
        _in_words(x2).to(gl.bfloat16),
        last.to(gl.bfloat16),
    )


@gluon.jit
def store_output(blocks, o_row, HALF: gl.constexpr, H: gl.constexpr):
    """What `turned_output` made."""
    _store_words(blocks[0], o_row, 4 * HALF, H)
    _store_words(blocks[1], o_row, 4 * HALF + 1, H)
    _store_words(blocks[2], o_row, 4 * HALF + 2, H)
    _store_words(blocks[3], o_row, 4 * HALF + 3, H)
