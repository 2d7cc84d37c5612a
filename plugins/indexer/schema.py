"""Contracts of the index scores and of their queries."""

from __future__ import annotations

from plugins.schema import OperatorSchema, TensorSpec

INDEX_SCORES = OperatorSchema(
    name="index_scores",
    inputs=(
        TensorSpec("queries", ("T", "h", "dk")),
        TensorSpec("head_weights", ("T", "h")),
        TensorSpec("keys", ("slots", "dk"), "rows"),
        TensorSpec("key_slots", ("R", "n"), "int64"),
        TensorSpec("request", ("T",), "int64"),
        TensorSpec("num_visible", ("T",), "int64"),
    ),
    outputs=(TensorSpec("scores", ("T", "n"), "wide"),),
    attributes=(),
    ties="none: nothing is selected; with few heads many scores are exactly 0",
    deterministic="a row depends on its own query and visible keys only: fixed row and key tiles "
    "of one product shape, whatever the other rows are and whatever n pads the keys to",
    source="technical report, compressed sparse attention, lightning indexer",
)

CANDIDATE_TOPK = OperatorSchema(
    name="candidate_topk",
    inputs=(*INDEX_SCORES.inputs, TensorSpec("blocks", ("T", "B"), "int64")),
    outputs=(TensorSpec("selected", ("T", "min(k,n)"), "int64"),),
    attributes=("k", "block_size"),
    ties="of equal scores the lower index wins",
    deterministic=INDEX_SCORES.deterministic,
    source="technical report, compressed sparse attention, level two of the two-level selection",
)

ROUND_QUERIES = OperatorSchema(
    name="round_queries",
    inputs=(TensorSpec("queries", ("T", "h", "dk")),),
    outputs=(TensorSpec("rounded", ("T", "h", "dk")),),
    attributes=("layout",),
    ties="rounding to the record's format is to nearest, ties to the even code",
    deterministic="a head's query depends on itself only",
    source="technical report, compressed sparse attention, FP4 index keys and queries",
)

INDEX_QUERIES = OperatorSchema(
    name="index_queries",
    inputs=(
        TensorSpec("queries", ("T", "h", "dk")),
        TensorSpec("head_weights", ("T", "h")),
        TensorSpec("positions", ("T",), "int64"),
        TensorSpec("inv_freq", ("R/2",), "float64"),
    ),
    outputs=(
        TensorSpec("turned", ("T", "h", "dk")),
        TensorSpec("scaled_weights", ("T", "h")),
    ),
    attributes=("layout", "scale"),
    ties=ROUND_QUERIES.ties,
    deterministic="a head's query depends on itself and its row's position only",
    source=ROUND_QUERIES.source,
    composite=True,
)
