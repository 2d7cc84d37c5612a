"""The ratio-2 compressor's pooling: two tokens become one latent, channel by channel."""

from __future__ import annotations

import torch

from plugins.compressor.schema import POOL_PAIRS
from plugins.registry import operator


@operator(POOL_PAIRS)
def pool_pairs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Σ_t softmax_t(b)[g, t] · a[g, t] over the pair t, per channel.

    a (values) and b (gate logits) [G, 2, d]; returns [G, d] in at least float32, before the norm.
    """
    acc = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(acc), b.to(acc)
    e = torch.exp(b - b.amax(1, keepdim=True).detach())
    first, second = (e * a).unbind(1)
    weight_first, weight_second = e.unbind(1)
    return (first + second) / (weight_first + weight_second)
