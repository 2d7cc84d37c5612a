"""Fuse the memory-bound operators of a training step with torch.compile on a CUDA device."""

from __future__ import annotations

import torch

from plugins.registry import OPERATORS

FUSED = ("hc_mix", "hc_collapse", "hc_expand", "norm", "engram_gate")


def compile_operators() -> None:
    """Install the compiled references as the device implementations of `FUSED`."""
    torch._dynamo.config.cache_size_limit = 128
    for name in FUSED:
        entry = OPERATORS[name]
        entry.__dict__["kernel"] = torch.compile(entry.reference, dynamic=True)
