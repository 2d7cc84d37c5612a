"""Words of shared memory by their addresses, and what a warp's threads have in common, for kernels
in Gluon, which has no words for either.

Tensors are those of a layout in which every thread has elements of its own. What a thread writes,
another sees behind a barrier.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def words():
    """The address, in bytes, of 5376 words of a program's own; to be asked once in a kernel."""
    return gl.inline_asm_elementwise(
        "{ .shared .align 128 .b8 words[21504]; mov.u32 $0, words; }", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def put(at, word, there):
    """Words of 32 bits to addresses, where they are `there`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r,r", [at, word, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def get(at):
    """int32 words at addresses."""
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put_two(at, word, next_word, there):
    """Two words to addresses, multiples of 8, where they are `there`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0; mov.u32 $0, 0;"
        " @p st.shared.v2.b32 [$1], {$2, $3}; }",
        "=&r,r,r,r,r", [at, word, next_word, there.to(gl.int32)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def get_two(at):
    """Two int32 words from each address on, a multiple of 8."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [at], dtype=(gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def scalar(at, x):
    """What all threads have, as a scalar, by way of the word at an address of its own: a thread
    reads what it has written, or another the same."""
    put(at + 0 * x, x, x == x)
    return get(at)


@gluon.jit
def count(at):
    """Adds one to the word at each address."""
    gl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], 1; mov.u32 $0, 0;", "=r,r", [at], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def reserve(at, number):
    """Adds to the word at each address a number that is not 0, and returns what the word was
    before: ranges that no other thread has, in any order."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u32 $0, 0;"
        " @p atom.shared.add.u32 $0, [$1], $2; }",
        "=&r,r,r", [at, number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def warp_sum(x):
    return gl.inline_asm_elementwise(
        "redux.sync.add.s32 $0, $1, -1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def warp_max(x):
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, -1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def warp_min(x):
    return gl.inline_asm_elementwise(
        "redux.sync.min.s32 $0, $1, -1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def warp_count(x):
    """In how many lanes x is true."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lanes; setp.ne.s32 p, $1, 0;"
        " vote.sync.ballot.b32 lanes, p, -1; popc.b32 $0, lanes; }",
        "=r,r", [x.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def warp_scan(x):
    """The sum of a lane's x and those before it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.b32 $0, $1;"
        " shfl.sync.up.b32 t|p, $0, 1, 0, -1; @p add.s32 $0, $0, t;"
        " shfl.sync.up.b32 t|p, $0, 2, 0, -1; @p add.s32 $0, $0, t;"
        " shfl.sync.up.b32 t|p, $0, 4, 0, -1; @p add.s32 $0, $0, t;"
        " shfl.sync.up.b32 t|p, $0, 8, 0, -1; @p add.s32 $0, $0, t;"
        " shfl.sync.up.b32 t|p, $0, 16, 0, -1; @p add.s32 $0, $0, t; }",
        "=&r,r", [x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def of_lane(x, lane):
    """The x of a lane."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [x, lane], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def num_bits(x):
    """Of an unsigned number, 0 of 0."""
    return 32 - gl.inline_asm_elementwise(
        "clz.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )
