"""The two precisions of a network: the compute dtype, and one of at least float32."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """What mixes, gates, compressors, the head and the Markov head compute in."""
    return torch.promote_types(dtype, torch.float32)
