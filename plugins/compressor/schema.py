"""Contract of the pair pooling."""

from __future__ import annotations

from plugins.schema import OperatorSchema, TensorSpec

POOL_PAIRS = OperatorSchema(
    name="pool_pairs",
    inputs=(TensorSpec("a", ("G", "2", "d")), TensorSpec("b", ("G", "2", "d"))),
    outputs=(TensorSpec("latent", ("G", "d")),),
    attributes=(),
    ties="none: nothing is selected",
    deterministic="elementwise: a pair depends on itself only",
    source="technical report, compressed sparse attention, compressor of ratio 2",
)
