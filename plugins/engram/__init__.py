"""Engram: hashed n-gram memory."""

from plugins.engram.layout import EngramLayout, engram_layout
from plugins.engram.reference import engram_gate, engram_rows

__all__ = ["EngramLayout", "engram_gate", "engram_layout", "engram_rows"]
