"""Contract of the sparse attention."""

from __future__ import annotations

from plugins.schema import OperatorSchema, TensorSpec

MEGA_ATTENTION = OperatorSchema(
    name="mega_attention",
    inputs=(
        TensorSpec("q", ("T", "H", "d")),
        TensorSpec("positions", ("T",), "int64"),
        TensorSpec("inv_freq", ("R/2",), "float64"),
        TensorSpec("window", ("slots", "d"), "rows"),
        TensorSpec("window_slots", ("T", "W"), "int64"),
        TensorSpec("main", ("slots", "d"), "rows", optional=True),
        TensorSpec("main_slots", ("T", "K"), "int64", optional=True),
        TensorSpec("sink", ("H",)),
    ),
    outputs=(TensorSpec("o", ("T", "H", "d")),),
    attributes=("scale",),
    ties="none: the selection is an input; a token present in both key sets counts twice",
    deterministic="a row depends on its own query and keys only: fixed row and key tiles, whatever "
    "the other rows are and however many slots −1 pad the key sets at their end",
    source="technical report, compressed sparse attention with sliding window and attention sink",
)
