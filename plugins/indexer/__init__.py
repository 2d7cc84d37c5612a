"""The indexer's scores, the selection among candidates, and the rounding of the queries."""

from plugins.indexer.reference import (
    candidate_topk,
    index_queries,
    index_scores,
    round_queries,
)
from plugins.indexer.slots import KeySlots, PagedSlots

__all__ = [
    "KeySlots",
    "PagedSlots",
    "candidate_topk",
    "index_queries",
    "index_scores",
    "round_queries",
]
