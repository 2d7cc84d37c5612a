"""Sparse attention at the released sizes: decode, verification of five drafts, prefill."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from attention_peers import decode_peers, prefill_peers
from harness import DEVICE, Peers, Row, relative, rotations

from plugins.formats.records import RecordLayout, main_record, window_record
from plugins.formats.rows import PackedRows
from plugins.mega_attention import kernel
from plugins.registry import OPERATORS

HEADS, WIDTH, ROTATED, WINDOW, SELECTED = 64, 512, 64, 128, 512
ROW_BYTES = SELECTED * 288 + WINDOW * 528 + 2 * 2 * HEADS * WIDTH + 8 * (SELECTED + WINDOW)
ROW_FLOP = 2 * 2 * HEADS * (SELECTED + WINDOW) * WIDTH
# Microseconds of the best peer on an H200, and what we want to stay below.
DECODE = {
    (1, 1): 10.7,
    (8, 1): 14.6,
    (64, 1): 44.9,
    (256, 1): 86.0,
    (64, 6): 126.0,
    (256, 6): 490.0,
}
PREFILL = {4096: 780.0, 16_384: 3256.0}


def pool(rows: int, layout: RecordLayout, rows_per_page: int) -> PackedRows:
    """Random rows of standard deviation one, in pages."""
    layout_rows = layout.pack(torch.randn(256, WIDTH, device=DEVICE))
    data = layout_rows[torch.randint(256, (rows,), device=DEVICE)]
    return PackedRows(data.view(-1, rows_per_page, layout.bytes_per_row), layout)


def operands(rows: int, main: PackedRows, window: PackedRows) -> dict[str, Any]:
    entries, places = (s.data.shape[0] * s.data.shape[1] for s in (main, window))
    start = torch.randint(places - WINDOW, (rows, 1), device=DEVICE)
    pair = torch.arange(ROTATED // 2, dtype=torch.float64, device=DEVICE)
    return {
        "q": torch.randn(rows, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16),
        "positions": torch.randint(1 << 20, (rows,), device=DEVICE),
        "inv_freq": 10000.0 ** (-2.0 * pair / ROTATED),
        "window": window,
        "window_slots": start + torch.arange(WINDOW, device=DEVICE),
        "main": main,
        "main_slots": torch.randint(entries, (rows, SELECTED), device=DEVICE),
        "sink": torch.randn(HEADS, device=DEVICE),
        "scale": WIDTH**-0.5,
    }


def error(given: dict[str, Any]) -> float:
    """Of at most sixteen rows, against the reference in float32."""
    some = {
        name: x[:16] if name in ("q", "positions", "window_slots", "main_slots") else x
        for name, x in given.items()
    }
    expected = OPERATORS["mega_attention"].reference(**{**some, "q": some["q"].float()})
    return relative(kernel.mega_attention(**given)[:16], expected)


def rows(peers: ModuleType | None) -> Iterator[Row]:
    entries, places = (1 << 20, 1 << 16) if DEVICE == "cuda" else (1 << 12, 1 << 10)
    main, window = pool(entries, main_record(WIDTH), 64), pool(places, window_record(WIDTH), 32)

    def row(case: str, count: int, target: float, others: Peers) -> Row:
        sets = [operands(count, main, window) for _ in range(rotations(count * ROW_BYTES))]
        ours = [lambda given=given: kernel.mega_attention(**given) for given in sets]
        return Row(
            "mega_attention", case, count * ROW_BYTES, count * ROW_FLOP, ours,
            lambda: error(sets[0]), 1e-2, min(16, count), target, others,
        )  # fmt: skip

    for (batch, query_rows), target in DECODE.items():
        others = decode_peers(peers, batch, query_rows) if peers else {}
        yield row(f"decode {batch}x{query_rows}", batch * query_rows, target, others)
    for count, target in PREFILL.items():
        yield row(f"prefill {count}", count, target, prefill_peers(peers, count) if peers else {})
