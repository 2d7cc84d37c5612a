"""Contract of the RMS normalisation."""

from plugins.schema import OperatorSchema, TensorSpec

SCHEMA = OperatorSchema(
    name="norm",
    inputs=(TensorSpec("x", ("...", "D")), TensorSpec("weight", ("D",))),
    outputs=(TensorSpec("y", ("...", "D")),),
    attributes=("eps",),
    ties="none: no comparison is made",
    deterministic="a row depends on that row and the weight only",
    source="RMSNorm, arXiv 1910.07467; eps 1e-20 as in the released configuration",
)
