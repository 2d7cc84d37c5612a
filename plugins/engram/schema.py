"""Contracts of the Engram operators."""

from __future__ import annotations

from plugins.schema import OperatorSchema, TensorSpec

ENGRAM_ROWS = OperatorSchema(
    name="engram_rows",
    inputs=(
        TensorSpec("tokens", ("T",), "int64"),
        TensorSpec("request", ("T",), "int64"),
        TensorSpec("query_start", ("R+1",), "int64"),
        TensorSpec("history", ("R", "n-1"), "int64"),
        TensorSpec("token_class", ("vocab",), "int64"),
    ),
    outputs=(TensorSpec("rows", ("T", "len(layout.primes)"), "int64"),),
    attributes=("layout", "pad_class", "dead_token_id"),
    ties="none: nothing is selected",
    deterministic="exact integers; a row depends on its own and the n − 1 previous tokens",
    source="technical report, Engram (arXiv 2601.07372), multiplicative-xor n-gram hash",
)

ENGRAM_GATE = OperatorSchema(
    name="engram_gate",
    inputs=(
        TensorSpec("streams", ("T", "S", "D")),
        TensorSpec("keys", ("T", "S", "D")),
        TensorSpec("value", ("T", "D")),
        TensorSpec("q_weight", ("S", "D")),
        TensorSpec("k_weight", ("S", "D")),
        TensorSpec("alive", ("T",), "bool", optional=True),
    ),
    outputs=(TensorSpec("streams", ("T", "S", "D")),),
    attributes=("norm_eps",),
    ties="none: nothing is selected",
    deterministic="a row depends on its own inputs only",
    source="technical report, Engram (arXiv 2601.07372), context-aware gate",
)

ENGRAM_LOOKUP = OperatorSchema(
    name="engram_lookup",
    inputs=(
        TensorSpec("table", ("slots", "width"), "rows"),
        TensorSpec("rows", ("T", "columns"), "int64"),
    ),
    outputs=(TensorSpec("memory", ("T", "columns*width")),),
    attributes=("dtype",),
    ties="none: nothing is selected",
    deterministic="a copy: a row depends on its own table rows only",
    source="technical report, Engram (arXiv 2601.07372), lookup",
)
