"""From the sums of a pass to the mix, Sinkhorn included, and what was collapsed to the normalised.

Programs of both kinds run beside each other: a row's Sinkhorn is 40 steps that wait for each other,
the normalisation is one read and one write.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.overlap import after_previous


@triton.jit
def _everywhere(x, place: tl.constexpr):
    """x [rows, SUMS] at one place, at every place of its row."""
    return tl.gather(x, tl.zeros(x.shape, tl.int32) + place, 1)


@triton.jit
def _inverse_rms(squares, count: tl.constexpr, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(squares / count + eps))


@triton.jit
def _share(
    cells, first: tl.constexpr, step: tl.constexpr, eps, S: tl.constexpr, NATIVE: tl.constexpr
):
    """1 / (sum of S cells + eps), within 2^−23."""
    total = cells[first] + cells[first + step]
    if S == 4:
        total += cells[first + 2 * step] + cells[first + 3 * step]
    total += eps
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / total


@triton.jit
def _sources_to_one(cells, eps, S: tl.constexpr, NATIVE: tl.constexpr):
    """S · S cells of which each source's have the sum 1."""
    scaled = ()
    for i in tl.static_range(S):
        share = _share(cells, S * i, 1, eps, S, NATIVE)
        for j in tl.static_range(S):
            scaled = scaled + (cells[S * i + j] * share,)  # noqa: RUF005 (kernels know no unpacking)
    return scaled


@triton.jit
def _destinations_to_one(cells, eps, S: tl.constexpr, NATIVE: tl.constexpr):
    """S · S cells of which each destination's have the sum 1."""
    shares = ()
    for j in tl.static_range(S):
        shares = shares + (_share(cells, j, S, eps, S, NATIVE),)  # noqa: RUF005
    scaled = ()
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            scaled = scaled + (cells[S * i + j] * shares[j],)  # noqa: RUF005
    return scaled


