"""Sparse attention of training in the Triton language, with its gradient.

The joint softmax over a row's window and its selected entries, without gathering keys in memory;
the gradients of the keys are summed with atomics.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILE = 32


@triton.jit
def _tile_scores(query, keys, slots, scale):
    return tl.where((slots >= 0)[None, :], tl.dot(query, tl.trans(keys)) * scale, float("-inf"))


@triton.jit
def _attend_tile(query, rows, slots, scale, peak, total, out, D: tl.constexpr):
    """One more tile of keys in a running softmax."""
    d = tl.arange(0, D)
    keys = tl.load(rows + slots[:, None] * D + d[None, :], mask=(slots >= 0)[:, None], other=0.0)
    scores = _tile_scores(query, keys, slots, scale)
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    shrink = tl.exp(peak - higher)
    p = tl.exp(scores - higher[:, None])
    return higher, total * shrink + tl.sum(p, axis=1), out * shrink[:, None] + tl.dot(p, keys)


@triton.jit
def _attention_forward(
    q, window, window_slots, main, main_slots, sink, o, lse, scale,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
    HAS_MAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, 16), tl.arange(0, D)
    is_head = h < H
    q_at = row * (H * D) + h[:, None] * D + d[None, :]
    query = tl.load(q + q_at, mask=is_head[:, None], other=0.0)
    peak = tl.load(sink + h, mask=is_head, other=0.0)
    total = tl.full((16,), 1.0, tl.float32)
    out = tl.zeros((16, D), tl.float32)
    slots = tl.load(window_slots + row * W + tl.arange(0, W))
    peak, total, out = _attend_tile(query, window, slots, scale, peak, total, out, D)
    if HAS_MAIN:
        for first in range(0, K, TILE):
            more = tl.load(main_slots + row * K + first + tl.arange(0, TILE))
            if tl.max(more, axis=0) >= 0:
                peak, total, out = _attend_tile(query, main, more, scale, peak, total, out, D)
    tl.store(o + q_at, out / total[:, None], mask=is_head[:, None])
    tl.store(lse + row * H + h, peak + tl.log(total), mask=is_head)


@triton.jit
def _key_gradients(query, out_grad, rows, slots, lse, delta, scale, grad_rows, D: tl.constexpr):
    d = tl.arange(0, D)
    at, there = slots[:, None] * D + d[None, :], (slots >= 0)[:, None]
    keys = tl.load(rows + at, mask=there, other=0.0)
    p = tl.exp(_tile_scores(query, keys, slots, scale) - lse[:, None])
    ds = p * (tl.dot(out_grad, tl.trans(keys)) - delta[:, None]) * scale
    grad = tl.dot(tl.trans(ds), query) + tl.dot(tl.trans(p), out_grad)
    tl.atomic_add(grad_rows + at, grad, mask=there, sem="relaxed")
    return tl.dot(ds, keys)


@triton.jit
def _attention_backward(
    q, window, window_slots, main, main_slots, o, lse, grad_o,
    grad_q, grad_window, grad_main, delta_out, scale,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
    HAS_MAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, 16), tl.arange(0, D)
    is_head = h < H
    q_at = row * (H * D) + h[:, None] * D + d[None, :]
    query = tl.load(q + q_at, mask=is_head[:, None], other=0.0)
    out = tl.load(o + q_at, mask=is_head[:, None], other=0.0)
    out_grad = tl.load(grad_o + q_at, mask=is_head[:, None], other=0.0)
    log_sum = tl.load(lse + row * H + h, mask=is_head, other=0.0)
    delta = tl.sum(out * out_grad, axis=1)
    slots = tl.load(window_slots + row * W + tl.arange(0, W))
    dq = _key_gradients(query, out_grad, window, slots, log_sum, delta, scale, grad_window, D)
    if HAS_MAIN:
        for first in range(0, K, TILE):
            more = tl.load(main_slots + row * K + first + tl.arange(0, TILE))
            if tl.max(more, axis=0) >= 0:
                dq += _key_gradients(
                    query, out_grad, main, more, log_sum, delta, scale, grad_main, D
                )
    tl.store(grad_q + q_at, dq, mask=is_head[:, None])
    tl.store(delta_out + row * H + h, delta, mask=is_head)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        window: torch.Tensor,
        window_slots: torch.Tensor,
        main: torch.Tensor | None,
        main_slots: torch.Tensor | None,
        sink: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        q, window, window_slots = q.contiguous(), window.contiguous(), window_slots.contiguous()
        has_main = main is not None and main_slots is not None
        entries = main.contiguous() if main is not None else window
        entry_slots = main_slots.contiguous() if main_slots is not None else window_slots
        rows, heads, dim = q.shape
        o, lse = torch.empty_like(q), q.new_empty(rows, heads)
        selected = entry_slots.shape[1]
        sizes = (heads, dim, window_slots.shape[1], selected, min(selected, _TILE), has_main)
        _attention_forward[(rows,)](
            q, window, window_slots, entries, entry_slots, sink, o, lse, scale, *sizes, num_warps=2
        )
        ctx.save_for_backward(q, window, window_slots, entries, entry_slots, sink, o, lse)
        ctx.scale, ctx.sizes = scale, sizes
        return o

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, window, window_slots, entries, entry_slots, sink, o, lse = ctx.saved_tensors
        grad_o = grads[0].contiguous()
        grad_q, grad_window, delta = (
            torch.empty_like(q),
            torch.zeros_like(window),
            torch.empty_like(lse),
        )
        has_main = ctx.sizes[-1]
        grad_main = torch.zeros_like(entries) if has_main else grad_window
        _attention_backward[(len(q),)](
            q, window, window_slots, entries, entry_slots, o, lse, grad_o,
            grad_q, grad_window, grad_main, delta, ctx.scale, *ctx.sizes, num_warps=2,
        )  # fmt: skip
        grad_sink = -(torch.exp(sink - lse) * delta).sum(0)
        main_grad = grad_main if has_main else None
        return grad_q, grad_window, None, main_grad, None, grad_sink, None


def sparse_attention(
    q: torch.Tensor,
    window: torch.Tensor,
    window_slots: torch.Tensor,
    main: torch.Tensor | None,
    main_slots: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`mega_attention` between the rotations, float32.

    q [T, H, d] rotated, H ≤ 16; window and main rows [n, d]; slots [T, W] and [T, K], W and K
    powers of two from 16 on, −1 where there is no key; sink [H].
    """
    result: torch.Tensor = _SparseAttention.apply(
        q, window, window_slots, main, main_slots, sink, scale
    )
    return result
