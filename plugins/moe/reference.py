"""Mixture of experts: clamped SwiGLU experts, routed ones weighted before the down projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.elementwise import silu
from plugins.formats import mxfp8
from plugins.linear.tiles import row_tiled
from plugins.moe.schema import MOE
from plugins.registry import operator


@dataclass(frozen=True)
class ExpertWeights:
    """E experts of one layer; w1 is the gated projection, w3 the linear one, w2 leads back.

    quantized_input: the experts were trained on MXFP8 activations (groups of 32), so their inputs
    are rounded to it before both products.
    """

    w1: torch.Tensor  # [E, I, D]
    w3: torch.Tensor  # [E, I, D]
    w2: torch.Tensor  # [E, D, I]
    quantized_input: bool


@operator(MOE)
def moe(
    u: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    routed: ExpertWeights,
    shared: ExpertWeights,
    *,
    swiglu_limit: float,
) -> torch.Tensor:
    """Σ over the chosen experts plus all shared ones (weight 1), [T, D] in u's dtype.

    u [T, D]; ids [T, k] int64, distinct within a row and in 0 … E − 1; weights [T, k]. Sums are
    kept in at least float32 and cast once. Experts that no row chose do no work.
    """
    acc = torch.promote_types(u.dtype, torch.float32)
    weights = weights.to(acc)
    total = torch.zeros_like(u, dtype=acc)
    # unbind, not indexing: its gradient is one stack instead of one full-size tensor per expert.
    w1, w3, w2 = routed.w1.unbind(0), routed.w3.unbind(0), routed.w2.unbind(0)
    for expert in torch.unique(ids).tolist():
        rows, column = (ids == expert).nonzero(as_tuple=True)
        activation = _activation(
            u[rows], w1[expert], w3[expert], routed.quantized_input, swiglu_limit
        )
        y = _down(
            activation * weights[rows, column].unsqueeze(-1),
            w2[expert],
            routed.quantized_input,
            u.dtype,
        )
        total = total.index_add(0, rows, y)
    for shared_w1, shared_w3, shared_w2 in zip(shared.w1, shared.w3, shared.w2, strict=True):
        activation = _activation(u, shared_w1, shared_w3, shared.quantized_input, swiglu_limit)
        total = total + _down(activation, shared_w2, shared.quantized_input, u.dtype)
    return total.to(u.dtype)


def _activation(
    u: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, quantized_input: bool, limit: float
) -> torch.Tensor:
    """silu(min(u·w1, limit)) · clamp(u·w3, ±limit), [n, I] in at least float32."""
    acc = torch.promote_types(u.dtype, torch.float32)
    gate_weight, linear_weight = w1.to(acc).T, w3.to(acc).T

    def swiglu(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(acc)
        linear = (rows @ linear_weight).clamp(-limit, limit)
        return silu((rows @ gate_weight).clamp(max=limit)) * linear

    return row_tiled(mxfp8.ACTIVATION.round(u) if quantized_input else u, swiglu)


def _down(
    activation: torch.Tensor, w2: torch.Tensor, quantized_input: bool, dtype: torch.dtype
) -> torch.Tensor:
    """activation, cast to the compute `dtype` as the model does, through w2: [n, D] widened."""
    weight = w2.to(activation.dtype).T
    narrow = activation.to(dtype)
    if quantized_input:
        narrow = mxfp8.ACTIVATION.round(narrow)
    return row_tiled(narrow, lambda rows: rows.to(weight.dtype) @ weight)
