"""The plans of an engine: one for every exported segment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx

from builder.graph.export import read_options
from builder.plans.backend import PlanBackend, PlanRequest
from builder.plans.ranges import segment_ranges
from engine.config import ModelConfig
from engine.directory import BuildConfig
from engine.plans import PlanInfo, write_plans
from engine.segments import model_segments


def build_plans(
    directory: Path,
    config: ModelConfig,
    build: BuildConfig,
    backend: PlanBackend,
    report: Callable[[str], None],
) -> dict[str, PlanInfo]:
    """Build `<segment>.plan` beside every `<segment>.onnx` of `directory`, an engine's plans/, and
    describe them in plans.json; `report` gets lines for people. Raises PlanError."""
    report(f"plans by {backend.describe()}")
    plans = {}
    for segment in model_segments(config):
        graph = directory / f"{segment}.onnx"
        options = read_options(onnx.load(graph, load_external_data=False))
        ranges = segment_ranges(segment, config, build, options.layout(config))
        plan = backend.build(PlanRequest(graph, graph.with_suffix(".plan"), ranges))
        report(f"{segment}.plan: {plan.num_bytes / 2**20:,.1f} MiB in {plan.seconds:.1f} s")
        plans[segment] = plan
    write_plans(directory, plans)
    return plans
