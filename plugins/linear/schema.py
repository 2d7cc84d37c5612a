"""Contracts of the linear layer, of two of the same input, and of wide ones."""

from plugins.schema import OperatorSchema, TensorSpec

SCHEMA = OperatorSchema(
    name="linear",
    inputs=(TensorSpec("x", ("T", "K")), TensorSpec("weight", ("N", "K"), kind="weight")),
    outputs=(TensorSpec("y", ("T", "N")),),
    attributes=(),
    ties="rounding of the input to E4M3 is to nearest, ties to the even code",
    deterministic="a row depends on that row and the weight only (CPU: fixed row tiles)",
    source="technical report, FP8 section; the released inference code",
)

LINEAR_PAIR = OperatorSchema(
    name="linear_pair",
    inputs=(
        TensorSpec("x", ("T", "K")),
        TensorSpec("first", ("N", "K"), kind="weight"),
        TensorSpec("second", ("M", "K"), kind="weight"),
    ),
    outputs=(TensorSpec("of_first", ("T", "N")), TensorSpec("of_second", ("T", "M"))),
    attributes=(),
    ties=SCHEMA.ties,
    deterministic=SCHEMA.deterministic,
    source=SCHEMA.source,
    composite=True,
)

WIDE_LINEAR = OperatorSchema(
    name="wide_linear",
    inputs=(TensorSpec("x", ("T", "K")), TensorSpec("weight", ("N", "K"), kind="weight")),
    outputs=(TensorSpec("y", ("T", "N"), kind="wide"),),
    attributes=(),
    ties=SCHEMA.ties,
    deterministic=SCHEMA.deterministic,
    source=SCHEMA.source,
    composite=True,
)

WIDE_PAIR = OperatorSchema(
    name="wide_linear_pair",
    inputs=LINEAR_PAIR.inputs,
    outputs=(TensorSpec("y", ("T", "N+M"), kind="wide"),),
    attributes=(),
    ties=SCHEMA.ties,
    deterministic=SCHEMA.deterministic,
    source=SCHEMA.source,
    composite=True,
)
