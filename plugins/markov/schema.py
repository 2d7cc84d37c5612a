"""Contract of the greedy choice behind a token."""

from plugins.schema import OperatorSchema, TensorSpec

SCHEMA = OperatorSchema(
    name="markov_choice",
    inputs=(
        TensorSpec("base", ("R", "V"), kind="wide"),
        TensorSpec("correction", ("R", "V"), kind="wide"),
        TensorSpec("embed", ("V", "rank")),
    ),
    outputs=(
        TensorSpec("token", ("R",), kind="int64"),
        TensorSpec("row", ("R", "rank")),
    ),
    attributes=(),
    ties="of equal sums the first column wins, of several NaNs too",
    deterministic="a row depends on its own sums and the embedding only",
    source="technical report, section on DSpark",
    composite=True,
)
