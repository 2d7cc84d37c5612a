"""Sigmoid, softplus and SiLU whose value for one element depends on that element only.

torch's own CPU kernels for these three use a vector routine for the bulk of a tensor and a scalar
one for its remainder; the two differ in the last bit, so a token's result would depend on how many
tokens share the batch. `exp`, `log1p`, `sqrt` and `rsqrt` have no such seam.
"""

from __future__ import annotations

import math

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(−x)). Inputs below the exponent range give the smallest normal number."""
    # Without the floor exp overflows and the gradient becomes 0 · inf.
    floor = math.log(torch.finfo(x.dtype).tiny)
    return 1.0 / (1.0 + torch.exp(-x.clamp(min=floor)))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), without overflow."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))
