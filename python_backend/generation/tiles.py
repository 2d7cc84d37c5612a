"""Rows in pieces that a CPU's cache holds.

Temporaries of a megabyte stay in the cache, and the allocator keeps their memory; those of a whole
step are page faults most of all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]

_ELEMENTS = 1 << 17


def tiles(rows: Int64Array, logits: torch.Tensor) -> list[Int64Array]:
    """`rows` of logits [L, V] to work on at once: on a CPU few, elsewhere all."""
    size = max(1, len(rows))
    if logits.device.type == "cpu":
        size = max(1, _ELEMENTS // logits.shape[-1])
    return [rows[start : start + size] for start in range(0, len(rows), size)]
