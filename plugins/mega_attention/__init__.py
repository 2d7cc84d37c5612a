"""Sparse attention over window and compressed entries."""

from plugins.mega_attention.reference import mega_attention

__all__ = ["mega_attention"]
