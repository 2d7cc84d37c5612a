"""The expert gate in the Triton language; docs/kernels/mega_gate.md has its floor and layout.

Two launches: products of tokens and experts, then scores and choice. A row's sum over the width is
always made of the same parts, added in the same order; few rows spread the parts over programs,
many rows add them up inside one.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import INTERPRETED, needs_reference, padded, unit_stride
from plugins.mega_gate.reference import Routing
from plugins.registry import OPERATORS

# A row's products are added up in so many parts, whatever the number of rows.
_PARTS = 8
# Up to this many rows every part is a program of its own.
_SPREAD_ROWS = 1024
_EXPERT_TILE = 64
_DEPTH = 128


@triton.jit
def _logits(
    u, row_stride, weight, weight_stride, parts, num_rows, num_experts, part_width,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Partial sums [rows, experts] of PARTS parts of the width from part program_id(2) · PARTS."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_expert, is_row = expert < num_experts, row < num_rows
    of_expert = weight + expert[:, None].to(tl.int64) * weight_stride
    of_row = u + row[:, None].to(tl.int64) * row_stride
    total = tl.zeros((EXPERTS, ROWS), tl.float32)
    for part in range(PARTS):
        first = (tl.program_id(2) * PARTS + part) * part_width
        products = tl.zeros((EXPERTS, ROWS), tl.float32)
        for start in range(first, tl.minimum(first + part_width, WIDTH), DEPTH):
            column = start + tl.arange(0, DEPTH)
            there = (column < WIDTH)[None, :]
            w = tl.load(of_expert + column[None, :], mask=is_expert[:, None] & there, other=0.0)
            x = tl.load(of_row + column[None, :], mask=is_row[:, None] & there, other=0.0)
            w, x = w.to(DOT), x.to(DOT)
            if WIDEN:
                w, x = w.to(tl.float32), x.to(tl.float32)
            products = tl.dot(w, tl.trans(x), products, input_precision="tf32x3")
        total += products
    at = (tl.program_id(2).to(tl.int64) * num_rows + row)[None, :] * num_experts + expert[:, None]
    tl.store(parts + at, total, mask=is_expert[:, None] & is_row[None, :])


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + exp(x))); log1p(e) = 2·atanh(e / (2 + e)), e ≤ 1, keeps small scores exact."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    t = s * s
    series = 1.0 / 15.0 + t * (1.0 / 17.0)
    series = 1.0 / 11.0 + t * (1.0 / 13.0 + t * series)
    series = 1.0 / 7.0 + t * (1.0 / 9.0 + t * series)
    series = 1.0 + t * (1.0 / 3.0 + t * (1.0 / 5.0 + t * series))
    return tl.sqrt_rn(tl.maximum(x, 0.0) + 2.0 * s * series)


@triton.jit
def _choose(
    parts, bias, bias_image, is_image, ids, weights, num_rows, num_experts,
    route_scale, temperature, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, IMAGES: tl.constexpr,
    PARTS: tl.constexpr, SUM_EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    logit = tl.zeros((EXPERTS,), tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * num_rows + row) * num_experts + expert
        logit += tl.load(parts + at, mask=is_expert, other=0.0)
    score = _sqrt_softplus(tl.div_rn(logit, temperature))
    shift = tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)
    if IMAGES:
        of_image = is_expert & (tl.load(is_image + row) != 0)
        image_shift = tl.load(bias_image + expert, mask=of_image, other=0.0).to(tl.float32)
        shift = tl.where(of_image, image_shift, shift)
    biased = score + shift
    bits = tl.where(biased == 0.0, 0.0, biased).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # One comparison decides by score, then by the lower id; keys are distinct even for NaN.
    key = (order.to(tl.int64) << 32) | (EXPERTS - 1 - expert).to(tl.int64)
    key = tl.where(is_expert, key, -(1 << 63))
    place = tl.arange(0, EXPERTS)
    chosen = tl.zeros((EXPERTS,), tl.float32)
    total = 0.0
    for i in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        is_best = key == best
        value = tl.sum(tl.where(is_best, score, 0.0), axis=0)
        tl.store(ids + row * TOP_K + i, EXPERTS - 1 - (best & 0xFFFFFFFF))
        key = tl.where(is_best, -(1 << 63), key)
        chosen = tl.where(place == i, value, chosen)
        total += value
    if TOP_K > 1:
        chosen = tl.div_rn(chosen, tl.zeros_like(chosen) + (total + SUM_EPS))
    tl.store(weights + row * TOP_K + place, chosen * route_scale, mask=place < TOP_K)


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

    bfloat16 u and weight are multiplied as such, otherwise in three TF32 products; sums are
    float32. With float64, a gradient, or more than 1024 experts the reference runs.
    """
    num_rows, width = u.shape
    num_experts = weight.shape[0]
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
    u, weight = unit_stride(u), unit_stride(weight)
    spread = num_rows <= _SPREAD_ROWS
    programs = _PARTS if spread else 1
    parts = torch.empty(programs, num_rows, num_experts, dtype=torch.float32, device=u.device)
    rows = min(padded(num_rows), 64 if spread else 128)
    half = u.dtype == weight.dtype == torch.bfloat16
    grid = (triton.cdiv(num_experts, _EXPERT_TILE), triton.cdiv(num_rows, rows), programs)
    _logits[grid](
        u, u.stride(0), weight, weight.stride(0), parts, num_rows, num_experts,
        triton.cdiv(triton.cdiv(width, _PARTS), _DEPTH) * _DEPTH, width,
        _EXPERT_TILE, rows, _DEPTH if half else _DEPTH // 2, _PARTS // programs,
        tl.bfloat16 if half else tl.float32, INTERPRETED and half,
        num_warps=4, num_stages=4 if half else 2,
    )  # fmt: skip
    images = bias_image is not None and is_image is not None
    _choose[(num_rows,)](
        parts, bias, bias_image if images else bias,
        is_image.view(torch.uint8) if is_image is not None and images else ids,
        ids, weights, num_rows, num_experts, route_scale, gate_temp,
        top_k, padded(num_experts), images, programs, 1e-20, num_warps=1,
    )  # fmt: skip
    return Routing(ids, weights)
