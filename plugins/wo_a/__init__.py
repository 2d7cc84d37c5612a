"""Grouped first half of the attention output projection."""

from plugins.wo_a.reference import wo_a

__all__ = ["wo_a"]
