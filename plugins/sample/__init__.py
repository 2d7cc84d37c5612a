"""Sampling of the next token."""

from plugins.sample.philox import uniform
from plugins.sample.reference import sample

__all__ = ["sample", "uniform"]
