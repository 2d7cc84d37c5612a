"""Contract of token sampling."""

from plugins.schema import OperatorSchema, TensorSpec

SCHEMA = OperatorSchema(
    name="sample",
    inputs=(
        TensorSpec("logits", ("S", "V")),
        TensorSpec("temperature", ("S",)),
        TensorSpec("top_k", ("S",), kind="int64"),
        TensorSpec("top_p", ("S",)),
        TensorSpec("min_p", ("S",)),
        TensorSpec("seed", ("S",), kind="int64"),
        TensorSpec("output_index", ("S",), kind="int64"),
    ),
    outputs=(TensorSpec("token", ("S",), kind="int64"),),
    attributes=(),
    ties="of equal logits the lower token id ranks first: greedy, top-k and top-p alike",
    deterministic="a row's token depends on that row's operands only, never on the batch",
    source=(
        "nucleus sampling, arXiv 1904.09751; min-p, arXiv 2407.01082; Philox-4x32-10, Salmon et "
        "al., SC 2011"
    ),
)
