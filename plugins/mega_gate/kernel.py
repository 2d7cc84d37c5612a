"""The expert gate in the Triton language; docs/kernels/mega_gate.md has its floor and layout.

Two launches: products of tokens and experts, then scores and choice. Few rows spread the parts of
their sums over the width over programs; many rows are the library's work.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, limits, needs_reference, padded, unit_stride
from plugins.device.overlap import after_previous, overlaps
from plugins.linear.kernel_row import row_products, takes_row
from plugins.mega_gate.reference import Routing
from plugins.registry import OPERATORS

# From so many rows on the library multiplies.
LIBRARY_ROWS = 512
# Below that a row's products are added up in so many parts, each by a program of its own.
_PARTS = 8
_EXPERT_TILE = 64
_DEPTH = 128
# Experts of a vector of the choice: a warp has as many lanes.
_CHUNK = 32
# Up to this many rows weights, where they find room in shared memory, and the bias are loaded
# before the launch ahead has ended.
_FEW_ROWS = 16
# Lines of a weight's row and part that are fetched ahead.
_AHEAD = 16


@triton.jit
def _columns(
    of_row, is_row, first, WIDTH: tl.constexpr, PART: tl.constexpr, DEPTH: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """DEPTH columns of rows from column `first` on."""
    column = first + tl.arange(0, DEPTH)[None, :]
    there = is_row & (column < WIDTH) if WIDTH % PART else is_row
    return tl.load(of_row + column, mask=there, other=0.0).to(DOT)


@triton.jit
def _multiplied(w, x, total, WIDEN: tl.constexpr):
    if WIDEN:
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x), total, input_precision="tf32x3")


@triton.jit(do_not_specialize=["num_rows"])
def _logits(
    u, row_stride, weight, weight_stride, parts, num_rows, num_experts, WIDTH: tl.constexpr,
    PART: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    DOT: tl.constexpr, WIDEN: tl.constexpr, KEEP: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums [rows, experts] of the products of PART columns, a multiple of DEPTH. Weights, which no
    launch before this one writes, are on their way before that one has ended: with KEEP all of them
    into shared memory, else AHEAD lines of each row into the L2 cache."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_expert, is_row = (expert < num_experts)[:, None], (row < num_rows)[:, None]
    of_expert = weight + expert[:, None].to(tl.int64) * weight_stride
    of_row = u + row[:, None].to(tl.int64) * row_stride
    first = tl.program_id(2) * PART
    total = tl.zeros((EXPERTS, ROWS), tl.float32)
    if KEEP:
        if OVERLAP:
            # The next launch need not wait for the weights before it is set up.
            tl.extra.cuda.gdc_launch_dependents()
        kept, loaded = (), ()
        for step in tl.static_range(PART // DEPTH):
            w = _columns(of_expert, is_expert, first + step * DEPTH, WIDTH, PART, DEPTH, DOT)
            kept = kept + (w,)  # noqa: RUF005 (kernels know no unpacking)
        after_previous(OVERLAP)
        for step in tl.static_range(PART // DEPTH):
            x = _columns(of_row, is_row, first + step * DEPTH, WIDTH, PART, DEPTH, DOT)
            loaded = loaded + (x,)  # noqa: RUF005
        for step in tl.static_range(PART // DEPTH):
            total = _multiplied(kept[step], loaded[step], total, WIDEN)
    else:
        if OVERLAP:
            line = first + tl.arange(0, AHEAD)[None, :] * (PART // AHEAD)
            at = of_expert + tl.minimum(line, WIDTH - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        after_previous(OVERLAP)
        for step in range(PART // DEPTH):
            w = _columns(of_expert, is_expert, first + step * DEPTH, WIDTH, PART, DEPTH, DOT)
            x = _columns(of_row, is_row, first + step * DEPTH, WIDTH, PART, DEPTH, DOT)
            total = _multiplied(w, x, total, WIDEN)
    at = (tl.program_id(2).to(tl.int64) * num_rows + row)[:, None] * num_experts + expert[None, :]
    tl.store(parts + at, tl.trans(total), mask=is_row & (expert < num_experts)[None, :])


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + exp(x))); log1p(e) = e · q(e) for e ≤ 1 keeps small scores exact. q is the
    polynomial through log1p(e) / e at nine Chebyshev points, 2e-7 of it off at most."""
    e = tl.exp(-tl.abs(x))
    q = 0.0051261024
    q = tl.fma(q + tl.zeros_like(e), e, -0.029074065)
    q = tl.fma(q, e, 0.077516086)
    q = tl.fma(q, e, -0.13602248)
    q = tl.fma(q, e, 0.19076881)
    q = tl.fma(q, e, -0.24835399)
    q = tl.fma(q, e, 0.3331812)
    q = tl.fma(q, e, -0.49999446)
    q = tl.fma(q, e, 0.99999994)
    return tl.sqrt(tl.fma(e, q, tl.maximum(x, 0.0)))


