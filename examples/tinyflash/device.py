"""What a float32 network runs on a CUDA device instead of the references: training's kernels.

The references take many passes and launches. Attention stays the reference, because training's
kernel reads no packed rows; products are float32, where training's own are TF32; networks of other
dtypes, and weights with NVFP4 inputs, keep the references.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

import engine.network  # noqa: F401  registers the operators
from plugins.registry import OPERATORS, Operator

DEVICES = ("cpu", "cuda")


def check(device: str) -> None:
    """Raises ValueError for a GPU that is not there."""
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError("expected a CUDA device, found none; use the device cpu")


@lru_cache(maxsize=1)
def install() -> None:
    """Take over the operators on CUDA tensors, once per process. ValueError without a GPU."""
    check("cuda")
    from examples.tinyflash.training import compiled

    own = {name: entry.__dict__.get("kernel") for name, entry in OPERATORS.items()}
    compiled.install()
    OPERATORS["mega_attention"].__dict__.pop("kernel")
    for name, entry in OPERATORS.items():
        kernel = entry.__dict__.get("kernel")
        if kernel is not own[name] and kernel is not None:
            entry.__dict__["kernel"] = _float32_only(entry, kernel)


def _float32_only(entry: Operator, kernel: Callable[..., Any]) -> Callable[..., Any]:
    is_rope = entry.schema.name == "rope"

    def run(first: torch.Tensor, *others: Any, **options: Any) -> Any:
        w4a4 = any(getattr(one, "input_scale", None) is not None for one in others)
        if w4a4 or first.dtype != torch.float32 or not first.shape[0]:
            return entry.reference(first, *others, **options)
        if is_rope:
            # An entry that begins before position 0 is written nowhere, but looks its angle up.
            others = (others[0].clamp(min=0), *others[1:])
        return kernel(first, *others, **options)

    return run
