"""The contract between builder and backend: what an engine is and what it computes."""