@triton.jit
def _experts(chunk: tl.constexpr, NUM_EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """The ids of a chunk [1, CHUNK], and which of them are experts."""
    expert = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    is_expert = expert < NUM_EXPERTS
    if NUM_EXPERTS % CHUNK == 0:
        is_expert = expert >= 0
    return expert, is_expert


@triton.jit
def _bias(bias, chunk: tl.constexpr, NUM_EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    expert, is_expert = _experts(chunk, NUM_EXPERTS, CHUNK)
    return tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _choose(
    parts, bias, bias_image, is_image, ids, weights, num_rows, route_scale, inverse_temperature,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    PLACES: tl.constexpr, IMAGES: tl.constexpr, PARTS: tl.constexpr, SUM_EPS: tl.constexpr,
    EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row, by a warp: its experts in CHUNKS vectors [1, CHUNK], as 384 are no power of two."""
    row = (tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)[:, None]
    # What is no expert, or chosen, is less than every score.
    LEAST: tl.constexpr = -(1 << 31)
    NOBODY: tl.constexpr = CHUNKS * CHUNK
    shifts = ()
    if EARLY:
        # No launch writes a bias.
        for c in tl.static_range(CHUNKS):
            shifts = shifts + (_bias(bias, c, NUM_EXPERTS, CHUNK),)  # noqa: RUF005
    after_previous(OVERLAP)
    logits = ()
    for c in tl.static_range(CHUNKS):
        expert, is_expert = _experts(c, NUM_EXPERTS, CHUNK)
        logit = tl.zeros((1, CHUNK), tl.float32)
        for part in tl.static_range(PARTS):
            at = (part * num_rows + row) * NUM_EXPERTS + expert
            logit += tl.load(parts + at, mask=is_expert, other=0.0)
        logits = logits + (logit,)  # noqa: RUF005
    scores, orders = (), ()
    for c in tl.static_range(CHUNKS):
        expert, is_expert = _experts(c, NUM_EXPERTS, CHUNK)
        score = _sqrt_softplus(logits[c] * inverse_temperature)
        shift = shifts[c] if EARLY else _bias(bias, c, NUM_EXPERTS, CHUNK)
        if IMAGES:
            of_image = tl.load(is_image + row) != 0
            shift = tl.where(of_image, _bias(bias_image, c, NUM_EXPERTS, CHUNK), shift)
        # In the order of scores, NaN somewhere. A score is never −0, nor is then a sum with it.
        bits = (score + shift).to(tl.int32, bitcast=True)
        order = tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST + 1)
        scores = scores + (score,)  # noqa: RUF005
        orders = orders + (tl.where(is_expert, order, LEAST),)  # noqa: RUF005
    place = tl.arange(0, PLACES)[None, :]
    chosen = tl.zeros((1, PLACES), tl.int32)
    # Integers are compared across a warp in one instruction: first scores, then ids of equal ones.
    for i in tl.static_range(TOP_K):
        highest = orders[0]
        for c in tl.static_range(1, CHUNKS):
            highest = tl.maximum(highest, orders[c])
        best = tl.max(highest, axis=1)[:, None]
        id = tl.full((1, CHUNK), NOBODY, tl.int32)
        for c in tl.static_range(CHUNKS):
            expert, _ = _experts(c, NUM_EXPERTS, CHUNK)
            id = tl.minimum(id, tl.where(orders[c] == best, expert, NOBODY))
        id = tl.min(id, axis=1)[:, None]
        rest = ()
        for c in tl.static_range(CHUNKS):
            expert, _ = _experts(c, NUM_EXPERTS, CHUNK)
            rest = rest + (tl.where(expert == id, LEAST, orders[c]),)  # noqa: RUF005
        orders = rest
        chosen = tl.where(place == i, id, chosen)
    is_place = place < TOP_K
    of_chosen = tl.zeros((1, PLACES), tl.float32)
    for c in tl.static_range(CHUNKS):
        here = is_place & (chosen // CHUNK == c)
        of_chosen = tl.where(here, tl.gather(scores[c], chosen % CHUNK, axis=1), of_chosen)
    if TOP_K > 1:
        route_scale /= tl.sum(of_chosen, axis=1)[:, None] + SUM_EPS
    at = row * TOP_K + place
    tl.store(ids + at, chosen.to(tl.int64), mask=is_place)
    tl.store(weights + at, of_chosen * route_scale, mask=is_place)


def mega_gate(
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    bias_image: torch.Tensor | None,
    is_image: torch.Tensor | None,
    *,
    top_k: int,
    route_scale: float,
    gate_temp: float,
) -> Routing:
    """As the reference, whose arguments and result these are; ids are valid even for NaN scores.

    bfloat16 u and weight are multiplied as such, otherwise few rows in three TF32 products and many
    as the library multiplies float32; sums are float32. With float64, a gradient, or more than
    1024 experts the reference runs.
    """
    num_rows, num_experts = u.shape[0], weight.shape[0]
    too_many = top_k > num_experts or num_experts > 1024
    if too_many or needs_reference(u, weight, bias, bias_image):
        routing: Routing = OPERATORS["mega_gate"].reference(
            u, weight, bias, bias_image, is_image,
            top_k=top_k, route_scale=route_scale, gate_temp=gate_temp,
        )  # fmt: skip
        return routing
    ids = torch.empty(num_rows, top_k, dtype=torch.int64, device=u.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=u.device)
    if num_rows == 0:
        return Routing(ids, weights)
    overlap = overlaps(u.device)
    products = _library_logits if num_rows >= LIBRARY_ROWS else _part_logits
    parts = products(u, weight)
    images = bias_image is not None and is_image is not None
    chunk = min(_CHUNK, padded(num_experts))
    _choose[(num_rows,)](
        parts, bias, bias_image if images else bias,
        is_image.view(torch.uint8) if is_image is not None and images else ids,
        ids, weights, num_rows, route_scale, 1.0 / gate_temp,
        num_experts, top_k, triton.cdiv(num_experts, chunk), chunk, padded(top_k, 1), images,
        parts.shape[0], 1e-20, num_rows <= _FEW_ROWS, overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip
    return Routing(ids, weights)


def _part_logits(u: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [P, T, E]: the parts of the products of u [T, D] and weight [E, D]."""
    if takes_row(u, weight):
        return row_products(u, (weight,), torch.float32)[None]
    # A copy of the weights would be waited for.
    overlap = overlaps(u.device) and weight.stride(-1) == 1
    u, weight = unit_stride(u), unit_stride(weight)
    (num_rows, width), num_experts = u.shape, weight.shape[0]
    half = u.dtype == weight.dtype == torch.bfloat16
    depth = _DEPTH if half else _DEPTH // 2
    part = triton.cdiv(triton.cdiv(width, _PARTS), depth) * depth
    programs = triton.cdiv(width, part)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 64 else 64
    step = depth * (_EXPERT_TILE + rows) * (2 if half else 4)
    stages = max(2, min(5 if half else 2, limits(u.device).shared_memory // step - 1))
    parts = torch.empty(programs, num_rows, num_experts, dtype=torch.float32, device=u.device)
    # Weights of float32 would take twice the memory, and are multiplied in more steps.
    room = part * (_EXPERT_TILE + rows) * 2
    keep = half and num_rows <= _FEW_ROWS and room <= limits(u.device).shared_memory
    grid = (triton.cdiv(num_experts, _EXPERT_TILE), triton.cdiv(num_rows, rows), programs)
    _logits[grid](
        u, u.stride(0), weight, weight.stride(0), parts, num_rows, num_experts, width, part,
        _EXPERT_TILE, rows, depth, tl.bfloat16 if half else tl.float32, INTERPRETED and half,
        keep, _AHEAD, overlap, num_warps=4, num_stages=stages, launch_pdl=overlap,
    )  # fmt: skip
    return parts


def _library_logits(u: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [1, T, E]; bfloat16 operands are multiplied as such, into float32 sums."""
    if u.dtype == weight.dtype == torch.bfloat16 and not INTERPRETED:
        return torch.mm(u, weight.T, out_dtype=torch.float32)[None]
    return (u.float() @ weight.float().T)[None]
