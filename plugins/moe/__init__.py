"""The mixture of experts."""

from plugins.moe.reference import ExpertWeights, moe

__all__ = ["ExpertWeights", "moe"]
