"""The TensorRT plans of an engine: which library built each one, and what it may be given.

`plans/plans.json` describes the plans that lie beside it, one entry per segment. The engine's
manifest holds the hashes of all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.json_file import read_json
from engine.manifest import EngineError

PLANS_DIR = "plans"
PLANS_NAME = "plans.json"


@dataclass(frozen=True)
class Binding:
    """One tensor that a plan reads or writes.

    `shape` has −1 where a size may vary: for an input from `minimum` to `maximum`, tuned for
    `optimum`; an output has no ranges. `alias` is the input whose memory an output is (caches).
    """

    name: str
    is_input: bool
    dtype: str  # as torch names it
    shape: tuple[int, ...]
    minimum: tuple[int, ...] = ()
    optimum: tuple[int, ...] = ()
    maximum: tuple[int, ...] = ()
    alias: str | None = None

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Binding:
        ranges = ("shape", "minimum", "optimum", "maximum")
        return Binding(**{**raw, **{name: tuple(map(int, raw[name])) for name in ranges}})


@dataclass(frozen=True)
class PlanInfo:
    """One built plan. `compute_capabilities` are "9.0" or, for a whole generation, "8.x".
    `operators`: their digest of plugins/tensorrt_plugin.py, "" in a plan from before it."""

    library: str
    version: str
    compute_capabilities: tuple[str, ...]
    num_bytes: int
    seconds: float  # to parse and build
    bindings: tuple[Binding, ...]
    operators: str = ""

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> PlanInfo:
        bindings = tuple(map(Binding.from_json, raw["bindings"]))
        capabilities = tuple(map(str, raw["compute_capabilities"]))
        return PlanInfo(**{**raw, "bindings": bindings, "compute_capabilities": capabilities})

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether a GPU of compute capability major.minor can run the plan."""
        return bool({f"{major}.{minor}", f"{major}.x"} & set(self.compute_capabilities))


def plan_file(engine: Path, segment: str) -> Path:
    return engine / PLANS_DIR / f"{segment}.plan"


def write_plans(directory: Path, plans: Mapping[str, PlanInfo]) -> None:
    """Write plans.json into `directory`, an engine's plans/."""
    text = json.dumps({segment: asdict(plan) for segment, plan in plans.items()}, indent=1)
    (directory / PLANS_NAME).write_text(text)


def read_plans(engine: Path) -> dict[str, PlanInfo]:
    """Segment to plan, {} for an engine without plans. Raises EngineError for an altered file."""
    path = engine / PLANS_DIR / PLANS_NAME
    if not path.is_file():
        return {}
    try:
        raw = read_json(path)
        return {str(segment): PlanInfo.from_json(entry) for segment, entry in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EngineError(
            f"{path} was altered: expected the plans of an engine, found something else; "
            "build the engine again"
        ) from None
