"""Hyper-connections between S residual streams: mix, collapse, expand.

A sublayer computes its mix from the streams before it; `post` and `comb` write the sublayer's
output back, while `pre` is consumed by the NEXT sublayer's collapse. That order lets one kernel do
expand, the next mix, collapse and norm in one pass over the streams: that is `mega_mhc`. Nothing
needs the mix before the sublayer's output is there: `hc_advance` leaves it out, to be made beside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from plugins.elementwise import sigmoid
from plugins.linear.tiles import row_tiled
from plugins.mega_mhc.schema import HC_ADVANCE, HC_COLLAPSE, HC_EXPAND, HC_MIX, MEGA_MHC
from plugins.norm import rms_norm
from plugins.registry import operator


class HcMix(NamedTuple):
    """Coefficients of one sublayer, in at least float32. comb[t, i, j]: source i, destination j."""

    pre: torch.Tensor  # [T, S]
    post: torch.Tensor  # [T, S]
    comb: torch.Tensor  # [T, S, S]


@operator(HC_MIX)
def hc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> HcMix:
    """Mixing coefficients of `streams` [T, S, D].

    fn [S·(2+S), S·D], base [S·(2+S)] and scale [3] hold the pre, post and comb parts in this
    order. comb is a softmax over destinations followed by `sinkhorn_iters` normalisations, the
    last one over columns, so columns sum to 1 within hc_eps.
    """
    num_rows, S, _ = streams.shape
    acc = torch.promote_types(streams.dtype, torch.float32)
    weight = fn.to(acc).T

    def project(flat: torch.Tensor) -> torch.Tensor:
        flat = flat.to(acc)
        return (flat @ weight) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)

    z = row_tiled(streams.flatten(1), project)
    base, scale = base.to(acc), scale.to(acc)
    pre = sigmoid(z[:, :S] * scale[0] + base[:S]) + hc_eps
    post = 2.0 * sigmoid(z[:, S : 2 * S] * scale[1] + base[S : 2 * S])
    logits = (z[:, 2 * S :] * scale[2] + base[2 * S :]).view(num_rows, S, S)
    comb = torch.exp(logits - logits.amax(-1, keepdim=True).detach())
    comb = comb / comb.sum(-1, keepdim=True) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return HcMix(pre, post, comb)


@operator(HC_COLLAPSE)
def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Σ_s pre[t, s] · streams[t, s], [T, D] in the streams' dtype."""
    acc = torch.promote_types(streams.dtype, torch.float32)
    terms = pre.to(acc).unsqueeze(-1) * streams.to(acc)
    return _ordered_sum(terms.unbind(1)).to(streams.dtype)


@operator(HC_EXPAND)
def hc_expand(
    streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """New stream j = post[t, j] · y[t] + Σ_i comb[t, i, j] · streams[t, i], [T, S, D]."""
    acc = torch.promote_types(streams.dtype, torch.float32)
    injected = post.to(acc).unsqueeze(-1) * y.to(acc).unsqueeze(1)
    wide, comb = streams.to(acc), comb.to(acc)
    mixed = _ordered_sum(
        tuple(comb[:, i, :, None] * wide[:, i, None, :] for i in range(streams.shape[1]))
    )
    return (injected + mixed).to(streams.dtype)


@operator(HC_ADVANCE)
def hc_advance(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    norm: torch.Tensor,
    *,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What mega_mhc makes, without the mix: (streams [T, S, D], u [T, D])."""
    expanded = hc_expand(streams, y, post, comb)
    return expanded, rms_norm(hc_collapse(expanded, pre), norm, norm_eps)


@operator(MEGA_MHC)
def mega_mhc(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, HcMix, torch.Tensor]:
    """From one sublayer's output to the next one's input: (streams [T, S, D], mix, u [T, D]).

    y, post and comb as in hc_expand; fn, base and scale are the next sublayer's, as in hc_mix; pre
    [T, S] collapses the expanded streams, norm [D] normalises the result.
    """
    expanded = hc_expand(streams, y, post, comb)
    mix = hc_mix(
        expanded, fn, base, scale,
        sinkhorn_iters=sinkhorn_iters, hc_eps=hc_eps, norm_eps=norm_eps,
    )  # fmt: skip
    return expanded, mix, rms_norm(hc_collapse(expanded, pre), norm, norm_eps)


def _ordered_sum(terms: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Left to right: a matrix product over so few terms may round differently per batch size."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
