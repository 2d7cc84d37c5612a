"""A tile of FP4 keys as the left operand of E4M3 products; docs/kernels/indexer.md says why.

A thread of that operand holds, of one row and 32 columns, columns 4·j to 4·j + 3 and 16 + 4·j to
16 + 4·j + 3. The order of columns is free: queries come in the same one. So thread j of a row loads
group j of 32 values, which has one scale, and its four words become the thread's columns of the
four products: nothing moves between threads. What belongs to a tile has the shape
[4, 8, WARPS, 2, RUNS]: the operand's threads in their order, then its rows in one thread.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

GROUPS = 4  # of 32 values; the kernels are written out for them
WIDTH = 32 * GROUPS
# Groups whose scale is 2^−12 of their row's largest, or less, are taken as zeros.
_REACH = tl.constexpr(12)
# Eight E2M1 codes of a word by a table of the E4M3 codes of their magnitudes: $3 has the first
# four, $4 the last four. The fourth bit of a selector must be 0: $5 masks signs, or everything.
LOOK_UP = tl.constexpr("""
{
.reg .b32 first, last, odd, signs;
and.b32 first, $2, $5;
prmt.b32 $0, $3, $4, first;
mul.hi.u32 last, first, 65536;
prmt.b32 $1, $3, $4, last;
shl.b32 odd, $2, 4;
prmt.b32 signs, odd, $2, 0x5140;
lop3.b32 $0, $0, signs, 0x80808080, 0xF8;
prmt.b32 signs, odd, $2, 0x7362;
lop3.b32 $1, $1, signs, 0x80808080, 0xF8;
}
""")


@triton.jit
def places(TILE: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """int32 [4, 8, WARPS, ROWS, RUNS]: the row of a tile that each element belongs to."""
    RUNS: tl.constexpr = TILE // (16 * WARPS)
    # Written so that the compiler does not see neighbours: it would give one thread several.
    row = ((tl.arange(0, 8) * 9) & 7)[None, :, None, None, None]
    row = row + (tl.arange(0, WARPS) * 16)[None, None, :, None, None]
    row = row + (tl.arange(0, ROWS) * 8)[None, None, None, :, None]
    row = row + (tl.arange(0, RUNS) * (16 * WARPS))[None, None, None, None, :]
    return tl.broadcast_to(row, (4, 8, WARPS, ROWS, RUNS))


@triton.jit
def quarter():
    """int32 [4, 1, 1, 1, 1]: which of a row's four threads."""
    return ((tl.arange(0, 4) * 5) & 3)[:, None, None, None, None]


