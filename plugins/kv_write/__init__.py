"""Quantise rows and scatter them into a cache store."""

from plugins.kv_write.reference import kv_write, norm_and_write, rotated_write

__all__ = ["kv_write", "norm_and_write", "rotated_write"]
