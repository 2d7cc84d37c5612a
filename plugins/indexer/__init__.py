"""The indexer's scores, and the rounding of the queries."""

from plugins.indexer.reference import index_scores, round_queries

__all__ = ["index_scores", "round_queries"]
