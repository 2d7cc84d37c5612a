"""The draw from listed tokens, in the Triton language: what kernel.py ends with."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from plugins.device.numbers import order_key, ordered_value

# A share's lower bits count tokens, the upper ones hold mass.
BITS = tl.constexpr(20)
COUNT = tl.constexpr((1 << 20) - 1)
# float32 numbers that describe a row: peak, scale, floor, and the four bounds of what is listed.
STATE = tl.constexpr(7)


@triton.jit
def uniform(seed, index):
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
def share_of(value, peak, cold, scale):
    """A token's mass in the upper bits, one in the lower: sums hold mass and count."""
    return ((tl.exp2((value - peak) * cold) * scale).to(tl.int64) << BITS) + 1


@triton.jit
def _reaching(listed, count, bound, end, peak, cold, scale, TILE: tl.constexpr):
    """Of the listed tokens from bound to below end, their shares' sum."""
    total = tl.zeros([TILE], tl.int64)
    for first in range(0, count, TILE):
        place = first + tl.arange(0, TILE)
        value = tl.load(listed + place, mask=place < count, other=float("-inf"))
        inside = (value >= bound) & (value < end)
        total += tl.where(inside, share_of(value, peak, cold, scale), 0)
    return tl.sum(total)


@triton.jit
def _reaching_both(listed, count, near, far, end, peak, cold, scale, TILE: tl.constexpr):
    """_reaching of two bounds, far not below near."""
    total_near, total_far = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    for first in range(0, count, TILE):
        place = first + tl.arange(0, TILE)
        value = tl.load(listed + place, mask=place < count, other=float("-inf"))
        share = tl.where((value >= near) & (value < end), share_of(value, peak, cold, scale), 0)
        total_near += share
        total_far += tl.where(value >= far, share, 0)
    return tl.sum(total_near), tl.sum(total_far)


@triton.jit
def _few(values, names, count, whole, most, p, u, peak, cold, scale, PAIRS: tl.constexpr):
    """The token drawn from at most PAIRS listed ones, the best there are: each by what is before
    it."""
    place = tl.arange(0, PAIRS)
    value = tl.load(values + place, mask=place < count, other=float("-inf"))
    id = tl.load(names + place, mask=place < count, other=2147483647)
    share = tl.where(place < count, share_of(value, peak, cold, scale), 0)
    above = tl.zeros([PAIRS], tl.int64)
    for first in range(0, count, 16):
        other = first + tl.arange(0, 16)
        its = tl.load(values + other, mask=other < count, other=float("-inf"))
        its_id = tl.load(names + other, mask=other < count, other=2147483647)
        its_share = tl.where(other < count, share_of(its, peak, cold, scale), 0)
        ahead = its[None, :] > value[:, None]
        ahead = ahead | ((its[None, :] == value[:, None]) & (its_id[None, :] < id[:, None]))
        above += tl.sum(tl.where(ahead, its_share[None, :], 0), axis=1)
    kept = (place < count) & ((above & COUNT) < most)
    mass = whole >> BITS
    if most < (whole & COUNT):
        mass = tl.sum(tl.where(kept, share, 0)) >> BITS
    missing = tl.cast(0, tl.int32)
    if p < 1.0:
        needed = tl.maximum(tl.ceil(p * mass.to(tl.float64)).to(tl.int64), 1)
        missing = ((tl.sum(share) >> BITS) < needed).to(tl.int32)
        kept = kept & ((above >> BITS) < needed)
        mass = tl.sum(tl.where(kept, share, 0)) >> BITS
    target = tl.minimum((u * mass.to(tl.float64)).to(tl.int64), mass - 1)
    hit = kept & ((above >> BITS) <= target) & (target < ((above + share) >> BITS))
    return tl.max(tl.where(hit, id, -1)) - missing * 0x7FFFFFFF


