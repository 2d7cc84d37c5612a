"""A linear weight as the operators read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LinearWeight:
    """A dense weight [N, K] in the compute dtype.

    `quantized_input`: the layer was released in FP8 or FP4, so its input is rounded to MXFP8 in
    groups of 32 first. That is model semantics; whoever loads the weight decides it, and a
    diagnostic run loads with False.
    """

    value: torch.Tensor
    quantized_input: bool
