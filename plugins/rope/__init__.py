"""Rotary position embedding on the last dims."""

from plugins.rope.reference import apply_rope

__all__ = ["apply_rope"]
