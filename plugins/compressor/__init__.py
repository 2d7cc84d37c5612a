"""The compressor's pooling of token pairs."""

from plugins.compressor.reference import pool_pairs, pooled_rows, previous_rows

__all__ = ["pool_pairs", "pooled_rows", "previous_rows"]
