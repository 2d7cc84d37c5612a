"""One line of progress on stderr for work that takes longer than a moment."""

from __future__ import annotations

import sys
import time
from typing import Literal, TextIO

_REPORT_EVERY_S = 2.0


class Progress:
    """Counts one piece of work at a time and reports every two seconds.

    On a terminal the line is rewritten in place; elsewhere each report is a line of its own.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty()
        self._title = ""
        self._unit, self._scale = "MiB", 2**20
        self._total = self._done = 0
        self._started = self._reported = 0.0

    def start(
        self, title: str, total: int, unit: Literal["MiB", "tokens", "kernels"] = "MiB"
    ) -> None:
        """`total` and what `advance` adds are bytes, or what `unit` says."""
        self._title, self._total, self._done = title, total, 0
        self._unit, self._scale = unit, 2**20 if unit == "MiB" else 1
        self._started = self._reported = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._reported >= _REPORT_EVERY_S:
            self._reported = now
            self._report(end="" if self._in_place else "\n")

    def finish(self) -> None:
        if self._in_place or time.monotonic() - self._started >= _REPORT_EVERY_S:
            self._report(end="\n")

    def _report(self, end: str) -> None:
        share = self._done / self._total if self._total else 1.0
        rate = self._done / max(time.monotonic() - self._started, 1e-9)
        line = (
            f"{self._title}: {share:4.0%} of {self._total / self._scale:,.0f} {self._unit}, "
            f"{rate / self._scale:,.0f} {self._unit}/s"
        )
        self._stream.write(("\r" if self._in_place else "") + line + end)
        self._stream.flush()
