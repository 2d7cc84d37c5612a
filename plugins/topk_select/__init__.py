"""Exact top-k selection and the candidate blocks of the two-level indexer."""

from plugins.topk_select.reference import candidate_blocks, topk_of_blocks, topk_select

__all__ = ["candidate_blocks", "topk_of_blocks", "topk_select"]
