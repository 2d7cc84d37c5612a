"""Queries on their way in and outputs on their way out, of the sparse attention on Hopper, by
eight warps. Only a row's last 64 elements turn: the others are copied, and nothing is computed with
them.
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
    q_row, head_stride, first_head, BLOCK: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr
):  # fmt: skip
    """64 elements [HEADS, 64] of the heads from `first_head` on, eight a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    column = 64 * BLOCK + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    at = q_row + head[:, None] * head_stride + column[None, :]
    return gl.load(at, mask=(head < H)[:, None], other=0.0)


@gluon.jit
def keep_queries(
    q_row, head_stride, first_head, position, inv_freq, query, turn, H: gl.constexpr
):  # fmt: skip
    """Of bfloat16 queries the heads from `first_head` on, turned, into `query` [HEADS, 512] in the
    order of a kept row (kernel_hopper_decode.py); cos and sin of every pair into `turn` [2, 32],
    see plugins/device/rotation.py."""
    HEADS: gl.constexpr = query.shape[0]
    x0 = _load_block(q_row, head_stride, first_head, 0, HEADS, H)
    x1 = _load_block(q_row, head_stride, first_head, 1, HEADS, H)
    x2 = _load_block(q_row, head_stride, first_head, 2, HEADS, H)
    x3 = _load_block(q_row, head_stride, first_head, 3, HEADS, H)
    x4 = _load_block(q_row, head_stride, first_head, 4, HEADS, H)
    x5 = _load_block(q_row, head_stride, first_head, 5, HEADS, H)
    x6 = _load_block(q_row, head_stride, first_head, 6, HEADS, H)
    x7 = _load_block(q_row, head_stride, first_head, 7, HEADS, H)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    frequency = gl.load(inv_freq + gl.arange(0, PAIRS, layout=LINE))
    turns = position.to(gl.float64) * frequency * 0.15915494309189535
    angle = ((turns - gl.floor(turns + 0.5)) * 6.283185307179586).to(gl.float32)
    turn.index(0).store(gl.cos(angle))
    turn.index(1).store(gl.sin(angle))
    gl.thread_barrier()
    even, odd = gl.split(x7.to(gl.float32).reshape([HEADS, PAIRS, 2]))
    OF_PAIR: gl.constexpr = gl.SliceLayout(0, even.type.layout)
    cos = turn.index(0).load(OF_PAIR)[None, :]
    sin = turn.index(1).load(OF_PAIR)[None, :]
    even, odd = even * cos - odd * sin, even * sin + odd * cos
    x7 = gl.join(even.to(gl.bfloat16), odd.to(gl.bfloat16)).reshape([HEADS, 64])
    x7 = gl.convert_layout(x7, x0.type.layout, assert_trivial=True)
    low = gl.join(gl.join(x0, x1), gl.join(x2, x3))
    high = gl.join(gl.join(x4, x5), gl.join(x6, x7))
    # Of an element's number: l & 1 and i of its word, 4, 2 and 1; of its block: 1, 2 and 4.
    x = gl.join(low, high).reshape([HEADS, 2, 4, 2, 2, 2, 2, 2, 2])
    query.store(x.permute([0, 2, 8, 7, 6, 1, 4, 5, 3]).reshape([HEADS, 512]))


@gluon.jit
def _xor(a, b):
    return a ^ b


@gluon.jit
def _turn_back(x, turn):
    """Float32 [HEADS, 4, 2, 8], the last 64 elements by kept columns."""
    HEADS: gl.constexpr = x.shape[0]
    x = x.reshape([HEADS, 4, 2, 2, 2, 2])
    ALL: gl.constexpr = x.type.layout
    # The other element of a pair is a lane away.
    bits = x.to(gl.int32, bitcast=True)
    other = bits ^ gl.reduce(bits, 4, _xor, keep_dims=True)
    other = gl.convert_layout(other.to(gl.float32, bitcast=True), ALL)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    OF_PAIR: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(0, ALL))
    cos = turn.index(0).load(LINE).reshape([2, 4, 2, 2]).permute([1, 0, 3, 2])
    sin = turn.index(1).load(LINE).reshape([2, 4, 2, 2]).permute([1, 0, 3, 2])
    cos = gl.convert_layout(cos, OF_PAIR).expand_dims(3).expand_dims(0)
    sin = gl.convert_layout(sin, OF_PAIR).expand_dims(3).expand_dims(0)
    HALVES: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(5, ALL)))
    odd = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, HALVES)))
    sign = (1.0 - 2.0 * odd.to(gl.float32))[None, None, None, None, :, None]
    return (x * cos + other * (sin * sign)).reshape([HEADS, 4, 2, 8])


@gluon.jit
def _store_words(x, o_row, BLOCK: gl.constexpr, H: gl.constexpr):
    """64 elements [HEADS, 4, 2, 8] by kept columns: words 4 l + i by i and l & 1. A warp has them
    by product columns; each lane gets whole words, without leaving its warp."""
    HEADS: gl.constexpr = x.shape[0]
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 16]],
        block_bases=[],
        shape=[HEADS, 64],
    )
    y = gl.convert_layout(x.to(gl.bfloat16).reshape([HEADS, 64]), WORDS)
    # The elements of a word in their order: registers change places.
    y = y.reshape([HEADS, 4, 2, 2, 2, 2]).permute([0, 1, 2, 5, 3, 4])
    y = gl.convert_layout(y.reshape([HEADS, 64]), WORDS).reshape([HEADS, 4, 2, 8])
    ALL: gl.constexpr = y.type.layout
    WORD: gl.constexpr = gl.SliceLayout(3, ALL)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORD)))
    i = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORD)))
    odd = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORD)))
    element = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, ALL))))
    word = 8 * BLOCK + 4 * odd[None, None, :] + i[None, :, None]
    at = (head[:, None, None] * 512 + 8 * word)[:, :, :, None] + element[None, None, None, :]
    gl.store(o_row + at, y, mask=(head < H)[:, None, None, None])


@gluon.jit
def store_output(x, turn, o_row, H: gl.constexpr):
    """Turn back and store a row, float32 [HEADS, 512] by kept columns, as bfloat16."""
    HEADS: gl.constexpr = x.shape[0]
    # A kept column is 128 i + 8 l and a place in a word; blocks of 64 elements are l / 2.
    x = x.reshape([HEADS, 4, 2, 2, 2, 2, 8]).permute([0, 1, 5, 6, 4, 3, 2])
    low, high = gl.split(x)
    a, b = gl.split(low)
    c, d = gl.split(high)
    x0, x1 = gl.split(a)
    x2, x3 = gl.split(b)
    x4, x5 = gl.split(c)
    x6, x7 = gl.split(d)
    _store_words(x0, o_row, 0, H)
    _store_words(x1, o_row, 1, H)
    _store_words(x2, o_row, 2, H)
    _store_words(x3, o_row, 3, H)
    _store_words(x4, o_row, 4, H)
    _store_words(x5, o_row, 5, H)
    _store_words(x6, o_row, 6, H)
    _store_words(_turn_back(x7, turn), o_row, 7, H)
