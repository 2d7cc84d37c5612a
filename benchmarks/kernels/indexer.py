"""Index scores at the released sizes: one row a request, verification, prefill, candidates."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import index_peers
import torch
from harness import DEVICE, Peers, Row, relative, rotations

from plugins.formats.records import index_record
from plugins.formats.rows import PackedRows
from plugins.indexer import PagedSlots, kernel
from plugins.registry import OPERATORS

HEADS, WIDTH, BLOCK, LISTED, PAGE = 32, 128, 8, 2048, 128  # as a pair source is served
KEY_BYTES = index_record(WIDTH).bytes_per_row
# Requests, rows a request, context → microseconds to stay below: 0.65 of the peer from 32K on.
DECODE = {
    (64, 1, 8192): 22.0,
    (64, 1, 32_768): 48.8,
    (64, 1, 131_072): 180.0,
    (64, 1, 524_288): 705.0,
    (16, 1, 524_288): 180.0,
    (64, 6, 32_768): None,
}
PREFILL = {(4096, 131_072): 5090.0}
CANDIDATES = {1: 5.0, 16: 20.0, 64: 60.0}


def operands(keys: PackedRows, requests: int, rows: int, context: int) -> dict[str, Any]:
    """`rows` of each request at the end of its context; keys in pages, shuffled."""
    pages, layout = keys.data.shape[0], keys.layout
    table = torch.randint(pages, (requests, -(-context // PAGE)), device=DEVICE)
    count = requests * rows
    queries = torch.randn(count, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    behind = torch.arange(rows - 1, -1, -1, device=DEVICE).repeat(requests)
    return {
        "queries": layout.round(queries),
        "head_weights": torch.randn(count, HEADS, device=DEVICE, dtype=torch.bfloat16),
        "keys": keys,
        "key_slots": PagedSlots(table * PAGE, PAGE, context),
        "request": torch.arange(requests, device=DEVICE).repeat_interleave(rows),
        "num_visible": context - behind,
    }


def expected_at(given: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
    """The reference in float32."""
    names = ("queries", "head_weights", "request", "num_visible")
    some = {**given, **{name: given[name][rows] for name in names}}
    scores: torch.Tensor = OPERATORS["index_scores"].reference(
        **{**some, "queries": some["queries"].float()}
    )
    return scores


def error(given: dict[str, Any]) -> float:
    """Of the first and the last row."""
    ours = kernel.index_scores(**given)
    ends = torch.tensor([0, len(ours) - 1], device=DEVICE)
    return relative(ours[ends], expected_at(given, ends))


def candidate_blocks(given: dict[str, Any], context: int) -> torch.Tensor:
    noise = torch.rand(len(given["queries"]), context // BLOCK, device=DEVICE)
    return noise.topk(min(LISTED, context // BLOCK), sorted=False).indices.sort(-1).values


def candidate_error(given: dict[str, Any], blocks: torch.Tensor) -> float:
    """Of the first and the last row, against the reference's scores of those entries."""
    ours = kernel.candidate_scores(**given, blocks=blocks, block_size=BLOCK)
    entries = (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten(1)
    ends = torch.tensor([0, len(ours) - 1], device=DEVICE)
    return relative(ours[ends], expected_at(given, ends).gather(1, entries[ends]))


def rows(peers: ModuleType | None) -> Iterator[Row]:
    layout = index_record(WIDTH)
    pages = (1 << 25) // PAGE if DEVICE == "cuda" else 64
    some = layout.pack(torch.randn(4096, WIDTH, device=DEVICE))
    data = some[torch.randint(4096, (pages, PAGE), device=DEVICE)]
    keys = PackedRows(layout.pages(data), layout)

    def row(case: str, shape: tuple[int, int, int], target: float | None, others: Peers) -> Row:
        requests, each, context = shape
        read = requests * context * (KEY_BYTES + 8 / PAGE)
        cost = read + requests * each * context * 4
        sets = [operands(keys, *shape) for _ in range(rotations(cost))]
        ours = [lambda given=given: kernel.index_scores(**given) for given in sets]
        flop = 2.0 * requests * each * context * HEADS * WIDTH
        return Row(
            "index_scores", case, cost, flop, ours, lambda: error(sets[0]), 1e-4,
            min(2, requests * each), target, others, "float8",
        )  # fmt: skip

    for shape, target in DECODE.items():
        requests, each, context = shape
        others: Peers = {}
        if peers and each == 1:
            others = {
                "deep_gemm.fp8_paged_mqa_logits": lambda n=requests, c=context: index_peers.paged(
                    peers, n, c
                )
            }
        yield row(f"decode {requests}x{each} of {context}", shape, target, others)
    for (count, context), target in PREFILL.items():
        others = {}
        if peers:
            others = {
                "deep_gemm.fp8_mqa_logits": lambda n=count, c=context: index_peers.prompt(
                    peers, n, c
                )
            }
        yield row(f"prefill {count} of {context}", (1, count, context), target, others)
    for requests, target in CANDIDATES.items():
        context = 131_072 if DEVICE == "cuda" else 1024
        cost = requests * LISTED * (BLOCK * (KEY_BYTES + 4) + 8 + 8)
        given = [operands(keys, requests, 1, context) for _ in range(rotations(cost))]
        blocks = [candidate_blocks(one, context) for one in given]
        ours = [
            lambda g=g, b=b: kernel.candidate_scores(**g, blocks=b, block_size=BLOCK)
            for g, b in zip(given, blocks, strict=True)
        ]
        others = {}
        if peers:
            others = {
                "gather + deep_gemm.fp8_paged_mqa_logits": (
                    lambda n=requests, c=context: index_peers.gathered(peers, n, c, LISTED)
                )
            }
        yield Row(
            "candidate_scores", f"{requests}x{LISTED * BLOCK} of {context}", cost,
            2.0 * requests * LISTED * BLOCK * HEADS * WIDTH, ours,
            lambda g=given, b=blocks: candidate_error(g[0], b[0]), 1e-6,
            min(2, requests), target, others, "float8",
        )  # fmt: skip
