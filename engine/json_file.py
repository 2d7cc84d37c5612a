"""JSON from a file that anything may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The value in a UTF-8 file. Raises ValueError with the reason where there is none, OSError
    where the file cannot be read."""
    return parse_json(path.read_bytes())


def parse_json(text: bytes) -> Any:
    """The value of UTF-8 text. Raises ValueError with the reason where there is none."""
    try:
        return json.loads(text.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
