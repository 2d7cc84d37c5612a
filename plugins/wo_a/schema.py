"""Contract of the grouped output projection."""

from plugins.schema import OperatorSchema, TensorSpec

SCHEMA = OperatorSchema(
    name="wo_a",
    inputs=(
        TensorSpec("o", ("T", "H", "d")),
        TensorSpec("weight", ("N", "H/groups*d"), kind="weight"),
    ),
    outputs=(TensorSpec("z", ("T", "N")),),
    attributes=("groups",),
    ties="rounding of the input to E4M3 is to nearest, ties to the even code",
    deterministic="a row depends on that row and the weight only (CPU: fixed row tiles)",
    source="technical report, attention output section; the released inference code",
)
