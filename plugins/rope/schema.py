"""Contract of the rotary embedding."""

from plugins.schema import OperatorSchema, TensorSpec

SCHEMA = OperatorSchema(
    name="rope",
    inputs=(
        TensorSpec("x", ("T", "...", "d")),
        TensorSpec("positions", ("T",), kind="int64"),
        TensorSpec("inv_freq", ("R/2",), kind="float64"),
    ),
    outputs=(TensorSpec("y", ("T", "...", "d")),),
    attributes=("inverse",),
    ties="none: no comparison is made",
    deterministic="a row depends on that row and its position only",
    source="RoPE, arXiv 2104.09864, adjacent pairs; the released inference code",
)
