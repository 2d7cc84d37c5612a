"""Queries and their angles, of the sparse attention on Hopper, by a program of eight warps."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def angles(position, inv_freq, turn, WIDTH: gl.constexpr, ROTATED: gl.constexpr):
    """cos and sin of every pair, 1 and 0 for those that do not turn, into `turn` [2, WIDTH / 2];
    see plugins/device/rotation.py."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    FIRST: gl.constexpr = (WIDTH - ROTATED) // 2
    one = gl.full([WIDTH // 2], 1.0, gl.float32, layout=LINE)
    turn.index(0).store(one)
    turn.index(1).store(one * 0.0)
    frequency = gl.load(inv_freq + gl.arange(0, ROTATED // 2, layout=LINE))
    turns = position.to(gl.float64) * frequency * 0.15915494309189535
    angle = ((turns - gl.floor(turns + 0.5)) * 6.283185307179586).to(gl.float32)
    gl.thread_barrier()
    turn.index(0).slice(FIRST, ROTATED // 2).store(gl.cos(angle))
    turn.index(1).slice(FIRST, ROTATED // 2).store(gl.sin(angle))
    gl.thread_barrier()


@gluon.jit
def load_heads(q_row, head_stride, first, N: gl.constexpr, H: gl.constexpr, WIDTH: gl.constexpr):
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    head = first + gl.arange(0, N, layout=gl.SliceLayout(1, WHOLE))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WHOLE))
    at = q_row + head[:, None] * head_stride + column[None, :]
    return gl.load(at, mask=(head < H)[:, None], other=0.0)


@gluon.jit
def turn_pairs(x, turn, SIGN: gl.constexpr):
    """float32 [N, pairs, 2] turned by the angles in `turn`, backwards with SIGN −1, as bfloat16."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4, 2], [1, 32, 1], [8, 1, 1], [2, 1, 0])
    HALVES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    even, odd = gl.split(gl.convert_layout(x, PAIRS))
    even = gl.convert_layout(even, HALVES)
    odd = gl.convert_layout(odd, HALVES)
    cos = turn.index(0).load(gl.SliceLayout(0, HALVES))[None, :]
    sin = turn.index(1).load(gl.SliceLayout(0, HALVES))[None, :] * SIGN
    return gl.join(
        (even * cos - odd * sin).to(gl.bfloat16), (even * sin + odd * cos).to(gl.bfloat16)
    )


@gluon.jit
def keep_heads(query, x, turn, WIDTH: gl.constexpr):
    """Rotated queries [N, WIDTH] into shared memory, in the order of a kept row."""
    N: gl.constexpr = x.shape[0]
    x = turn_pairs(x.to(gl.float32).reshape([N, WIDTH // 2, 2]), turn, 1.0)
    x = x.reshape([N, WIDTH // 32, 4, 2, 2, 2]).permute([0, 2, 1, 4, 5, 3])
    query.store(x.reshape([N, WIDTH]))
