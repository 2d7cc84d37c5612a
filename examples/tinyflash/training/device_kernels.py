"""Memory-bound operators of training in the Triton language, with their gradients.

Each is one pass over memory where the references take many. All tensors are float32.
"""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_MIX_ROWS = 32


# -- hyper-connections ----------------------------------------------------------------------------


@triton.jit
def _mix_forward(
    z, base, scale, pre, post, comb, sums, num_rows, eps,
    S: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i, j = tl.arange(0, S), tl.arange(0, S)
    at = row[:, None] * (S * (S + 2)) + j[None, :]
    inside = row[:, None] < num_rows
    x = tl.load(z + at, mask=inside, other=0.0) * tl.load(scale) + tl.load(base + j)[None, :]
    tl.store(pre + row[:, None] * S + j[None, :], 1.0 / (1.0 + tl.exp(-x)) + eps, mask=inside)
    x = tl.load(z + at + S, mask=inside, other=0.0) * tl.load(scale + 1)
    x += tl.load(base + S + j)[None, :]
    tl.store(post + row[:, None] * S + j[None, :], 2.0 / (1.0 + tl.exp(-x)), mask=inside)
    cell = i[None, :, None] * S + j[None, None, :]
    inside = row[:, None, None] < num_rows
    x = tl.load(z + row[:, None, None] * (S * (S + 2)) + 2 * S + cell, mask=inside, other=0.0)
    x = x * tl.load(scale + 2) + tl.load(base + 2 * S + cell)
    x = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
    c = x / tl.sum(x, axis=2, keep_dims=True) + eps
    total = tl.sum(c, axis=1, keep_dims=True) + eps
    c = c / total
    kept = row[:, None, None] * ((2 * ITERATIONS - 1) * S)
    tl.store(sums + kept + j[None, None, :], total, mask=inside)
    for n in range(1, ITERATIONS):
        total_i = tl.sum(c, axis=2, keep_dims=True) + eps
        c = c / total_i
        tl.store(sums + kept + (2 * n - 1) * S + i[None, :, None], total_i, mask=inside)
        total_j = tl.sum(c, axis=1, keep_dims=True) + eps
        c = c / total_j
        tl.store(sums + kept + 2 * n * S + j[None, None, :], total_j, mask=inside)
    tl.store(comb + row[:, None, None] * (S * S) + cell, c, mask=inside)


@triton.jit
def _mix_backward(
    pre, post, comb, sums, grad_pre, grad_post, grad_comb, grad, num_rows, eps,
    S: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """grad [T, S·(S + 2)]: the gradient of scale · z + base."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i, j = tl.arange(0, S), tl.arange(0, S)
    at = row[:, None] * S + j[None, :]
    inside = row[:, None] < num_rows
    out = row[:, None] * (S * (S + 2)) + j[None, :]
    s = tl.load(pre + at, mask=inside, other=0.0) - eps
    g = tl.load(grad_pre + at, mask=inside, other=0.0)
    tl.store(grad + out, g * s * (1.0 - s), mask=inside)
    s = tl.load(post + at, mask=inside, other=0.0)
    g = tl.load(grad_post + at, mask=inside, other=0.0)
    tl.store(grad + out + S, g * s * (1.0 - 0.5 * s), mask=inside)
    cell = i[None, :, None] * S + j[None, None, :]
    inside = row[:, None, None] < num_rows
    c = tl.load(comb + row[:, None, None] * (S * S) + cell, mask=inside, other=0.0)
    g = tl.load(grad_comb + row[:, None, None] * (S * S) + cell, mask=inside, other=0.0)
    kept = row[:, None, None] * ((2 * ITERATIONS - 1) * S)
    # Each normalisation is undone by multiplying its sums back.
    for back in range(1, ITERATIONS):
        n = ITERATIONS - back
        total_j = tl.load(sums + kept + 2 * n * S + j[None, None, :], mask=inside, other=1.0)
        g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / total_j
        c = c * total_j
        total_i = tl.load(sums + kept + (2 * n - 1) * S + i[None, :, None], mask=inside, other=1.0)
        g = (g - tl.sum(g * c, axis=2, keep_dims=True)) / total_i
        c = c * total_i
    total = tl.load(sums + kept + j[None, None, :], mask=inside, other=1.0)
    g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / total
    c = c * total - eps
    g = c * (g - tl.sum(g * c, axis=2, keep_dims=True))
    tl.store(grad + row[:, None, None] * (S * (S + 2)) + 2 * S + cell, g, mask=inside)


class Mix(torch.autograd.Function):
    """pre [T, S], post [T, S], comb [T, S, S] of z [T, S·(S + 2)], base and scale as in hc_mix."""

    @staticmethod
    def forward(
        ctx: Any,
        z: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        streams: int,
        iterations: int,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = len(z)
        z = z.contiguous()
        pre, post = z.new_empty(rows, streams), z.new_empty(rows, streams)
        comb = z.new_empty(rows, streams, streams)
        sums = z.new_empty(rows, 2 * iterations - 1, streams)
        _mix_forward[(triton.cdiv(rows, _MIX_ROWS),)](
            z, base, scale, pre, post, comb, sums, rows, eps,
            streams, iterations, _MIX_ROWS, num_warps=1,
        )  # fmt: skip
        ctx.save_for_backward(z, scale, pre, post, comb, sums)
        ctx.iterations, ctx.eps = iterations, eps
        return pre, post, comb

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        z, scale, pre, post, comb, sums = ctx.saved_tensors
        rows, streams = pre.shape
        grad = torch.empty_like(z)
        _mix_backward[(triton.cdiv(rows, _MIX_ROWS),)](
            pre, post, comb, sums, *(g.contiguous() for g in grads), grad, rows, ctx.eps,
            streams, ctx.iterations, _MIX_ROWS, num_warps=1,
        )  # fmt: skip
        sizes = (streams, streams, streams * streams)
        per_column = torch.cat([scale[k : k + 1].expand(n) for k, n in enumerate(sizes)])
        by_column = (grad * z).sum(0)
        grad_scale = torch.stack([part.sum() for part in by_column.split(sizes)])
        return grad * per_column, grad.sum(0), grad_scale, None, None, None


@triton.jit
def _collapse_forward(streams, pre, out, S: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0)
    s, d = tl.arange(0, S), tl.arange(0, D)
    x = tl.load(streams + row * (S * D) + s[:, None] * D + d[None, :])
    p = tl.load(pre + row * S + s)
    tl.store(out + row * D + d, tl.sum(x * p[:, None], axis=0))


@triton.jit
def _collapse_backward(
    streams, pre, grad_out, grad_streams, grad_pre, S: tl.constexpr, D: tl.constexpr
):
    row = tl.program_id(0)
    s, d = tl.arange(0, S), tl.arange(0, D)
    at = row * (S * D) + s[:, None] * D + d[None, :]
    x = tl.load(streams + at)
    p = tl.load(pre + row * S + s)
    g = tl.load(grad_out + row * D + d)
    tl.store(grad_streams + at, p[:, None] * g[None, :])
    tl.store(grad_pre + row * S + s, tl.sum(x * g[None, :], axis=1))


class Collapse(torch.autograd.Function):
    """Σ_s pre[t, s] · streams[t, s], [T, D]; S and D powers of two."""

    @staticmethod
    def forward(ctx: Any, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        streams, pre = streams.contiguous(), pre.contiguous()
        rows, size, width = streams.shape
        out = streams.new_empty(rows, width)
        _collapse_forward[(rows,)](streams, pre, out, size, width, num_warps=2)
        ctx.save_for_backward(streams, pre)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        streams, pre = ctx.saved_tensors
        rows, size, width = streams.shape
        grad_streams, grad_pre = torch.empty_like(streams), torch.empty_like(pre)
        _collapse_backward[(rows,)](
            streams, pre, grads[0].contiguous(), grad_streams, grad_pre, size, width, num_warps=2
        )
        return grad_streams, grad_pre


@triton.jit
def _expand_forward(streams, y, post, comb, out, S: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0)
    i, j, d = tl.arange(0, S), tl.arange(0, S), tl.arange(0, D)
    x = tl.load(streams + row * (S * D) + i[:, None] * D + d[None, :])
    c = tl.load(comb + row * (S * S) + i[:, None] * S + j[None, :])
    new = tl.load(post + row * S + j)[:, None] * tl.load(y + row * D + d)[None, :]
    new += tl.sum(x[:, None, :] * c[:, :, None], axis=0)
    tl.store(out + row * (S * D) + j[:, None] * D + d[None, :], new)


@triton.jit
def _expand_backward(
    streams, y, post, comb, grad_out, grad_streams, grad_y, grad_post, grad_comb,
    S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    i, j, d = tl.arange(0, S), tl.arange(0, S), tl.arange(0, D)
    x = tl.load(streams + row * (S * D) + i[:, None] * D + d[None, :])
    g = tl.load(grad_out + row * (S * D) + j[:, None] * D + d[None, :])
    c = tl.load(comb + row * (S * S) + i[:, None] * S + j[None, :])
    p = tl.load(post + row * S + j)
    value = tl.load(y + row * D + d)
    tl.store(grad_y + row * D + d, tl.sum(p[:, None] * g, axis=0))
    tl.store(grad_post + row * S + j, tl.sum(g * value[None, :], axis=1))
    tl.store(
        grad_comb + row * (S * S) + i[:, None] * S + j[None, :],
        tl.sum(x[:, None, :] * g[None, :, :], axis=2),
    )
    tl.store(
        grad_streams + row * (S * D) + i[:, None] * D + d[None, :],
        tl.sum(c[:, :, None] * g[None, :, :], axis=1),
    )


class Expand(torch.autograd.Function):
    """New stream j = post[t, j] · y[t] + Σ_i comb[t, i, j] · streams[t, i], [T, S, D]."""

    @staticmethod
    def forward(
        ctx: Any, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        saved = tuple(t.contiguous() for t in (streams, y, post, comb))
        rows, size, width = streams.shape
        out = torch.empty_like(saved[0])
        _expand_forward[(rows,)](*saved, out, size, width, num_warps=2)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        saved = ctx.saved_tensors
        rows, size, width = saved[0].shape
        results = tuple(torch.empty_like(t) for t in saved)
        _expand_backward[(rows,)](*saved, grads[0].contiguous(), *results, size, width, num_warps=2)
        return results


# -- rotary embedding -----------------------------------------------------------------------------


@triton.jit
def _rotate(
    x, positions, cos, sin, out, sign,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """P: a power of two from max(R / 2, D − R) on."""
    row = tl.program_id(0)
    h, k = tl.arange(0, H), tl.arange(0, P)
    head = row * (H * D) + h[:, None] * D
    plain = head + k[None, :]
    keep = (k < D - R)[None, :]
    tl.store(out + plain, tl.load(x + plain, mask=keep, other=0.0), mask=keep)
    pair = (k < R // 2)[None, :]
    position = tl.load(positions + row)
    c = tl.load(cos + position * (R // 2) + k, mask=k < R // 2, other=0.0)[None, :]
    s = tl.load(sin + position * (R // 2) + k, mask=k < R // 2, other=0.0)[None, :] * sign
    at = head + (D - R) + 2 * k[None, :]
    even = tl.load(x + at, mask=pair, other=0.0)
    odd = tl.load(x + at + 1, mask=pair, other=0.0)
    tl.store(out + at, even * c - odd * s, mask=pair)
    tl.store(out + at + 1, even * s + odd * c, mask=pair)


class Rotate(torch.autograd.Function):
    """x [T, H, d], its last 2·n dims rotated by the angles of table rows cos, sin [P, n]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sign: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(positions, cos, sin)
        ctx.sign = sign
        return _turned(x, positions, cos, sin, sign)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        positions, cos, sin = ctx.saved_tensors
        return _turned(grads[0], positions, cos, sin, -ctx.sign), None, None, None, None


def _turned(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float
) -> torch.Tensor:
    x = x.contiguous()
    rows, heads, width = x.shape
    rotated = 2 * cos.shape[1]
    padded = triton.next_power_of_2(max(width - rotated, rotated // 2))
    out = torch.empty_like(x)
    _rotate[(rows,)](x, positions, cos, sin, out, sign, heads, width, rotated, padded, num_warps=1)
    return out


# -- experts --------------------------------------------------------------------------------------


@triton.jit
def _swiglu_forward(
    products, weights, out, limit, E: tl.constexpr, N: tl.constexpr, P: tl.constexpr
):
    row, expert = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, P)
    at = row * (2 * E * N) + expert * N + n
    gate = tl.minimum(tl.load(products + at, mask=n < N, other=0.0), limit)
    up = tl.load(products + at + E * N, mask=n < N, other=0.0)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    weight = tl.load(weights + row * E + expert)
    a = gate / (1.0 + tl.exp(-gate)) * up * weight
    tl.store(out + row * (E * N) + expert * N + n, a, mask=n < N)


@triton.jit
def _swiglu_backward(
    products, weights, grad_out, grad_products, grad_weights, limit,
    E: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    row, expert = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, P)
    at = row * (2 * E * N) + expert * N + n
    raw_gate = tl.load(products + at, mask=n < N, other=0.0)
    raw_up = tl.load(products + at + E * N, mask=n < N, other=0.0)
    gate = tl.minimum(raw_gate, limit)
    up = tl.minimum(tl.maximum(raw_up, -limit), limit)
    g = tl.load(grad_out + row * (E * N) + expert * N + n, mask=n < N, other=0.0)
    weight = tl.load(weights + row * E + expert)
    s = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(grad_weights + row * E + expert, tl.sum(g * gate * s * up, axis=0))
    g = g * weight
    grad_gate = tl.where(raw_gate <= limit, g * up * s * (1.0 + gate * (1.0 - s)), 0.0)
    grad_up = tl.where(tl.abs(raw_up) <= limit, g * gate * s, 0.0)
    tl.store(grad_products + at, grad_gate, mask=n < N)
    tl.store(grad_products + at + E * N, grad_up, mask=n < N)


class WeightedSwiglu(torch.autograd.Function):
    """products [T, 2·E·N] (gates of all experts, then ups), weights [T, E] → [T, E·N]."""

    @staticmethod
    def forward(
        ctx: Any, products: torch.Tensor, weights: torch.Tensor, limit: float
    ) -> torch.Tensor:
        products, weights = products.contiguous(), weights.contiguous()
        rows, experts = weights.shape
        inter = products.shape[1] // (2 * experts)
        ctx.save_for_backward(products, weights)
        ctx.limit, ctx.sizes = limit, (experts, inter, triton.next_power_of_2(inter))
        out = products.new_empty(rows, experts * inter)
        _swiglu_forward[(rows, experts)](products, weights, out, limit, *ctx.sizes, num_warps=1)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        products, weights = ctx.saved_tensors
        grad_products, grad_weights = torch.empty_like(products), torch.empty_like(weights)
        _swiglu_backward[weights.shape](
            products, weights, grads[0].contiguous(), grad_products, grad_weights,
            ctx.limit, *ctx.sizes, num_warps=1,
        )  # fmt: skip
        return grad_products, grad_weights, None
