"""Engram: hashed n-gram memory."""

from plugins.engram.layout import EngramLayout, engram_layout
from plugins.engram.reference import engram_gate, engram_lookup, engram_rows

__all__ = ["EngramLayout", "engram_gate", "engram_layout", "engram_lookup", "engram_rows"]
