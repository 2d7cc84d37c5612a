"""Index scores at the released sizes: one row a request, verification, prefill, candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from harness import DEVICE, Row, relative, rotations

from plugins.formats.records import index_record
from plugins.formats.rows import PackedRows
from plugins.indexer import PagedSlots, kernel
from plugins.registry import OPERATORS

HEADS, WIDTH, BLOCK, LISTED, PAGE = 32, 128, 8, 2048, 64
KEY_BYTES = index_record(WIDTH).bytes_per_row
# Requests, rows a request, context → microseconds to stay below: 0.65 of the peer from 32K on.
DECODE = {
    (64, 1, 8192): 22.0,
    (64, 1, 32_768): 48.8,
    (64, 1, 131_072): 180.0,
    (16, 1, 524_288): None,
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


def deep_gemm(peers: ModuleType, requests: int, context: int, sets: int) -> list[Callable]:
    """DeepGEMM's paged logits on FP8 keys of 132 bytes; its schedule is outside, as once a step."""
    cache = peers.random_index_cache(requests * context // 64, 64, 3)
    q = torch.randn(requests, 1, HEADS, WIDTH, device=DEVICE).to(torch.float8_e4m3fn)
    weights = torch.randn(requests, HEADS, device=DEVICE)
    lengths = torch.full((requests, 1), context, dtype=torch.int32, device=DEVICE)
    schedule = peers.paged_mqa_schedule(lengths)

    def one() -> Callable:
        shape = (requests, context // 64)
        table = torch.randint(len(cache), shape, dtype=torch.int32, device=DEVICE)
        return lambda: peers.paged_mqa_logits(q, cache, weights, lengths, table, schedule, context)

    return [one() for _ in range(sets)]


def rows(peers: ModuleType | None) -> Iterator[Row]:
    layout = index_record(WIDTH)
    pages = (1 << 23) // PAGE if DEVICE == "cuda" else 64
    some = layout.pack(torch.randn(4096, WIDTH, device=DEVICE))
    data = some[torch.randint(4096, (pages * PAGE,), device=DEVICE)]
    keys = PackedRows(data.view(pages, PAGE, KEY_BYTES), layout)

    def row(case: str, shape: tuple[int, int, int], target: float | None, theirs: Any) -> Row:
        requests, each, context = shape
        read = requests * context * (KEY_BYTES + 8 / PAGE)
        cost = read + requests * each * context * 4
        sets = [operands(keys, *shape) for _ in range(rotations(cost))]
        ours = [lambda given=given: kernel.index_scores(**given) for given in sets]
        flop = 2.0 * requests * each * context * HEADS * WIDTH
        peer = "deep_gemm.fp8_paged_mqa_logits"
        return Row(
            "index_scores", case, cost, flop, ours, lambda: error(sets[0]), 1e-4, target, peer,
            theirs, "float8",
        )  # fmt: skip

    for shape, target in DECODE.items():
        requests, each, context = shape
        theirs = []
        if peers is not None and each == 1:
            sets = rotations(requests * context * (KEY_BYTES + 12))
            theirs = deep_gemm(peers, requests, context, sets)
        yield row(f"decode {requests}x{each} of {context}", shape, target, theirs)
    for (count, context), target in PREFILL.items():
        yield row(f"prefill {count} of {context}", (1, count, context), target, [])
    for requests, target in CANDIDATES.items():
        context = 131_072 if DEVICE == "cuda" else 1024
        cost = requests * LISTED * (BLOCK * (KEY_BYTES + 4) + 8 + 8)
        given = [operands(keys, requests, 1, context) for _ in range(rotations(cost))]
        blocks = [candidate_blocks(one, context) for one in given]
        ours = [
            lambda g=g, b=b: kernel.candidate_scores(**g, blocks=b, block_size=BLOCK)
            for g, b in zip(given, blocks, strict=True)
        ]
        yield Row(
            "candidate_scores", f"{requests}x{LISTED * BLOCK} of {context}", cost,
            2.0 * requests * LISTED * BLOCK * HEADS * WIDTH, ours,
            lambda g=given, b=blocks: candidate_error(g[0], b[0]), 1e-6, target, unit="float8",
        )  # fmt: skip
