"""Cache writes and the compressor's pooling at the released sizes. No peer packs these records."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from harness import DEVICE, Row, relative, rotations

from plugins.compressor import kernel as compressor
from plugins.formats.records import index_record, main_record, window_record
from plugins.formats.rows import PackedRows
from plugins.kv_write import kernel
from plugins.registry import OPERATORS

RECORDS = {"main": main_record(512), "window": window_record(512), "index": index_record(128)}
COUNTS = (1, 64, 8192)


def rows(peers: ModuleType | None) -> Iterator[Row]:
    for name, layout in RECORDS.items():
        for count in COUNTS:
            cost = count * (2.0 * layout.width + layout.bytes_per_row + 8)
            shape = (max(1024, 2 * count) // 64, 64, layout.bytes_per_row)
            sets = [
                (
                    torch.randn(count, layout.width, device=DEVICE, dtype=torch.bfloat16),
                    PackedRows(torch.zeros(shape, dtype=torch.uint8, device=DEVICE), layout),
                    torch.randperm(shape[0] * 64, device=DEVICE)[:count],
                )
                for _ in range(rotations(cost))
            ]

            def error(given=sets[0], layout=layout) -> float:
                values, store, slots = given
                kernel.kv_write(values, store, slots)
                ours = torch.cat(layout.parts(store.data), dim=-1)[slots // 64, slots % 64]
                return float((ours != layout.pack(values)).sum())

            ours = [lambda given=given: kernel.kv_write(*given) for given in sets]
            yield Row("kv_write", f"{name} {count}", cost, 0.0, ours, error, 0.0, count)
    for count in COUNTS:
        cost = count * (4.0 * 4 * 512 + 4 * 512)
        pairs = [torch.randn(count, 2, 1024, device=DEVICE) for _ in range(rotations(cost))]
        halves = [x.chunk(2, dim=-1) for x in pairs]
        ours = [lambda ab=ab: compressor.pool_pairs(*ab) for ab in halves]
        reference = OPERATORS["pool_pairs"].reference
        yield Row(
            "pool_pairs", f"{count}", cost, 0.0, ours,
            lambda ab=halves[0], f=reference: relative(compressor.pool_pairs(*ab), f(*ab)), 1e-6,
            count,
        )  # fmt: skip
