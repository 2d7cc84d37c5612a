"""Sampling in the Triton language; docs/kernels/sample.md has its floor and layout.

Nothing is sorted. Three launches over all rows find, in pieces of a row, the largest logit, bounds
between which the limits cut and the draw falls, and the few tokens between them; a fourth draws.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import needs_reference, padded, unit_stride
from plugins.device.search import bound, bound_key, threshold
from plugins.registry import OPERATORS
from plugins.sample.kernel_draw import STATE, draw, share_of, uniform

LEAST = tl.constexpr(-3.4028234663852886e38)
# Tokens of one program, and of one group whose largest logit is kept.
_CHUNK, _GROUP = 4096, 64
# Bounds below a chunk's peak at which its mass is measured, and bounds between which rows are cut.
_LEVELS, _GRID = 8, 64
# So few tokens are listed rather than bounded from above.
_FEW = 2048
# Listed tokens of one step of a draw, and how many are drawn from pair by pair.
_TILE, _PAIRS = 2048, 256


@triton.jit
def _survey(
    logits, row_stride, temperature, top_k, top_p, vocab, peaks, ids, least, steps, maxima, tails,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Of one piece of a row: the largest logit, its lowest id, the largest of each group; for a
    draw its mass, relative to that logit, and where top-p alone limits how much of it lies below
    each of LEVELS + 1 bounds, of which the last is 16 temperatures or the whole range away."""
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    logits += row * row_stride
    at = row * tl.num_programs(0) + chunk
    group = tl.arange(0, CHUNK // GROUP)
    place = (chunk * CHUNK + group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    value = tl.load(logits + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(value, axis=1)
    tl.store(maxima + at * (CHUNK // GROUP) + group, best)
    top = tl.max(best)
    tl.store(peaks + at, top)
    tl.store(ids + at, tl.min(tl.where(value == top, place, vocab)))
    heat = tl.load(temperature + row).to(tl.float32)
    if heat > 0:
        there = value > float("-inf")
        low = tl.min(tl.where(there, value, top))
        step = tl.where(top > low, tl.minimum(2.0 * heat, (top - low) / LEVELS), 0.0)
        step = tl.maximum(step, 1e-30)
        weight = tl.exp2((value - top) * (1.4426950408889634 / tl.maximum(heat, 1e-30)))
        weight = tl.where(there, weight, 0.0)
        tl.store(least + at, low)
        tl.store(steps + at, step)
        to = tails + at * (LEVELS + 2)
        tl.store(to, tl.sum(weight))
        if (tl.load(top_p + row) < 1.0) & (tl.load(top_k + row) <= 0):
            for level in tl.static_range(LEVELS + 1):
                tl.store(to + 1 + level, tl.sum(tl.where(value < top - level * step, weight, 0.0)))


@triton.jit
def _log_odds(below, mass):
    """log2 of mass below a bound over mass above it; finite where either is nothing."""
    least = tl.maximum(mass * 1e-7, 1e-37)
    return tl.log2(tl.maximum(below, 1e-37) / tl.maximum(mass - below, least))


@triton.jit
def _limit(
    temperature, top_k, top_p, min_p, seed, output_index, vocab, peaks, ids, least, steps, maxima,
    tails, num_chunks, num_groups, state, counter, tokens,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, LEVELS: tl.constexpr, GRID: tl.constexpr,
    HALF: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Of one row: the greedy token, and what describes it in `state`.

    Two intervals of logits hold where the limits cut and where the draw falls. With top-k both go
    from a bound that k groups reach to the peak. With top-p alone they are estimates, an eighth of
    the mass on the nearer side wide to either side; the draw checks them.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < num_chunks
    at = row * num_chunks + chunk
    top = tl.load(peaks + at, mask=there, other=float("-inf"))
    peak = tl.max(top)
    id = tl.load(ids + at, mask=there, other=vocab)
    tl.store(tokens + row, tl.min(tl.where(top == peak, id, vocab)).to(tl.int64))
    tl.store(counter + row, 0)
    heat = tl.load(temperature + row).to(tl.float32)
    if heat > 0:
        cold = 1.4426950408889634 / tl.maximum(heat, 1e-30)
        k = tl.load(top_k + row)
        share, ratio = tl.load(top_p + row).to(tl.float32), tl.load(min_p + row).to(tl.float64)
        curves = tails + at * (LEVELS + 2)
        of_peak = tl.exp2((top - peak) * cold)
        whole = tl.load(curves, mask=there, other=0.0)
        total = tl.sum(whole * of_peak)
        # The least power of two above the total.
        exponent = (total.to(tl.int32, bitcast=True) >> 23) - 126
        scale = ((42 - exponent + 127) << 23).to(tl.float32, bitcast=True)
        floor = tl.cast(LEAST, tl.float32)
        if ratio > 0:
            value = (peak.to(tl.float64) + heat.to(tl.float64) * tl.log(ratio)).to(tl.float32)
            value = value.to(tl.bfloat16).to(tl.float32) if HALF else value
            floor = tl.maximum(value, floor)
        infinity = peak * 0 + float("inf")
        low1, high1, low2, high2 = floor, infinity, floor, infinity
        if k > 0:
            group = tl.arange(0, GROUPS)
            best = tl.load(
                maxima + row * num_groups + group, mask=group < num_groups, other=float("-inf")
            )
            reached = tl.sum((best > float("-inf")).to(tl.int32))
            if k < reached:
                low = bound_key(tl.min(tl.where(best > float("-inf"), best, peak)))
                low, _high, reached, _above = threshold(
                    best, k.to(tl.int32), k.to(tl.int32) + 8, low, bound_key(peak) + 1, reached
                )
                low1 = tl.maximum(floor, bound(low))
                low2 = low1
        elif share < 1:
            lowest = tl.min(
                tl.load(least + at, mask=there & (top > float("-inf")), other=float("inf"))
            )
            step = tl.load(steps + at, mask=there, other=1.0)
            # Tokens below hold less than what top-p may drop, however many they are.
            end = peak + tl.log2((1.0 - share) * total / vocab) / cold
            end = tl.maximum(tl.maximum(end, lowest), floor)
            point = tl.arange(0, GRID)
            edge = peak - (peak - end) * (point.to(tl.float32) / (GRID - 2))
            edge = tl.where(point == GRID - 1, floor, edge)
            below = top[None, :] - edge[:, None]
            over = below < 0
            place = tl.maximum(tl.minimum(below, LEVELS * step[None, :]), 0.0) / step[None, :]
            level = tl.minimum(place.to(tl.int32), LEVELS - 1)
            part = place - level.to(tl.float32)
            level = 1 + level
            a = tl.load(curves[None, :] + level, mask=there[None, :], other=0.0)
            b = tl.load(curves[None, :] + level + 1, mask=there[None, :], other=0.0)
            # Between two bounds the logarithm of what lies below over what lies above is a line:
            # either end of the row is then as sharp as the other.
            mass = whole[None, :]
            odds = _log_odds(a, mass) * (1.0 - part) + _log_odds(b, mass) * part
            curve = mass / (1.0 + tl.exp2(-odds))
            tail = tl.where(b > 0, curve, a * (1.0 - part))
            tail = tl.where(over, whole[None, :], tail)
            tail = tl.sum(tail * of_peak[None, :], axis=1)
            barred = tl.sum(tl.where(point == GRID - 1, tail, 0.0))
            allowed = total - barred
            u = uniform(tl.load(seed + row), tl.load(output_index + row)).to(tl.float32)
            cut = barred + (1.0 - share) * allowed
            drawn = total - u * share * allowed
            slack = tl.minimum(cut - barred, total - cut) * 0.125
            low1 = tl.max(tl.where(tail <= cut - slack, edge, floor))
            high1 = tl.min(tl.where(tail >= cut + slack, edge, float("inf")))
            slack = tl.minimum(drawn - barred, total - drawn) * 0.125
            low2 = tl.max(tl.where(tail <= drawn - slack, edge, floor))
            high2 = tl.min(tl.where(tail >= drawn + slack, edge, float("inf")))
            # So many tokens at most reach a bound: each weighs as much as it does.
            number = total / tl.exp2((edge - peak) * cold)
            few = tl.min(tl.where(number <= FEW, edge, peak))
            high2 = tl.where(low2 >= few, float("inf"), high2)
            if low1 >= few:
                high1, low2, high2 = infinity, low1, infinity
        to = state + row * STATE
        tl.store(to, peak)
        tl.store(to + 1, scale)
        tl.store(to + 2, floor)
        tl.store(to + 3, low1)
        tl.store(to + 4, high1)
        tl.store(to + 5, low2)
        tl.store(to + 6, high2)


@triton.jit
def _collect(
    logits, row_stride, temperature, top_k, top_p, vocab, state, counter, sums, listed, listed_ids,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Of one piece of a row: the sums of its tokens' shares, all that are allowed and those above
    either interval, and its tokens inside them, appended to the row's list in any order."""
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    heat = tl.load(temperature + row).to(tl.float32)
    if heat > 0:
        cold = 1.4426950408889634 / tl.maximum(heat, 1e-30)
        of = state + row * STATE
        peak, scale, floor = tl.load(of), tl.load(of + 1), tl.load(of + 2)
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(logits + row * row_stride + place, mask=place < vocab, other=float("-inf"))
        value = value.to(tl.float32)
        share = share_of(value, peak, cold, scale)
        to = sums + (row * tl.num_programs(0) + chunk) * 3
        tl.store(to, tl.sum(tl.where(value >= floor, share, 0)))
        if (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0):
            low1, high1 = tl.load(of + 3), tl.load(of + 4)
            low2, high2 = tl.load(of + 5), tl.load(of + 6)
            over1, over2 = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
            if high1 < float("inf"):
                over1 = tl.sum(tl.where(value >= high1, share, 0))
            if high2 < float("inf"):
                over2 = tl.sum(tl.where(value >= high2, share, 0))
            tl.store(to + 1, over1)
            tl.store(to + 2, over2)
            inside = ((value >= low1) & (value < high1)) | ((value >= low2) & (value < high2))
            behind = tl.cumsum(inside.to(tl.int32), axis=0)
            number = tl.sum(inside.to(tl.int32))
            if number > 0:
                start = tl.atomic_add(counter + row, number) - 1
                # The mask parts the stores; the hint keeps them in the layout of the loads.
                at = tl.max_contiguous(tl.multiple_of(start + behind, 4), 4)
                tl.store(listed + row * vocab + at, value, mask=inside)
                tl.store(listed_ids + row * vocab + at, place, mask=inside)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    output_index: torch.Tensor,
) -> torch.Tensor:
    """As the reference, which runs for float64 logits and for more than 2¹⁹ of them.

    A token's weight is a float32 exponential, right to 2⁻²², sums are integers: where a draw falls
    within that of the border between two tokens it may name the other one.
    """
    if needs_reference(logits) or logits.shape[1] > 1 << 19:
        reference: torch.Tensor = OPERATORS["sample"].reference(
            logits, temperature, top_k, top_p, min_p, seed, output_index
        )
        return reference
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return tokens
    logits = unit_stride(logits)
    stride = logits.stride(0)
    chunk = min(_CHUNK, padded(vocab))
    group = min(_GROUP, chunk)
    chunks = triton.cdiv(vocab, chunk)
    groups = chunks * (chunk // group)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    peaks, least, steps = floats(rows, chunks), floats(rows, chunks), floats(rows, chunks)
    maxima, tails, state = floats(rows, groups), floats(rows, chunks, _LEVELS + 2), floats(rows, 7)
    ids, counter, sums = ints(rows, chunks), ints(rows), ints(rows, chunks, 6).view(torch.int64)
    listed, listed_ids = floats(rows, vocab), ints(rows, vocab)
    _survey[(chunks, rows)](
        logits, stride, temperature, top_k, top_p, vocab, peaks, ids, least, steps, maxima, tails,
        chunk, group, _LEVELS,
    )  # fmt: skip
    _limit[(rows,)](
        temperature, top_k, top_p, min_p, seed, output_index, vocab,
        peaks, ids, least, steps, maxima, tails, chunks, groups, state, counter, tokens,
        padded(chunks, 1), padded(groups, 1), _LEVELS, _GRID, logits.dtype == torch.bfloat16, _FEW,
    )  # fmt: skip
    _collect[(chunks, rows)](
        logits, stride, temperature, top_k, top_p, vocab, state, counter, sums, listed, listed_ids,
        chunk,
    )  # fmt: skip
    draw[(rows,)](
        logits, stride, temperature, top_k, top_p, seed, output_index, vocab,
        state, counter, sums, listed, listed_ids, chunks, tokens,
        padded(chunks, 1), chunk, _TILE, _PAIRS, num_warps=8,
    )  # fmt: skip
    return tokens
