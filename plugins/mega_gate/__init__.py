"""The expert gate."""

from plugins.mega_gate.reference import Routing, mega_gate

__all__ = ["Routing", "mega_gate"]
