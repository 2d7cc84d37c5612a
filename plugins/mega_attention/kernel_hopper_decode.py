"""The warps that decode, of the sparse attention on Hopper: packed rows to bfloat16 rows in shared
memory, tile by tile.

A row of 512 elements is 64 words of eight, as NVFP4 rows hold them. A part of a row's keys has word
4 l + t at place 16 t + l, and of a word its elements 0 4 1 5 2 6 3 7, as they are decoded. For
whole rows, element 4 e + j of word 4 l + t is at place 256 (j / 2) + 128 (l / 8) + 64 (j % 2) +
8 (l % 8) + 2 t + e, divisions rounded down: a lane that has every fourth pair of a product's
columns then has whole words. In either order a thread that decodes the four words of an l stores
16 bytes at a time, without bank conflicts, two elements a register. A row is kept as 2^−8 of its
values, so that no scale overflows while the unit of a code is made up for.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# Two times four FP4 codes, of one register, as eight bfloat16 values times their scale. A code's
# exponent and first fraction bit go to bits 6 to 8, subnormals included: 2^−126 of its value. Its
# sign arrives at bit 9, from where adding 0x7E00 carries it to bit 15.
_FOUR_CODES = gl.constexpr("""
{
.reg .b32 t, c, zero;
mov.b32 zero, 0x80008000;
and.b32 t, $4, 0x000F000F;
mad.lo.u32 t, t, 64, 0x7E007E00;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $0, t, $5, zero;
and.b32 t, $4, 0x00F000F0;
mad.lo.u32 t, t, 4, 0x7E007E00;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $1, t, $5, zero;
shr.u32 c, $4, 8;
and.b32 t, c, 0x000F000F;
mad.lo.u32 t, t, 64, 0x7E007E00;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $2, t, $5, zero;
and.b32 t, c, 0x00F000F0;
mad.lo.u32 t, t, 4, 0x7E007E00;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $3, t, $5, zero;
}
""")
# Two words of four E4M3 codes, in the same way: seven bits to bits 4 to 10, 2^−120 of a value, made
# up for at once, and then the scale.
_FOUR_BYTES = gl.constexpr("""
{
.reg .b32 a, b, t, zero, unit;
mov.b32 zero, 0x80008000;
mov.b32 unit, 0x7B807B80;
and.b32 a, $4, 0x00FF00FF;
and.b32 b, $5, 0x00FF00FF;
prmt.b32 t, a, b, 0x5410;
mad.lo.u32 t, t, 16, 0x78007800;
and.b32 t, t, 0x87F087F0;
fma.rn.bf16x2 t, t, unit, zero;
fma.rn.bf16x2 $0, t, $6, zero;
prmt.b32 t, a, b, 0x7632;
mad.lo.u32 t, t, 16, 0x78007800;
and.b32 t, t, 0x87F087F0;
fma.rn.bf16x2 t, t, unit, zero;
fma.rn.bf16x2 $2, t, $6, zero;
shr.u32 a, $4, 8;
shr.u32 b, $5, 8;
and.b32 a, a, 0x00FF00FF;
and.b32 b, b, 0x00FF00FF;
prmt.b32 t, a, b, 0x5410;
mad.lo.u32 t, t, 16, 0x78007800;
and.b32 t, t, 0x87F087F0;
fma.rn.bf16x2 t, t, unit, zero;
fma.rn.bf16x2 $1, t, $6, zero;
prmt.b32 t, a, b, 0x7632;
mad.lo.u32 t, t, 16, 0x78007800;
and.b32 t, t, 0x87F087F0;
fma.rn.bf16x2 t, t, unit, zero;
fma.rn.bf16x2 $3, t, $6, zero;
}
""")


@gluon.jit
def _in_order(v0, v1, v2, v3, N: gl.constexpr, WIDTH: gl.constexpr, WHOLE: gl.constexpr):
    """[N, WIDTH] in the order of a kept row, of the elements 0 to 3 of fours [N, WIDTH / 4]."""
    x = gl.join(gl.join(v0, v2), gl.join(v1, v3)).reshape([N, 2, WIDTH // 64, 4, 2, 2, 2])
    x = x.permute([0, 5, 1, 6, 2, 3, 4] if WHOLE else [0, 3, 1, 2, 5, 6, 4])
    return x.reshape([N, WIDTH])


@gluon.jit
def load_slots(slots, first, end, N: gl.constexpr, layout: gl.constexpr):
    """Slots first to first + N, int32: the low words of int64; −1 from `end` on."""
    key = first + gl.arange(0, N, layout=layout)
    return gl.load(slots + 2 * key, mask=key < end, other=-1)


@gluon.jit
def rows_at(data, slots, page_stride, ROWS: gl.constexpr, ROW: gl.constexpr):
    """Where rows begin; somewhere at slot −1."""
    slot = gl.maximum(slots, 0)
    return data + ((slot // ROWS).to(gl.int64) * page_stride + (slot % ROWS) * ROW)


@gluon.jit
def words_at(row, slots, WORDS: gl.constexpr, WARPS: gl.constexpr):
    """Where the words of rows are, uint32 [N, WORDS], four of them a thread, and which to read."""
    LANES: gl.constexpr = WORDS // 4
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    words = gl.convert_layout(row, gl.SliceLayout(1, CODES), assert_trivial=True)
    words = words.to(gl.pointer_type(gl.uint32), bitcast=True)
    read = gl.convert_layout(slots >= 0, gl.SliceLayout(1, CODES), assert_trivial=True)
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, CODES))
    return words[:, None] + word[None, :], read[:, None]


@gluon.jit
def load_scales(row, slots, WORDS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """For every four words the bytes of their scales: one of an MXFP8 row, a pair of an NVFP4
    row. Zeros at slot −1."""
    LANES: gl.constexpr = WORDS // 4
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    four = gl.arange(0, LANES, layout=gl.SliceLayout(0, SCALES))
    if WORDS * 4 == WIDTH:
        at = row[:, None] + (WIDTH + four // 2)[None, :]
    else:
        at = row.to(gl.pointer_type(gl.uint16), bitcast=True)[:, None] + (WORDS * 2 + four)[None, :]
    return gl.load(at, mask=(slots >= 0)[:, None], other=0).to(gl.int32)


@gluon.jit
def load_codes(
    data, slots, page_stride, ROWS: gl.constexpr, ROW: gl.constexpr, WORDS: gl.constexpr,
    WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The words of rows and their scales; zeros at slot −1."""
    row = rows_at(data, slots, page_stride, ROWS, ROW)
    at, read = words_at(row, slots, WORDS, WARPS)
    codes = gl.load(at, mask=read, other=0)
    return codes, load_scales(row, slots, WORDS, WIDTH, WARPS)


