"""Bytes of a cache row as integers of the dims, for code that must not import torch.

The same formulas as `records.py`, which a test holds against these.
"""

from __future__ import annotations


def main_row_bytes(head_dim: int) -> int:
    """Two E2M1 codes a byte and one E4M3 scale per 16 values: 288 at 512."""
    return head_dim // 2 + head_dim // 16


def window_row_bytes(head_dim: int) -> int:
    """One E4M3 code a byte and one E8M0 scale per 32 values: 528 at 512."""
    return head_dim + head_dim // 32


def index_row_bytes(index_head_dim: int) -> int:
    """Two E2M1 codes a byte and one E8M0 scale per 32 values: 68 at 128."""
    return index_head_dim // 2 + index_head_dim // 32
