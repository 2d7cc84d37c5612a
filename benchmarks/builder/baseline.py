"""Committed results: one JSON line each, told apart by some of their keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def keep(path: Path, line: str, keys: Sequence[str]) -> None:
    """Put the line into the file, in the place of the one with equal `keys` where there is one."""

    def key(text: str) -> list[Any]:
        loaded = json.loads(text)
        return [loaded[name] for name in keys]

    lines = path.read_text().splitlines() if path.is_file() else []
    place = next((i for i, old in enumerate(lines) if key(old) == key(line)), len(lines))
    lines[place : place + 1] = [line]
    path.write_text("\n".join(lines) + "\n")
