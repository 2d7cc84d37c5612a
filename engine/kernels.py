"""The compiled kernels of an engine: for which GPUs, and by which compiler.

`kernels/kernels.json` describes the directories beside it, one per target; their files are those
of plugins/device/store.py. The engine's manifest holds the hashes of all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.json_file import read_json
from engine.manifest import EngineError

KERNELS_DIR = "kernels"
KERNELS_NAME = "kernels.json"


@dataclass(frozen=True)
class KernelsInfo:
    """The kernels of one target, such as sm_90. `triton`: the Triton language's version."""

    dtype: str  # that steps compute in
    triton: str
    python: str  # whose build of it that was, such as 3.12
    count: int
    num_bytes: int
    seconds: float  # to find out which ones there are, and to compile them


def kernels_dir(engine: Path) -> Path:
    return engine / KERNELS_DIR


def write_kernels(engine: Path, kernels: Mapping[str, KernelsInfo]) -> None:
    """Write kernels.json, target to kernels."""
    text = json.dumps({target: asdict(info) for target, info in kernels.items()}, indent=1)
    (kernels_dir(engine) / KERNELS_NAME).write_text(text)


def read_kernels(engine: Path) -> dict[str, KernelsInfo]:
    """Target to kernels, {} for an engine without any. Raises EngineError for an altered file."""
    path = kernels_dir(engine) / KERNELS_NAME
    if not path.is_file():
        return {}
    try:
        return {str(target): KernelsInfo(**entry) for target, entry in read_json(path).items()}
    except (ValueError, TypeError, AttributeError):
        raise EngineError(
            f"{path} was altered: expected the kernels of an engine, found something else; "
            "build the engine again"
        ) from None
