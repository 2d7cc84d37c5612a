"""The two paged pools, their tables and the prefix cache, on numpy arrays. Imports no torch."""