@gluon.jit
def _e4m3_scale(byte):
    half = (((byte & 0x7F) << 7) | ((byte & 0x80) << 8)).to(gl.uint16).to(gl.float16, bitcast=True)
    return gl.where((byte & 0x7F) == 0x7F, float("nan"), half.to(gl.float32))


@gluon.jit
def scale_values(scales, MXFP8: gl.constexpr):
    """What codes are multiplied by, bfloat16, from the bytes of `load_codes`."""
    if MXFP8:
        scale = gl.where(scales == 0, 0x00400000, scales << 23).to(gl.float32, bitcast=True)
        scale = gl.where(scales == 255, float("nan"), scale) * 0.00390625
    else:
        # 2^126 of the codes, 2^8 of _e4m3_scale, 2^−8 of a kept row.
        scale = gl.join(_e4m3_scale(scales & 0xFF), _e4m3_scale(scales >> 8)) * 8.507059173023462e37
    return scale.to(gl.bfloat16)


@gluon.jit
def decode_by(codes, scale, N: gl.constexpr, WIDTH: gl.constexpr, WHOLE: gl.constexpr):
    """As `decode`, of `scale_values`."""
    scale = gl.join(scale, scale)
    scale = gl.join(scale, scale).reshape([N, WIDTH // 4])
    if codes.shape[1] * 4 == WIDTH:
        scale = gl.convert_layout(scale, codes.type.layout, assert_trivial=True)
        v0, v1, v2, v3 = gl.inline_asm_elementwise(
            _FOUR_BYTES, "=&r,=&r,=&r,=&r,r,r,r", [codes, scale],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = (codes & 0xFFFF).to(gl.uint16), (codes >> 16).to(gl.uint16)
        code = gl.join(low, high).reshape([N, WIDTH // 4])
        scale = gl.convert_layout(scale, code.type.layout, assert_trivial=True)
        v0, v1, v2, v3 = gl.inline_asm_elementwise(
            _FOUR_CODES, "=&r,=&r,=&r,=&r,r,r", [code, scale],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return _in_order(v0, v1, v2, v3, N, WIDTH, WHOLE)


@gluon.jit
def decode(codes, scales, N: gl.constexpr, WIDTH: gl.constexpr, WHOLE: gl.constexpr):
    """bfloat16 rows [N, WIDTH], 2^−8 of their values, exactly, in the order of a kept row."""
    return decode_by(codes, scale_values(scales, codes.shape[1] * 4 == WIDTH), N, WIDTH, WHOLE)


@gluon.jit
def flags(slots):
    """What scores get added: −∞ at slot −1."""
    return gl.where(slots >= 0, 0.0, float("-inf"))


@gluon.jit
def _keep(rows, bias, codes, scales, slots, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Decode into rows FIRST and on of a tile, and their flags."""
    N: gl.constexpr = codes.shape[0]
    rows.slice(FIRST, N).store(decode(codes, scales, N, WIDTH, False))
    bias.slice(FIRST, N).store(flags(slots))


@gluon.jit
def share(item, num_parts, window_keys, main_keys, window_chunk, chunk, lead):
    """An item's row, and its window keys and entries [first, end)."""
    row = (item // num_parts).to(gl.int64)
    part = item % num_parts
    window_first = part * window_chunk
    window_end = gl.maximum(gl.minimum(window_first + window_chunk, window_keys), window_first)
    main_first = gl.maximum(part * chunk - lead, 0)
    main_end = gl.maximum(gl.minimum((part + 1) * chunk - lead, main_keys), main_first)
    return row, window_first, window_end, main_first, main_end


@gluon.jit
def fetch_queries(
    q_row, head_stride, H: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Bring a row's queries, up to 64 heads, into the L2 cache: these warps are at most two tiles
    ahead of those that will read them."""
    LINES: gl.constexpr = WIDTH // 64
    line = gl.arange(0, 64 * LINES, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    head = gl.minimum(line // LINES, H - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
        [q_row + head * head_stride + line % LINES * 64], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def decode_tiles(
    q, row_stride, head_stride, keys, bias, full, empty,
    window, window_pages, WINDOW_ROWS: gl.constexpr, WINDOW_ROW: gl.constexpr,
    main, main_pages, MAIN_ROWS: gl.constexpr, MAIN_ROW: gl.constexpr,
    all_window_slots, window_stride, window_keys, all_main_slots, main_stride, main_keys,
    window_chunk, chunk, lead, num_parts, num_items,
    H: gl.constexpr, WIDTH: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The decoding warps of parts of rows: entries first, whose codes are loaded a tile ahead, then
    window rows."""
    HALF: gl.constexpr = TILE // 2
    OF_MAIN: gl.constexpr = WIDTH // 8
    OF_WINDOW: gl.constexpr = WIDTH // 4
    MAIN: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0]))
    WINDOW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
    tile = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        row, window_first, window_end, main_first, main_end = share(
            item, num_parts, window_keys, main_keys, window_chunk, chunk, lead
        )
        fetch_queries(q + row * row_stride, head_stride, H, WIDTH, WARPS)
        window_slots = all_window_slots + 2 * row * window_stride
        main_slots = all_main_slots + 2 * row * main_stride
        w0 = load_slots(window_slots, window_first, window_end, HALF, WINDOW)
        w1 = load_slots(window_slots, window_first + HALF, window_end, HALF, WINDOW)
        here = load_slots(main_slots, main_first, main_end, TILE, MAIN)
        codes, scales = load_codes(
            main, here, main_pages, MAIN_ROWS, MAIN_ROW, OF_MAIN, WIDTH, WARPS
        )
        coming = load_slots(main_slots, main_first + TILE, main_end, TILE, MAIN)
        for first in range(main_first, main_end, TILE):
            stage = tile % 2
            mbarrier.wait(empty.index(stage), ((tile // 2) & 1) ^ 1)
            _keep(keys.index(stage), bias.index(stage), codes, scales, here, 0, WIDTH)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full.index(stage), count=1)
            # Behind the fence, which would wait for them; they arrive while the stage is in use.
            codes, scales = load_codes(
                main, coming, main_pages, MAIN_ROWS, MAIN_ROW, OF_MAIN, WIDTH, WARPS
            )
            here = coming
            coming = load_slots(main_slots, first + 2 * TILE, main_end, TILE, MAIN)
            tile += 1
        for first in range(window_first, window_end, TILE):
            stage = tile % 2
            rows, added = keys.index(stage), bias.index(stage)
            d0, t0 = load_codes(
                window, w0, window_pages, WINDOW_ROWS, WINDOW_ROW, OF_WINDOW, WIDTH, WARPS
            )
            d1, t1 = load_codes(
                window, w1, window_pages, WINDOW_ROWS, WINDOW_ROW, OF_WINDOW, WIDTH, WARPS
            )
            mbarrier.wait(empty.index(stage), ((tile // 2) & 1) ^ 1)
            _keep(rows, added, d0, t0, w0, 0, WIDTH)
            _keep(rows, added, d1, t1, w1, HALF, WIDTH)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full.index(stage), count=1)
            w0 = load_slots(window_slots, first + TILE, window_end, HALF, WINDOW)
            w1 = load_slots(window_slots, first + TILE + HALF, window_end, HALF, WINDOW)
            tile += 1
