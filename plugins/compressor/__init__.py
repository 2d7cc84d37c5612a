"""The compressor's pooling of token pairs."""

from plugins.compressor.reference import pool_pairs

__all__ = ["pool_pairs"]
