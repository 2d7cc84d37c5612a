"""The indexer's scores."""

from plugins.indexer.reference import index_scores

__all__ = ["index_scores"]
