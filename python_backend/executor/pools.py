"""The memory of the caches that limits ask for."""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from engine.paged_cache import CachePools
from python_backend.settings import CoreLimits


def pools_of(
    config: ModelConfig,
    limits: CoreLimits,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    quantize: bool = True,
) -> CachePools:
    """Pools of a model that computes in `dtype`, all zeros."""
    return CachePools(
        config,
        num_global_pages=limits.num_global_pages,
        num_window_pages=limits.num_window_pages,
        num_slots=limits.max_batch_size,
        global_page_tokens=limits.global_page_tokens,
        window_page_rows=limits.window_page_tokens,
        dtype=dtype,
        quantize=quantize,
        device=device,
    )
