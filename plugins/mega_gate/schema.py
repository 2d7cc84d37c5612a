"""Contract of the expert gate."""

from __future__ import annotations

from plugins.schema import OperatorSchema, TensorSpec

MEGA_GATE = OperatorSchema(
    name="mega_gate",
    inputs=(
        TensorSpec("u", ("T", "D")),
        TensorSpec("weight", ("E", "D")),
        TensorSpec("bias", ("E",)),
        TensorSpec("bias_image", ("E",), optional=True),
        TensorSpec("is_image", ("T",), "bool", optional=True),
    ),
    outputs=(
        TensorSpec("ids", ("T", "top_k"), "int64"),
        TensorSpec("weights", ("T", "top_k"), "wide"),
    ),
    attributes=("top_k", "route_scale", "gate_temp"),
    ties="of equal biased scores the lower expert id wins",
    deterministic="a row depends on its own input only; fixed row tiles on the CPU; on a GPU the "
    "order of its sums also on the number of rows: one, fewer than 512, or each from there on",
    source="technical report, DeepSeekMoE with auxiliary-loss-free balancing (arXiv 2408.15664)",
)
