"""The cache write: the store's record format is applied on the way in."""

from __future__ import annotations

import torch

from plugins.formats.rows import RowStore
from plugins.kv_write.schema import SCHEMA
from plugins.registry import operator


@operator(SCHEMA)
def kv_write(values: torch.Tensor, rows: RowStore, slots: torch.Tensor) -> None:
    """Store values [n, width] at distinct int64 slots [n] of `rows`; slots < 0 are dropped."""
    rows.write(slots, values)
