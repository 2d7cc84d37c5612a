"""Contracts of the selection operators."""

from __future__ import annotations

from plugins.schema import OperatorSchema, TensorSpec

TOPK_SELECT = OperatorSchema(
    name="topk_select",
    inputs=(TensorSpec("scores", ("T", "n")),),
    outputs=(TensorSpec("selected", ("T", "min(k,n)"), "int64"),),
    attributes=("k",),
    ties="of equal scores the lower index wins",
    deterministic="exact: a row depends on its own scores only, whatever n pads it to",
    source="technical report, compressed sparse attention, top-k selection",
)

TOPK_OF_BLOCKS = OperatorSchema(
    name="topk_of_blocks",
    inputs=(TensorSpec("scores", ("T", "n")), TensorSpec("blocks", ("T", "B"), "int64")),
    outputs=(TensorSpec("selected", ("T", "min(k,n)"), "int64"),),
    attributes=("k", "block_size"),
    ties=TOPK_SELECT.ties,
    deterministic=TOPK_SELECT.deterministic,
    source="technical report, compressed sparse attention, level two of the two-level selection",
)

CANDIDATE_BLOCKS = OperatorSchema(
    name="candidate_blocks",
    inputs=(TensorSpec("scores", ("T", "n")), TensorSpec("num_visible", ("T",), "int64")),
    outputs=(TensorSpec("blocks", ("T", "min(num_blocks,ceil(n/block_size))"), "int64"),),
    attributes=("block_size", "num_blocks"),
    ties="of equal block scores the lower block wins; the newest block is always in",
    deterministic=TOPK_SELECT.deterministic,
    source="technical report, compressed sparse attention, level one of the two-level selection",
)
