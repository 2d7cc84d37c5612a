"""Progress of a long command, on standard error."""

from __future__ import annotations

import sys
import time

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line every five seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = 0.0

    def __call__(self, message: str, *, last: bool = False) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{message}" + ("\n" if last else ""))
            sys.stderr.flush()
        elif last or time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
            print(message, file=sys.stderr, flush=True)
