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

from plugins.device.rows import DeviceRows

GROUPS = 4  # of 32 values; the kernels are written out for them
WIDTH = 32 * GROUPS
# Groups whose scale is 2^−12 of their row's largest, or less, are taken as zeros.
_REACH = tl.constexpr(12)
# Eight codes of a word by a table of the E4M3 codes of their magnitudes: $3 has the first four, $4
# the last four. The fourth bit of a selector must be 0: $5 masks signs, or everything. Signs lie
# where these four bytes, or after a shift the others, have them (plugins/formats/index_keys.py).
LOOK_UP = tl.constexpr("""
{
.reg .b32 first, last, odd;
and.b32 first, $2, $5;
prmt.b32 $0, $3, $4, first;
mul.hi.u32 last, first, 65536;
prmt.b32 $1, $3, $4, last;
lop3.b32 $0, $0, $2, 0x80808080, 0xF8;
mul.lo.u32 odd, $2, 16;
lop3.b32 $1, $1, odd, 0x80808080, 0xF8;
}
""")


def groups_are_aligned(stored: DeviceRows) -> bool:
    """Whether a group's 16 bytes can be loaded at once."""
    return stored.data.data_ptr() % 16 == 0 and stored.page_stride % 16 == 0


# Thread 0 asks for $3 bytes of codes at $1 and $4 of scales at $2.
_FETCH = tl.constexpr("""
{
.reg .pred one;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 one, thread, 0;
@one cp.async.bulk.prefetch.L2.global [$1], $3;
@one cp.async.bulk.prefetch.L2.global [$2], $4;
mov.b32 $0, 0;
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
        last = tl.cast(tl.maximum(visible, 1) - 1, tl.uint32)
        slot = tl.load(halves + 2 * (tl.minimum(tl.cast(start, tl.uint32), last) // PER_PAGE))
    else:
        entry = start + places(TILE, WARPS, 2)
        slot = slots_of(pages, entry, entry < visible, PER_PAGE)
    return slot


@triton.jit
def _page(
    data, slot, start, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, PER_PAGE: tl.constexpr,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """Where the codes and the scales of LENGTH entries from `start` on begin, which lie in the page
    whose first slot is `slot`, uint32."""
    codes = data + (slot // ROWS).to(tl.int64) * page_stride
    scales = codes + ROWS * ROW
    if ROWS > PER_PAGE:
        codes, scales = codes + (slot % ROWS) * ROW, scales + (slot % ROWS) * (ROW // 16)
    if PER_PAGE > LENGTH:
        inside = tl.cast(start, tl.uint32) % PER_PAGE
        codes, scales = codes + inside * ROW, scales + inside * (ROW // 16)
    return codes, scales


@triton.jit
def fetch_keys(
    data, slots, start, page_stride, ROWS: tl.constexpr, ROW: tl.constexpr, PER_PAGE: tl.constexpr,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """Bring LENGTH entries from `start` on, which lie in one page, into the L2 cache."""
    slot = tl.maximum(slots, 0).to(tl.uint32)
    codes, scales = _page(data, slot, start, page_stride, ROWS, ROW, PER_PAGE, LENGTH)
    size: tl.constexpr = LENGTH * ROW
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,l,n,n", [codes.to(tl.int64), scales.to(tl.int64), size, size // 16],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _four_words(row, read):
    """int32 words 0 to 3 at `row` [4, 8, WARPS, 2, RUNS], a multiple of 16 bytes: one load."""
    word = tl.arange(0, 4)[None, None, None, None, None, :]
    at = row[:, :, :, :, :, None].to(tl.pointer_type(tl.int32), bitcast=True) + word
    at = tl.multiple_of(at, (1, 1, 1, 1, 1, 16))
    mask = None if read is None else tl.broadcast_to(read[:, :, :, :, :, None], at.shape)
    words = tl.load(at, mask=mask, cache_modifier=".cg")
    s: tl.constexpr = row.shape
    even, odd = tl.split(words.reshape(s[0], s[1], s[2], s[3], s[4], 2, 2))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def load_keys(
    data, slots, start, page_stride, TILE: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr,
    ROW: tl.constexpr, PER_PAGE: tl.constexpr, WHOLE: tl.constexpr, TILES: tl.constexpr = 1,
    TURN: tl.constexpr = 0,
):  # fmt: skip
    """Whether the rows at `slots` of column_slots are there; the exponents of their groups, uint8,
    and the four words of each; all [4, 8, WARPS, 2, RUNS], undefined at −1.

    TILES: that many tiles from `start` on lie in one page; this is tile TURN of them."""
    SCALES: tl.constexpr = ROW // 16
    there = slots >= 0
    if WHOLE:
        # Where there is no page, the pool's first one is read for nothing.
        slot = tl.maximum(slots, 0).to(tl.uint32)
        codes, scales = _page(data, slot, start, page_stride, ROWS, ROW, PER_PAGE, TILES * TILE)
        # Added one after the other: what differs between a thread's rows is then part of the loads.
        place = places(16 * WARPS, WARPS, 1)
        further = (tl.arange(0, 2) * 8)[None, None, None, :, None]
        runs = tl.arange(0, TILE // (16 * WARPS)) * (16 * WARPS) + TURN * TILE
        further = further + runs[None, None, None, None, :]
        codes = codes + (place * ROW + 16 * quarter()) + further * ROW
        scales = scales + (place * SCALES + quarter()) + further * SCALES
        read = None
    else:
        slot = slots.to(tl.uint32)
        codes = data + (slot // ROWS).to(tl.int64) * page_stride
        scales = codes + ROWS * ROW + (slot % ROWS) * SCALES + quarter()
        codes = codes + (slot % ROWS) * ROW + 16 * quarter()
        read = there
    # Nobody reads them again: they need no place in the L1 cache.
    exponent = tl.load(scales, mask=read, cache_modifier=".cg")
    w0, w1, w2, w3 = _four_words(codes, read)
    return there, exponent, w0, w1, w2, w3


@triton.jit
def _code(magnitude, sign, low, high):
    """What LOOK_UP does, of one code; `sign` is 0x80 or 0."""
    table = tl.where(magnitude < 4, low, high)
    return (((table >> (8 * (magnitude & 3))) & 0x7F) | sign).to(tl.uint8)


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
        place = tl.arange(0, 4)[None, None, None, None, None, :]
        low, high = low[:, :, :, :, :, None], high[:, :, :, :, :, None]
        signs = word[:, :, :, :, :, None] >> (8 * place)
        magnitudes = (word & kept)[:, :, :, :, :, None] >> (4 * place)
        first = _code(magnitudes & 7, signs & 0x80, low, high)
        last = _code((magnitudes >> 16) & 7, (signs & 8) << 4, low, high)
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
