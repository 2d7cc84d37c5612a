"""Stop strings in a text that arrives in pieces.

They are looked for in text, never in token ids: a stop string may span tokens and may begin or end
inside one. Text that may be the beginning of a stop string is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024


class Spoken(NamedTuple):
    """Text that is certain, and the stop string that ended it."""

    text: str
    stop: str | None


class StopStrings:
    """One answer's. With `include` the text ends behind the stop string, otherwise before it."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def feed(self, text: str, *, last: bool = False, armed: bool = True) -> Spoken:
        """What is certain after this text. A stop string that ends in it counts if `armed`; of
        several the one that ends first, of these the longest. `last` lets nothing be held back."""
        text = self._held + text
        if armed:
            found = [(text.find(stop), stop) for stop in self._stops]
            ends = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
            if ends:
                end, at, stop = min(ends)
                self._held = ""
                return Spoken(text[: end if self._include else at], stop)
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        certain = len(text) - held
        self._held = text[certain:]
        return Spoken(text[:certain], None)


def _overlap(text: str, stop: str) -> int:
    """The longest end of the text that begins the stop string and is not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
