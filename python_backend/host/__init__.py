"""The Triton server as a process of ours: its files, its model repository, its life and leftovers.

The model itself runs inside that process and knows nothing of this package.
"""
