"""Engram at the released sizes: hash, table rows in both memories, gate.

The peer is the bare gather: the records' words are copied as they are, by a kernel of the same
launch. Its output is half as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
import triton
import triton.language as tl
from harness import DEVICE, Call, Row, relative, rotations

from plugins.engram import engram_layout, kernel
from plugins.formats.records import engram_record
from plugins.formats.rows import PackedRows
from plugins.registry import OPERATORS

COLUMNS, WIDTH, STREAMS, HIDDEN = 24, 256, 4, 5120
LAYOUT = engram_record(WIDTH)
ROW_BYTES = LAYOUT.bytes_per_row
# Tokens → microseconds of the bare gather on an H200, and what we want to stay below.
GATHER = {
    "HBM": {64: 1.4, 1024: 4.2, 8192: 32.0},
    "pinned host": {64: 13.0, 1024: 400.0, 8192: 3340.0},
}
SHARE = 1.2


@triton.jit
def _copy_records(table, rows, out, num_words, WORDS: tl.constexpr, TILE: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = word < num_words
    row = tl.load(rows + word // WORDS, mask=there, other=0)
    value = tl.load(table + row * WORDS + word % WORDS, mask=there, other=0)
    tl.store(out + word, value, mask=there)


def copy_records(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    words = rows.numel() * (ROW_BYTES // 4)
    _copy_records[(triton.cdiv(words, 1024),)](
        table.view(torch.int32), rows, out, words, ROW_BYTES // 4, 1024
    )


def gather(table: torch.Tensor, sets: Sequence[torch.Tensor]) -> Sequence[Call]:
    out = torch.empty(sets[0].numel(), ROW_BYTES // 4, dtype=torch.int32, device=DEVICE)
    return [lambda at=at: copy_records(table, at, out) for at in sets]


def tables() -> Iterator[tuple[str, torch.Tensor]]:
    """Random records that are numbers: 8 GiB in the device's memory, 2 in the host's."""
    slots = 1 << 25 if DEVICE == "cuda" else 1 << 12
    few = LAYOUT.pack(torch.randn(4096, WIDTH, device=DEVICE))
    data = few.repeat(slots // 4096, 1)
    yield "HBM", data
    if DEVICE == "cuda":
        host = torch.empty(slots // 4, ROW_BYTES, dtype=torch.uint8, pin_memory=True)
        host.copy_(data[: slots // 4])
        yield "pinned host", host


def rows(peers: ModuleType | None) -> Iterator[Row]:
    reference = OPERATORS["engram_lookup"].reference
    for place, data in tables():
        table = PackedRows(data, LAYOUT)
        for count, bare in GATHER[place].items():
            cost = count * COLUMNS * (ROW_BYTES + 2.0 * WIDTH + 8)
            shape = (count, COLUMNS)
            sets = [torch.randint(len(data), shape, device=DEVICE) for _ in range(rotations(cost))]

            def error(table=table, at=sets[0][:64]) -> float:
                ours = kernel.engram_lookup(table, at, torch.bfloat16)
                exact = reference(table, at.to(table.data.device), torch.bfloat16)
                return relative(ours, exact.to(DEVICE))

            yield Row(
                "engram_lookup", f"{count} {place}", cost, 0.0,
                [lambda t=table, at=at: kernel.engram_lookup(t, at, torch.bfloat16) for at in sets],
                error, 0.0, min(64, count), SHARE * bare,
                {"bare gather of the records": lambda d=data, s=sets: gather(d, s)},
            )  # fmt: skip
        del table
    layout = engram_layout(
        [1], max_ngram_size=4, n_heads=8, vocab_size=16_000_000, compressed_vocab_size=99_092
    )[1]
    for count in (64, 1024, 8192):
        yield hash_row(count, layout)
        yield gate_row(count)


def hash_row(count: int, layout: object) -> Row:
    requests = min(count, 64)
    start = torch.arange(requests + 1, device=DEVICE) * (count // requests)
    given = {
        "tokens": torch.randint(129_280, (count,), device=DEVICE),
        "request": torch.arange(requests, device=DEVICE).repeat_interleave(count // requests),
        "query_start": start,
        "history": torch.randint(129_280, (requests, 3), device=DEVICE),
        "token_class": torch.randint(99_092, (129_280,), device=DEVICE),
        "layout": layout,
        "pad_class": 2,
        "dead_token_id": 129_264,
    }
    reference = OPERATORS["engram_rows"].reference
    return Row(
        "engram_rows", f"{count}", count * (8.0 * COLUMNS + 24), 0.0,
        [lambda: kernel.engram_rows(**given)] * 2,
        lambda: float((kernel.engram_rows(**given) != reference(**given)).sum()), 0.0, count,
    )  # fmt: skip


def gate_row(count: int) -> Row:
    """Keys and value as the network hands them over: parts of one projection."""
    cost = 2.0 * count * HIDDEN * (3 * STREAMS + 1) + 8.0 * STREAMS * HIDDEN
    weights = [1 + 0.1 * torch.randn(STREAMS, HIDDEN, device=DEVICE) for _ in range(2)]

    def one() -> dict:
        projected = torch.randn(count, (STREAMS + 1) * HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        keys, value = projected.split([STREAMS * HIDDEN, HIDDEN], 1)
        shape = (count, STREAMS, HIDDEN)
        return {
            "streams": torch.randn(shape, device=DEVICE, dtype=torch.bfloat16),
            "keys": keys.unflatten(1, (STREAMS, HIDDEN)),
            "value": value,
            "q_weight": weights[0],
            "k_weight": weights[1],
            "alive": torch.rand(count, device=DEVICE) > 0.1,
            "norm_eps": 1e-20,
        }

    sets = [one() for _ in range(rotations(cost))]
    reference = OPERATORS["engram_gate"].reference
    return Row(
        "engram_gate", f"{count}", cost, 0.0,
        [lambda g=given: kernel.engram_gate(**g) for given in sets],
        lambda g=sets[0]: relative(kernel.engram_gate(**g), reference(**g)), 5e-3,
        count,
    )  # fmt: skip