@triton.jit
def _find(
    listed, count, wanted, bound, end, reached, above, peak, cold, scale,
    BY_MASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest logit that `wanted` tokens, or that much mass, reach: it lies from bound to below
    end. Returns it, the tokens that reach it and those above it."""
    low, high = order_key(bound).to(tl.int64), order_key(end).to(tl.int64)
    base = above
    round = 0
    while (high - low > 1) & (((reached - above) & COUNT) > 1):
        span = high - low
        if round < 2:
            if BY_MASS:
                most, least = reached >> BITS, above >> BITS
            else:
                most, least = reached & COUNT, above & COUNT
            part = (most - wanted).to(tl.float32) / tl.maximum(most - least, 1).to(tl.float32)
            middle = low + (part * span.to(tl.float32)).to(tl.int64)
            near, far = middle - (span >> 4), middle + (span >> 4)
            round += 1
        else:
            near, far = low + ((span * 85) >> 8), low + ((span * 171) >> 8)
            round = 0
        near = tl.minimum(tl.maximum(near, low + 1), high - 1)
        far = tl.minimum(tl.maximum(far, low + 1), high - 1)
        a, b = _reaching_both(
            listed,
            count,
            ordered_value(near.to(tl.int32)),
            ordered_value(far.to(tl.int32)),
            end,
            peak,
            cold,
            scale,
            TILE,
        )
        a, b = base + a, base + b
        if BY_MASS:
            enough_a, enough_b = (a >> BITS) >= wanted, (b >> BITS) >= wanted
        else:
            enough_a, enough_b = (a & COUNT) >= wanted, (b & COUNT) >= wanted
        if enough_b:
            low, reached = far, b
        elif enough_a:
            low, reached, high, above = near, a, far, b
        else:
            high, above = near, a
    upper = ordered_value((high - 1).to(tl.int32))
    found = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(0, count, TILE):
        place = first + tl.arange(0, TILE)
        value = tl.load(listed + place, mask=place < count, other=float("-inf"))
        found = tl.maximum(found, tl.where(value <= upper, value, float("-inf")))
    return tl.max(found), reached, above


@triton.jit
def _numbered(listed, ids, count, value, behind, TILE: tl.constexpr):
    """The id of the listed token with this logit that has `behind` lower ones beside it."""
    found = 0
    if behind == 0:
        least = tl.full([TILE], 2147483647, tl.int32)
        for first in range(0, count, TILE):
            place = first + tl.arange(0, TILE)
            equal = tl.load(listed + place, mask=place < count, other=float("-inf")) == value
            id = tl.load(ids + place, mask=equal, other=2147483647)
            least = tl.minimum(least, id)
        found = tl.min(least)
    else:
        for step in range(20):
            tried = found | (1 << (19 - step))
            lower = tl.zeros([TILE], tl.int32)
            for first in range(0, count, TILE):
                place = first + tl.arange(0, TILE)
                equal = tl.load(listed + place, mask=place < count, other=float("-inf")) == value
                id = tl.load(ids + place, mask=equal, other=2147483647)
                lower += (id < tried).to(tl.int32)
            found = tl.where(tl.sum(lower) <= behind, tried, found)
    return found


@triton.jit
def _list_all(row, vocab, listed, ids, TILE: tl.constexpr):
    """Lists the whole row."""
    for first in range(0, vocab, TILE):
        place = first + tl.arange(0, TILE)
        value = tl.load(row + place, mask=place < vocab).to(tl.float32)
        tl.store(listed + place, value, mask=place < vocab)
        tl.store(ids + place, place, mask=place < vocab)
    tl.debug_barrier()


@triton.jit
def draw(
    logits, row_stride, temperature, top_k, top_p, seed, output_index, vocab, state, counter, sums,
    listed, ids, num_chunks, tokens,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Draws each row's token: without limits from the piece in which the draw falls, with limits
    from the listed tokens, or from all where an interval missed."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row).to(tl.float32)
    if heat > 0:
        cold = 1.4426950408889634 / tl.maximum(heat, 1e-30)
        k, p = tl.load(top_k + row), tl.load(top_p + row).to(tl.float64)
        u = uniform(tl.load(seed + row), tl.load(output_index + row))
        of = state + row * STATE
        peak, scale, floor = tl.load(of), tl.load(of + 1), tl.load(of + 2)
        source = logits + row * row_stride
        chunk = tl.arange(0, CHUNKS)
        parts = sums + (row * num_chunks + chunk) * 3
        there = chunk < num_chunks
        part = tl.load(parts, mask=there, other=0)
        whole = tl.sum(part)
        token = tl.cast(0, tl.int32)
        if (k > 0) | (p < 1.0):
            values = listed + row * vocab
            names = ids + row * vocab
            count = tl.load(counter + row)
            end1, end2 = tl.load(of + 4), tl.load(of + 6)
            bound1, bound2 = tl.load(of + 3), tl.load(of + 5)
            above1 = tl.sum(tl.load(parts + 1, mask=there, other=0))
            above2 = tl.sum(tl.load(parts + 2, mask=there, other=0))
            most = tl.minimum(tl.where(k > 0, k, vocab).to(tl.int64), whole & COUNT)
            infinity = peak * 0 + float("inf")
            token = token - 1
            if (count <= PAIRS) & (end1 == infinity) & (end2 == infinity):
                token = _few(values, names, count, whole, most, p, u, peak, cold, scale, PAIRS)
            if token < 0:
                reached1 = above1 + _reaching(values, count, bound1, end1, peak, cold, scale, TILE)
                kept = whole
                # With top-k, everything that matters is listed, up to the peak.
                if most < (whole & COUNT):
                    value, reached1, over = _find(
                        values,
                        count,
                        most,
                        bound1,
                        end1,
                        reached1,
                        above1,
                        peak,
                        cold,
                        scale,
                        False,
                        TILE,
                    )
                    kept = over + (most - (over & COUNT)) * share_of(value, peak, cold, scale)
                    bound1, bound2 = value, value
                all_listed = tl.cast(0, tl.int32)
                if p < 1.0:
                    mass = kept >> BITS
                    needed = tl.ceil(p * mass.to(tl.float64)).to(tl.int64)
                    needed = tl.minimum(tl.maximum(needed, 1), mass)
                    if ((above1 >> BITS) >= needed) | ((reached1 >> BITS) < needed):
                        _list_all(source, vocab, values, names, TILE)
                        all_listed = all_listed + 1
                        count, bound1, end1, above1, reached1 = (
                            vocab,
                            floor,
                            infinity,
                            whole * 0,
                            whole,
                        )
                    value, reached1, over = _find(
                        values,
                        count,
                        needed,
                        bound1,
                        end1,
                        reached1,
                        above1,
                        peak,
                        cold,
                        scale,
                        True,
                        TILE,
                    )
                    share = share_of(value, peak, cold, scale)
                    equals = tl.cdiv(needed - (over >> BITS), tl.maximum(share >> BITS, 1))
                    room = tl.minimum(reached1 & COUNT, most) - (over & COUNT)
                    equals = tl.maximum(tl.minimum(equals, room), 1)
                    kept = over + equals * share
                mass = kept >> BITS
                target = tl.minimum((u * mass.to(tl.float64)).to(tl.int64), mass - 1)
                reached2 = above2 + _reaching(values, count, bound2, end2, peak, cold, scale, TILE)
                if ((above2 >> BITS) > target) | ((reached2 >> BITS) <= target):
                    if all_listed == 0:
                        _list_all(source, vocab, values, names, TILE)
                    count, bound2, end2, above2, reached2 = vocab, floor, infinity, whole * 0, whole
                value, reached2, over = _find(
                    values,
                    count,
                    target + 1,
                    bound2,
                    end2,
                    reached2,
                    above2,
                    peak,
                    cold,
                    scale,
                    True,
                    TILE,
                )
                share = share_of(value, peak, cold, scale)
                behind = (target - (over >> BITS)) // tl.maximum(share >> BITS, 1)
                last = tl.minimum(reached2 & COUNT, kept & COUNT) - (over & COUNT) - 1
                behind = tl.maximum(tl.minimum(behind, last), 0)
                token = _numbered(values, names, count, value, behind.to(tl.int32), TILE)
        else:
            mass = whole >> BITS
            target = tl.minimum((u * mass.to(tl.float64)).to(tl.int64), mass - 1)
            before = tl.cumsum(part >> BITS, axis=0) <= target
            passed = tl.sum(tl.where(before, part >> BITS, 0))
            first = tl.sum(before.to(tl.int32)) * CHUNK
            place = first + tl.arange(0, CHUNK)
            logit = tl.load(source + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
            shares = tl.where(logit >= floor, share_of(logit, peak, cold, scale), 0) >> BITS
            token = first + tl.sum((tl.cumsum(shares, axis=0) <= target - passed).to(tl.int32))
        tl.store(tokens + row, token.to(tl.int64))