@triton.jit
def slots_of(pages, entry, read, PER_PAGE: tl.constexpr):
    """int32 slots of the entries of a request's `pages` where `read`, −1 where there is none."""
    # Of int64 the lower half: slots fit, and −1 is −1.
    halves = pages.to(tl.pointer_type(tl.int32), bitcast=True)
    slot = tl.load(halves + 2 * (entry // PER_PAGE), mask=read, other=-1)
    if PER_PAGE > 1:
        slot = tl.where(slot >= 0, slot + entry % PER_PAGE, -1)
    return slot


@triton.jit
def column_slots(
    pages, start, visible, TILE: tl.constexpr, WARPS: tl.constexpr, PER_PAGE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """int32 [4, 8, WARPS, 2, RUNS] slots of a tile's entries, −1 where there is none. WHOLE: a tile
    lies in one page, and that page's first slot is enough; of a tile that nobody sees, another's.

    `pages` are those of one request."""
    if WHOLE:
        halves = pages.to(tl.pointer_type(tl.int32), bitcast=True)
        # No mask: it would cost each of the tile's loads an instruction or two.
        slot = tl.load(halves + 2 * (tl.minimum(start, tl.maximum(visible, 1) - 1) // PER_PAGE))
    else:
        entry = start + places(TILE, WARPS, 2)
        slot = slots_of(pages, entry, entry < visible, PER_PAGE)
    return slot


@triton.jit
def load_keys(
    data, slots, start, page_stride, TILE: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr,
    ROW: tl.constexpr, PER_PAGE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Whether the rows at `slots` of column_slots are there; the exponents of their groups, uint8,
    and the four words of each; all [4, 8, WARPS, 2, RUNS], undefined at −1."""
    there = slots >= 0
    if WHOLE:
        # Where there is no page, the pool's first one is read for nothing.
        slot = tl.maximum(slots, 0)
        page = data + (slot // ROWS).to(tl.int64) * page_stride
        if ROWS > PER_PAGE:
            page += (slot % ROWS) * ROW
        if PER_PAGE > TILE:
            page += (start % PER_PAGE) * ROW
        # Added one after the other: what differs between a thread's rows is then part of the loads.
        row = page + places(16 * WARPS, WARPS, 1) * ROW
        further = (tl.arange(0, 2) * 8)[None, None, None, :, None]
        further = (
            further + (tl.arange(0, TILE // (16 * WARPS)) * (16 * WARPS))[None, None, None, None, :]
        )
        further *= ROW
        read = None
    else:
        slot = slots.to(tl.uint32)
        row = data + (slot // ROWS).to(tl.int64) * page_stride + (slot % ROWS) * ROW
        further = 0
        read = there
    exponent = tl.load((row + 64 + quarter()) + further, mask=read)
    words = (row + 16 * quarter()).to(tl.pointer_type(tl.int32), bitcast=True) + further // 4
    return (
        there, exponent, tl.load(words, mask=read), tl.load(words + 1, mask=read),
        tl.load(words + 2, mask=read), tl.load(words + 3, mask=read),
    )  # fmt: skip


@triton.jit
def _code(nibble, low, high, kept):
    """What LOOK_UP does, of one code."""
    magnitude = nibble & 7 & kept
    table = tl.where(magnitude < 4, low, high)
    code = (table >> (8 * (magnitude & 3))) & 0x7F
    return (code | ((nibble & 8) << 4)).to(tl.uint8)


@triton.jit
def _bytes(word):
    """uint8 [..., 4] of int32, lowest first."""
    even = tl.join(word.to(tl.uint8), (word >> 16).to(tl.uint8))
    odd = tl.join((word >> 8).to(tl.uint8), (word >> 24).to(tl.uint8))
    s: tl.constexpr = word.shape
    return tl.join(even, odd).reshape(s[0], s[1], s[2], s[3], s[4], 4)


@triton.jit
def _codes(word, low, high, kept, WIDEN: tl.constexpr):
    """E4M3 codes uint8 [..., 4] of the first and of the last four values of words."""
    if WIDEN:
        shift = (4 * tl.arange(0, 4))[None, None, None, None, None, :]
        nibbles = word[:, :, :, :, :, None] >> shift
        low, high = low[:, :, :, :, :, None], high[:, :, :, :, :, None]
        kept = kept[:, :, :, :, :, None]
        first = _code(nibbles, low, high, kept)
        last = _code(nibbles >> 16, low, high, kept)
    else:
        first, last = tl.inline_asm_elementwise(
            LOOK_UP, "=&r,=&r,r,r,r,r", [word, low, high, kept],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        first, last = _bytes(first), _bytes(last)
    return first, last


@triton.jit
def key_codes(exponent, w0, w1, w2, w3, TILE: tl.constexpr, WIDEN: tl.constexpr):
    """E4M3 codes uint8 [TILE, 128] of keys, 2^6 of what they are in units of their row's largest
    scale, and that scale's exponent, int32 [1, 8, WARPS, 2, RUNS]."""
    exponent = exponent.to(tl.int32)
    largest = tl.max(exponent, axis=0, keep_dims=True)
    below = largest - exponent
    # 0, 0.5, 1, 1.5 and 2, 3, 4, 6; a power of two is 8 in each code.
    low = 0x6C686000 - below * 0x08080800
    high = 0x7C787470 - below * 0x08080808
    kept = tl.where(below < _REACH, 0x77777777, 0)
    a0, b0 = _codes(w0, low, high, kept, WIDEN)
    a1, b1 = _codes(w1, low, high, kept, WIDEN)
    a2, b2 = _codes(w2, low, high, kept, WIDEN)
    a3, b3 = _codes(w3, low, high, kept, WIDEN)
    first = tl.join(tl.join(a0, a2), tl.join(a1, a3))
    last = tl.join(tl.join(b0, b2), tl.join(b1, b3))
    # Run, warp, row, lane; the word's two bits, half of the word, quarter, place in the half.
    codes = tl.join(first, last).permute(4, 2, 3, 1, 6, 7, 8, 0, 5).reshape(TILE, 128)
    return codes, largest


@triton.jit
def exponent_scale(exponent):
    """2^(exponent − 127) of int32, where 255 becomes inf and 0 becomes 0."""
    return (exponent << 23).to(tl.float32, bitcast=True)