@triton.jit
def _sinkhorn(logits, iterations, eps, S: tl.constexpr, NATIVE: tl.constexpr):
    """From S · S logits of any shape the cells of the mix, elementwise: exp(logit − the source's
    highest), and then turns of divisions."""
    powers = ()
    for i in tl.static_range(S):
        high = logits[S * i]
        for j in tl.static_range(1, S):
            high = tl.maximum(high, logits[S * i + j], propagate_nan=tl.PropagateNan.ALL)
        for j in tl.static_range(S):
            powers = powers + (tl.exp(logits[S * i + j] - high),)  # noqa: RUF005
    cells = ()
    for cell in tl.static_range(S * S):
        share = _share(powers, cell // S * S, 1, 0.0, S, NATIVE)
        cells = cells + (tl.fma(powers[cell], share, eps),)  # noqa: RUF005
    cells = _destinations_to_one(cells, eps, S, NATIVE)
    for _ in range(iterations - 1):
        cells = _sources_to_one(cells, eps, S, NATIVE)
        cells = _destinations_to_one(cells, eps, S, NATIVE)
    return cells


@triton.jit
def _add_parts(at, there, first, PARTS: tl.constexpr, PER: tl.constexpr, SUMS: tl.constexpr):
    """The sum of a quarter of a row's parts, of PER tiles each, from part `first` on. All loads
    stand before the first addition: they are under way together."""
    COUNT: tl.constexpr = (PARTS + 3) // 4
    loaded = ()
    for i in tl.static_range(COUNT * PER):
        part = first + i // PER
        is_part = there if PARTS % 4 == 0 else there & (part < PARTS)
        one = tl.load(at + (part * PER + i % PER) * SUMS, mask=is_part, other=0.0)
        loaded = loaded + (one,)  # noqa: RUF005
    total = tl.zeros(at.shape, tl.float32)
    for part in tl.static_range(COUNT):
        one = loaded[part * PER]
        for tile in tl.static_range(1, PER):
            one += loaded[part * PER + tile]
        total += one
    return total


@triton.jit
def _mix_rows(
    program, sums, base, scale, pre, post, comb, num_rows, sinkhorn_iters, hc_eps,
    norm_eps, WIDTH: tl.constexpr, S: tl.constexpr, SUMS: tl.constexpr, PARTS: tl.constexpr,
    PER: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The mix of ROWS rows, or of one row by four warps, of which each adds up a quarter of the
    parts. A sum is a lane; for Sinkhorn, a chain of short steps in which lanes that asked each
    other would wait, all S · S cells of a row are in every lane."""
    MIXES: tl.constexpr = S * (2 + S)
    QUARTER: tl.constexpr = (PARTS + 3) // 4
    HIGH: tl.constexpr = ROWS if ROWS > 1 else 4
    if ROWS > 1:
        row = (program * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    else:
        row = (program + tl.zeros((4,), tl.int32)).to(tl.int64)[:, None]
    is_row = row < num_rows
    place = tl.arange(0, SUMS)[None, :]
    shift = tl.load(base + place, mask=place < MIXES, other=0.0).to(tl.float32)
    kind = tl.where(place < 2 * S, place // S, 2)
    factor = tl.load(scale + kind, mask=place < MIXES, other=0.0).to(tl.float32)
    shift, factor = tl.broadcast_to(shift, (HIGH, SUMS)), tl.broadcast_to(factor, (HIGH, SUMS))
    after_previous(OVERLAP)
    at = sums + row * (PARTS * PER * SUMS) + place
    there = is_row & (place <= MIXES)
    if ROWS > 1:
        total = _add_parts(at, there, 0, PARTS, PER, SUMS)
        second = _add_parts(at, there, QUARTER, PARTS, PER, SUMS)
        third = _add_parts(at, there, 2 * QUARTER, PARTS, PER, SUMS)
        total = (total + second) + (third + _add_parts(at, there, 3 * QUARTER, PARTS, PER, SUMS))
    else:
        quarter = tl.arange(0, 4)[:, None]
        total = _add_parts(at, there, quarter * QUARTER, PARTS, PER, SUMS)
        # Neighbours, and then what is left: one sum of four would be in an order of its own.
        total = tl.sum(tl.sum(tl.reshape(total, (2, 2, SUMS)), axis=1), axis=0)[None, :]
        total = tl.broadcast_to(total, (4, SUMS))
        is_row = is_row & (quarter == 0)
    inverse = _inverse_rms(_everywhere(total, MIXES), S * WIDTH, norm_eps)
    logits = tl.fma(total * inverse, factor, shift)
    gate = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    tl.store(pre + row * S + place, gate + hc_eps, mask=is_row & (place < S))
    is_post = (place >= S) & (place < 2 * S)
    tl.store(post + row * S + place - S, 2.0 * gate, mask=is_row & is_post)
    of_cells = ()
    for cell in tl.static_range(S * S):
        of_cells = of_cells + (_everywhere(logits, 2 * S + cell),)  # noqa: RUF005
    cells = _sinkhorn(of_cells, sinkhorn_iters, hc_eps, S, NATIVE)
    grid = tl.zeros((HIGH, SUMS), tl.float32)
    for cell in tl.static_range(S * S):
        grid = tl.where(place == 2 * S + cell, cells[cell], grid)
    at = comb + row * (S * S) + place - 2 * S
    tl.store(at, grid, mask=is_row & (place >= 2 * S) & (place < MIXES))


@triton.jit
def _normalise_row(
    row, collapsed, weight, norm_eps, WIDTH: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    gains, values = (), ()
    for i in tl.static_range(TILES):
        column = i * TILE + tl.arange(0, TILE)
        gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        gains = gains + (gain,)  # noqa: RUF005
    after_previous(OVERLAP)
    at = collapsed + tl.cast(row, tl.int64) * WIDTH
    squares = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(TILES):
        column = i * TILE + tl.arange(0, TILE)
        value = tl.load(at + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        values = values + (value,)  # noqa: RUF005
        squares = tl.fma(value, value, squares)
    inverse = _inverse_rms(tl.sum(squares, axis=0), WIDTH, norm_eps)
    for i in tl.static_range(TILES):
        column = i * TILE + tl.arange(0, TILE)
        normed = (values[i] * inverse * gains[i]).to(collapsed.dtype.element_ty)
        tl.store(at + column, normed, mask=column < WIDTH)


@triton.jit
def normalise(
    collapsed, weight, norm_eps, WIDTH: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """A row of `collapsed` a program, where it lies."""
    _normalise_row(tl.program_id(0), collapsed, weight, norm_eps, WIDTH, TILE, OVERLAP)


@triton.jit(do_not_specialize=["num_rows"])
def finish(
    sums, base, scale, pre, post, comb, collapsed, weight, num_rows, sinkhorn_iters, hc_eps,
    norm_eps, WIDTH: tl.constexpr, S: tl.constexpr, SUMS: tl.constexpr, PARTS: tl.constexpr,
    PER: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """From `sums` [rows, PARTS · PER, SUMS], PER to a part, the mix: by programs of ROWS rows each.
    With NORM each has ROWS more behind it, of which each normalises one row of `collapsed` where it
    lies: one kind waits while the other uses memory. Weights are loaded before the pass has ended.
    """
    EACH: tl.constexpr = ROWS + 1 if NORM else 1
    program, kind = tl.program_id(0) // EACH, tl.program_id(0) % EACH
    if kind == 0:
        _mix_rows(
            program, sums, base, scale, pre, post, comb, num_rows, sinkhorn_iters, hc_eps,
            norm_eps, WIDTH, S, SUMS, PARTS, PER, ROWS, OVERLAP, NATIVE,
        )  # fmt: skip
    else:
        # The last rows first: they are still in the L2 cache.
        row = num_rows - program * ROWS - kind
        _normalise_row(row, collapsed, weight, norm_eps, WIDTH, TILE, OVERLAP)
