"""Sampling in the Triton language; docs/kernels/sample.md has its floor and layout.

One program draws for one row. It never sorts: how many tokens, and how much mass, lie at or above a
logit is one pass, and each limit is the largest logit that enough of them reach, found bit by bit.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import needs_reference, padded, unit_stride
from plugins.device.numbers import order_key, ordered_value
from plugins.registry import OPERATORS

_TILE = 4096
_LEAST = tl.constexpr(-2147483648)


@triton.jit
def _uniform(seed, index):
    """The float64 in (0, 1) of plugins/sample/philox.py."""
    c0, c1 = index & 0xFFFFFFFF, (index >> 32) & 0xFFFFFFFF
    c2, c3 = index * 0, index * 0
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in tl.static_range(10):
        # The product wraps modulo 2^64; its halves are right once masked.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = (product0 >> 32) & 0xFFFFFFFF, (product1 >> 32) & 0xFFFFFFFF
        c0, c1 = high1 ^ c1 ^ k0, product1 & 0xFFFFFFFF
        c2, c3 = high0 ^ c3 ^ k1, product0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    bits = (c0 << 20) | (c1 >> 12)
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _load_keys(row, first, vocab, TILE: tl.constexpr):
    """The logits' order, and their place; of what lies beyond the row, the least that there is."""
    place = first + tl.arange(0, TILE)
    value = tl.load(row + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(place < vocab, order_key(value), _LEAST), place


@triton.jit
def _weights(keys, peak, cold):
    """Of a token against the most probable one: 2^(cold · distance)."""
    return tl.exp2((ordered_value(keys) - peak) * cold)


@triton.jit
def _reaching(kept, count, threshold, peak, cold, TILE: tl.constexpr):
    """How many of the kept keys, and how much mass, reach the threshold."""
    number, mass = 0, tl.cast(0.0, tl.float64)
    for first in range(0, count, TILE):
        place = first + tl.arange(0, TILE)
        keys = tl.load(kept + place, mask=place < count, other=_LEAST)
        reach = (keys >= threshold) & (place < count)
        number += tl.sum(reach.to(tl.int32))
        weight = tl.where(reach, _weights(keys, peak, cold), 0.0)
        mass += tl.sum(weight.to(tl.float64))
    return number, mass


@triton.jit
def _threshold(kept, count, least, wanted, peak, cold, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """The largest key that `wanted` tokens reach, or, BY_MASS, more mass than `wanted`; `least` if
    there is none above."""
    best = order_key(peak)
    # The bits that `least` and the best share are known.
    open_bits = (least ^ best).to(tl.uint32, bitcast=True)
    found = tl.where(best >= 0, 0, _LEAST)
    if (best >= 0) & (least < 0):
        number, mass = _reaching(kept, count, 0, peak, cold, TILE)
        enough = mass > wanted if BY_MASS else number >= wanted
        found = tl.where(enough, 0, _LEAST)
    for step in range(31):
        bit = 30 - step
        if (open_bits >> bit) == 0:
            found = found | (best & (1 << bit))
        else:
            tried = found | (1 << bit)
            number, mass = _reaching(kept, count, tried, peak, cold, TILE)
            enough = mass > wanted if BY_MASS else number >= wanted
            found = tl.where(enough, tried, found)
    return tl.maximum(found, least)


@triton.jit
def _before(value):
    """The next smaller float64 of a positive one."""
    return (value.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)


@triton.jit
def _draw_by_id(row, vocab, floor, peak, cold, u, TILE: tl.constexpr):
    """The token in whose share of the mass u falls, in the order of the ids."""
    total = tl.cast(0.0, tl.float64)
    for first in range(0, vocab, TILE):
        keys, _place = _load_keys(row, first, vocab, TILE)
        weight = tl.where(keys >= floor, _weights(keys, peak, cold), 0.0)
        total += tl.sum(weight.to(tl.float64))
    target = tl.minimum(u * total, _before(total))
    passed, first, token = tl.cast(0.0, tl.float64), 0, -1
    while (first < vocab) & (token < 0):
        keys, place = _load_keys(row, first, vocab, TILE)
        weight = tl.where(keys >= floor, _weights(keys, peak, cold), 0.0).to(tl.float64)
        here = tl.sum(weight)
        if passed + here > target:
            behind = tl.sum((passed + tl.cumsum(weight, axis=0) <= target).to(tl.int32))
            # Sums taken in another order may end a little below.
            last = tl.max(tl.where(weight > 0, place, -1))
            token = tl.minimum(first + behind, last)
        passed += here
        first += TILE
    return token


@triton.jit
def _pick(row, vocab, key, behind, TILE: tl.constexpr):
    """The id of the token with this key that has `behind` such tokens before it."""
    passed, first, token = 0, 0, -1
    while (first < vocab) & (token < 0):
        keys, place = _load_keys(row, first, vocab, TILE)
        equal = (keys == key).to(tl.int32)
        here = tl.sum(equal)
        if passed + here > behind:
            token = tl.min(
                tl.where((equal > 0) & (passed + tl.cumsum(equal, axis=0) > behind), place, vocab)
            )
        passed += here
        first += TILE
    return token


@triton.jit
def _draw_by_rank(row, kept, vocab, floor, top_k, top_p, peak, heat, cold, u, TILE: tl.constexpr):
    """The token in whose share of the mass u falls, by falling logit, among those that the limits
    leave."""
    # Three logits below the peak: the first that enough tokens reach bounds what is looked at.
    near, far = order_key(peak - 4.0 * heat), order_key(peak - 12.0 * heat)
    allowed, total = 0, tl.cast(0.0, tl.float64)
    near_number, near_mass = 0, tl.cast(0.0, tl.float64)
    far_number, far_mass = 0, tl.cast(0.0, tl.float64)
    for first in range(0, vocab, TILE):
        keys, _place = _load_keys(row, first, vocab, TILE)
        inside = keys >= floor
        weight = tl.where(inside, _weights(keys, peak, cold), 0.0).to(tl.float64)
        allowed += tl.sum(inside.to(tl.int32))
        total += tl.sum(weight)
        near_number += tl.sum((inside & (keys >= near)).to(tl.int32))
        near_mass += tl.sum(tl.where(keys >= near, weight, 0.0))
        far_number += tl.sum((inside & (keys >= far)).to(tl.int32))
        far_mass += tl.sum(tl.where(keys >= far, weight, 0.0))
    most = tl.minimum(tl.where(top_k > 0, top_k, vocab), allowed).to(tl.int32)
    needed = tl.where(top_p < 1.0, top_p * total, total)
    # Either limit alone bounds the tokens that can be drawn.
    enough_near = (near_number >= most) | ((top_p < 1.0) & (near_mass >= needed))
    enough_far = (far_number >= most) | ((top_p < 1.0) & (far_mass >= needed))
    bound = tl.where(enough_far, tl.maximum(far, floor), floor)
    bound = tl.where(enough_near, tl.maximum(near, floor), bound)
    count = 0
    for first in range(0, vocab, TILE):
        keys, _place = _load_keys(row, first, vocab, TILE)
        taken = keys >= bound
        place = count + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(kept + place, keys, mask=taken)
        count += tl.sum(taken.to(tl.int32))
    tl.debug_barrier()

    mass = total
    lowest = bound
    if most < count:
        lowest = _threshold(kept, count, bound, most, peak, cold, False, TILE)
        above, mass_above = _reaching(kept, count, lowest + 1, peak, cold, TILE)
        mass = mass_above + (most - above) * _weights(lowest, peak, cold).to(tl.float64)
    if top_p < 1.0:
        needed = top_p * mass
        # The mass must reach `needed`, not exceed it; one token always stays.
        under = tl.where(needed > 0, _before(needed), 0.0)
        lowest = _threshold(kept, count, lowest, under, peak, cold, True, TILE)
        above, mass_above = _reaching(kept, count, lowest + 1, peak, cold, TILE)
        reached, _mass = _reaching(kept, count, lowest, peak, cold, TILE)
        weight = _weights(lowest, peak, cold).to(tl.float64)
        equals = tl.where(weight > 0, tl.ceil((needed - mass_above) / weight), 1.0)
        equals = tl.minimum(tl.maximum(equals, 1.0), (tl.minimum(reached, most) - above) * 1.0)
        mass = mass_above + equals * weight
        most = above + equals.to(tl.int32)
    target = tl.minimum(u * mass, _before(mass))
    key = _threshold(kept, count, lowest, target, peak, cold, True, TILE)
    above, mass_above = _reaching(kept, count, key + 1, peak, cold, TILE)
    reached, _mass = _reaching(kept, count, key, peak, cold, TILE)
    behind = tl.floor((target - mass_above) / _weights(key, peak, cold).to(tl.float64))
    last = (tl.minimum(reached, most) - above - 1) * 1.0
    behind = tl.maximum(tl.minimum(behind, last), 0.0).to(tl.int32)
    return _pick(row, vocab, key, behind, TILE)


@triton.jit
def _sample(
    logits, row_stride, temperature, top_k, top_p, min_p, seed, output_index, kept, tokens, vocab,
    HALF: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * row_stride
    best, token = tl.cast(_LEAST, tl.int32), 0
    for first in range(0, vocab, TILE):
        keys, place = _load_keys(row, first, vocab, TILE)
        highest = tl.max(keys)
        if highest > best:
            best = highest
            token = tl.min(tl.where(keys == highest, place, vocab))
    heat = tl.load(temperature + at).to(tl.float32)
    if heat > 0:
        peak = ordered_value(best)
        cold = 1.4426950408889634 / tl.maximum(heat, 1e-30)
        share, least = tl.load(top_p + at).to(tl.float64), tl.load(min_p + at).to(tl.float64)
        k = tl.load(top_k + at)
        u = _uniform(tl.load(seed + at), tl.load(output_index + at))
        floor = tl.cast(_LEAST + 1, tl.int32)
        if least > 0:
            value = (peak.to(tl.float64) + heat.to(tl.float64) * tl.log(least)).to(tl.float32)
            # The bound is a logit too, rounded as they are.
            value = value.to(tl.bfloat16).to(tl.float32) if HALF else value
            floor = order_key(value)
        if (k > 0) | (share < 1.0):
            token = _draw_by_rank(
                row, kept + at * vocab, vocab, floor, k, share, peak, heat, cold, u, TILE
            )
        else:
            token = _draw_by_id(row, vocab, floor, peak, cold, u, TILE)
    tl.store(tokens + at, tl.cast(token, tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    output_index: torch.Tensor,
) -> torch.Tensor:
    """As the reference, which runs for float64 logits.

    A token's weight is a float32 exponential, right to 2⁻²², sums are float64: where a draw falls
    within that of the border between two tokens it may name the other one.
    """
    if needs_reference(logits):
        reference: torch.Tensor = OPERATORS["sample"].reference(
            logits, temperature, top_k, top_p, min_p, seed, output_index
        )
        return reference
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        logits = unit_stride(logits)
        kept = torch.empty(rows, vocab, dtype=torch.int32, device=logits.device)
        _sample[(rows,)](
            logits, logits.stride(0), temperature, top_k, top_p, min_p, seed, output_index, kept,
            tokens, vocab, logits.dtype == torch.bfloat16, min(_TILE, padded(vocab)),
            num_warps=16 if vocab > 2048 else 4,
        )  # fmt: skip
    return tokens
