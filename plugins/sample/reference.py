"""Greedy choice, or temperature → top-k → top-p → one draw by the inverse distribution."""

from __future__ import annotations

import torch

from plugins.registry import operator
from plugins.sample.philox import uniform
from plugins.sample.schema import SCHEMA


@operator(SCHEMA)
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    output_index: torch.Tensor,
) -> torch.Tensor:
    """One token per row of logits [S, V]; the other operands are [S]. Returns int64 [S].

    temperature 0 is greedy, top_k 0 and top_p ≥ 1 are off. top_k keeps the k largest logits, then
    top_p the smallest prefix of descending probabilities, renormalised after top_k, whose mass
    reaches top_p; one token always stays. Logits may be −inf (a forbidden token), at least one per
    row must be finite, NaN and +inf are the caller's error. The draw is a function of
    (seed, output_index) and walks the kept tokens in id order, in float64.
    """
    token = logits.argmax(-1)
    drawn = (temperature > 0).nonzero().squeeze(-1)
    if drawn.numel() == 0:
        return token
    scaled = logits[drawn].to(torch.float64) / temperature[drawn, None].to(torch.float64)
    weight = (scaled - scaled.amax(-1, keepdim=True)).exp()
    limited = ((top_k[drawn] > 0) | (top_p[drawn] < 1)).nonzero().squeeze(-1)
    if limited.numel():
        rows = drawn[limited]
        weight[limited] = _keep(weight[limited], scaled[limited], top_k[rows], top_p[rows])
    mass = weight.cumsum(-1)
    total = mass[:, -1:]
    target = uniform(seed[drawn], output_index[drawn]).unsqueeze(-1) * total
    # The product may round up to the total, where no token begins.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    token[drawn] = (
        torch.searchsorted(mass, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    )
    return token


def _keep(
    weight: torch.Tensor, scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """`weight` [S, V] with zeros outside the top-k and top-p sets, in id order."""
    order = scaled.argsort(dim=-1, descending=True, stable=True)
    ranked = weight.gather(-1, order)
    rank = torch.arange(weight.shape[-1], device=weight.device)
    limit = torch.where(top_k > 0, top_k, weight.shape[-1]).unsqueeze(-1)
    ranked = ranked.masked_fill(rank >= limit, 0.0)
    mass = ranked.cumsum(-1)
    before = mass - ranked
    needed = torch.where(top_p < 1, top_p.to(mass.dtype), float("inf")).unsqueeze(-1)
    dropped = (before >= needed * mass[:, -1:]) & (rank > 0)
    return torch.zeros_like(weight).scatter(-1, order, ranked.masked_fill(dropped, 0.0))
