"""The mixture of experts."""

from plugins.moe.reference import ExpertWeights, PackedExpertWeights, moe

__all__ = ["ExpertWeights", "PackedExpertWeights", "moe"]
