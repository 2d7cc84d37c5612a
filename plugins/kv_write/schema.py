"""Contract of the cache write."""

from plugins.schema import OperatorSchema, TensorSpec

SCHEMA = OperatorSchema(
    name="kv_write",
    inputs=(
        TensorSpec("values", ("n", "width")),
        TensorSpec("rows", ("slots", "width"), kind="rows", aliased=True),
        TensorSpec("slots", ("n",), kind="int64"),
    ),
    outputs=(),
    attributes=(),
    ties="rounding to the record's format is to nearest, ties to the even code",
    deterministic="a stored row depends on that row only; non-negative slots must be distinct",
    source="technical report, cache section; the released inference code",
)
