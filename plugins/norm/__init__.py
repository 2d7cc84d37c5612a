"""RMS normalisation."""

from plugins.norm.reference import rms_norm

__all__ = ["rms_norm"]
