"""Attention as others have it on Hopper: FlashMLA, and a gather of bfloat16 rows compiled by torch.

None of them rotates; FlashMLA reads its own rows of 584 bytes in decode and bfloat16 in prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from harness import DEVICE, Call, Peers, rotations

HEADS, WIDTH, WINDOW, SELECTED = 64, 512, 128, 512
ENTRIES, PLACES, PREFILL_ENTRIES = 1 << 20, 1 << 16, 1 << 17
_IO_BYTES = 2 * 2 * HEADS * WIDTH
# Beyond so many rows the compiled gather is slower than FlashMLA by a third or more.
_MOST_GATHERED = 8


def decode_peers(peers: ModuleType, batch: int, rows: int) -> Peers:
    found: Peers = {"flash_mla.sparse_decode_v4_584B": lambda: flash_mla(peers, batch, rows)}
    if rows == 1 and batch <= _MOST_GATHERED:
        found = {**found, "compiled gather + bmm of bfloat16 rows": lambda: gathered(batch)}
    return found


def prefill_peers(peers: ModuleType, count: int) -> Peers:
    return {"flash_mla.sparse_prefill_bf16": lambda: flash_mla_prefill(peers, count)}


@cache
def _records(peers: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    return peers.random_v4_cache(ENTRIES, 64, 1), peers.random_v4_cache(PLACES, 64, 2)


def _near(*shape: int, places: int = PLACES) -> torch.Tensor:
    """A window of rows that follow each other, int32 [*shape, WINDOW]."""
    start = torch.randint(places - WINDOW, (*shape, 1), device=DEVICE, dtype=torch.int32)
    return start + torch.arange(WINDOW, device=DEVICE, dtype=torch.int32)


def flash_mla(peers: ModuleType, batch: int, rows: int) -> Sequence[Call]:
    entries, window = _records(peers)
    sink, decode, shape = torch.randn(HEADS, device=DEVICE), peers.SparseDecode(), (batch, rows)

    def one() -> Call:
        q = torch.randn(*shape, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        picked = torch.randint(ENTRIES, (*shape, SELECTED), device=DEVICE, dtype=torch.int32)
        near = _near(*shape)
        return lambda: decode(q, window, near, sink, entries, picked)

    sets = rotations(batch * rows * ((SELECTED + WINDOW) * 584 + _IO_BYTES))
    return [one() for _ in range(sets)]


def flash_mla_prefill(peers: ModuleType, count: int) -> Sequence[Call]:
    values = torch.randn(PREFILL_ENTRIES, 1, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(count, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    shape = (count, SELECTED)
    far = torch.randint(PREFILL_ENTRIES, shape, device=DEVICE, dtype=torch.int32)
    picked = torch.cat([_near(count, places=PREFILL_ENTRIES), far], 1).unsqueeze(1)
    sink, out = torch.randn(HEADS, device=DEVICE), torch.empty_like(q)
    return [lambda: peers.sparse_prefill(q, values, picked, sink, out)]


@torch.compile(dynamic=False)
def _attend(
    q: torch.Tensor, values: torch.Tensor, picked: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """q [N, 64, 512], values [rows, 512], picked int64 [N, 640] → [N, 64, 512]."""
    rows = values[picked]
    scores = (q @ rows.mT).float() * WIDTH**-0.5
    most = torch.maximum(scores.amax(-1, keepdim=True), sink[:, None])
    weights = (scores - most).exp()
    total = weights.sum(-1, keepdim=True) + (sink[:, None] - most).exp()
    return (weights / total).bfloat16() @ rows


def gathered(count: int) -> Sequence[Call]:
    values = torch.randn(ENTRIES, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    sink = torch.randn(HEADS, device=DEVICE)

    def one() -> Call:
        q = torch.randn(count, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        far = torch.randint(ENTRIES, (count, SELECTED), device=DEVICE)
        picked = torch.cat([_near(count).long(), far], 1)
        return lambda: _attend(q, values, picked, sink)

    sets = rotations(count * ((SELECTED + WINDOW) * 2 * WIDTH + _IO_BYTES))
    return [one() for _ in range(sets)]
