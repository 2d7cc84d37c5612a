"""The indexer's scores, and the rounding of the queries."""

from plugins.indexer.reference import index_scores, round_queries
from plugins.indexer.slots import KeySlots, PagedSlots

__all__ = ["KeySlots", "PagedSlots", "index_scores", "round_queries"]
