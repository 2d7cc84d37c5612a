"""The expert gate: sqrt-softplus scores, biased selection, unbiased weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from plugins.elementwise import softplus
from plugins.linear.tiles import row_tiled
from plugins.mega_gate.schema import MEGA_GATE
from plugins.registry import operator

# Keeps the normalisation finite when every chosen score is 0, as the released code does.
_SUM_EPS = 1e-20


class Routing(NamedTuple):
    """The experts of each token, by descending biased score."""

    ids: torch.Tensor  # [T, k] int64, distinct within a row
    weights: torch.Tensor  # [T, k] in at least float32


@operator(MEGA_GATE)
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
    """Choose `top_k` of E experts for each row of `u` [T, D]; weight [E, D], biases [E].

    The bias (bias_image where is_image [T]) moves the choice only, never the weights. Weights are
    normalised to sum to `route_scale`, except for top_k = 1, where they are route_scale · score.
    Scores must be finite. Raises ValueError when there are fewer experts than `top_k`.
    """
    num_experts = weight.shape[0]
    if top_k > num_experts:
        raise ValueError(
            f"expected top_k of at most {num_experts}, the number of experts, got {top_k}; "
            "lower num_experts_per_tok"
        )
    acc = torch.promote_types(u.dtype, torch.float32)
    gate_weight = weight.to(acc).T
    logits = row_tiled(u, lambda rows: rows.to(acc) @ gate_weight)
    scores = softplus(logits / gate_temp).sqrt()
    choice_bias = bias.to(acc)
    if bias_image is not None and is_image is not None:
        choice_bias = torch.where(is_image.unsqueeze(-1), bias_image.to(acc), choice_bias)
    biased = (scores + choice_bias).detach()
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _SUM_EPS)
    return Routing(ids, weights * route_scale)
