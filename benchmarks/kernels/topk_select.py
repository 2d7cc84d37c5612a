"""Exact top-k of index scores and the candidate blocks at the released sizes."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from harness import DEVICE, Row, rotations

from plugins.registry import OPERATORS
from plugins.topk_select import kernel

# Rows, columns → microseconds of the best peer for k = 512.
TOPK = {(64, 8192): 5.3, (64, 131_072): 29.0, (1, 1 << 20): 25.0, (4096, 16_384): 199.0}
BLOCKS = ((1, 131_072), (64, 131_072))
K, BLOCK, LISTED = 512, 8, 2048


def rows(peers: ModuleType | None) -> Iterator[Row]:
    reference = OPERATORS["topk_select"].reference
    for (count, columns), target in TOPK.items():
        cost = 4.0 * count * columns + 8 * count * K
        sets = [torch.randn(count, columns, device=DEVICE) for _ in range(rotations(cost))]
        theirs = []
        if peers is not None:
            lengths = torch.full((count,), columns, dtype=torch.int32, device=DEVICE)
            space = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
            pick = peers.cooperative_topk if count <= 64 else peers.persistent_topk
            theirs = [lambda x=x, n=lengths, s=space, f=pick: f(x, n, K, s) for x in sets]
        ours = [lambda x=x: kernel.topk_select(x, K) for x in sets]
        yield Row(
            "topk_select", f"{count}x{columns} k {K}", cost, 0.0, ours,
            # Exact: any difference is one too many.
            lambda x=sets[0]: float((kernel.topk_select(x, K) != reference(x, K)).sum()),
            0.0, target, "vllm top-k", theirs,
        )  # fmt: skip
    blocks_reference = OPERATORS["candidate_blocks"].reference
    sizes = {"block_size": BLOCK, "num_blocks": LISTED}
    for count, columns in BLOCKS:
        cost = 4.0 * count * columns + count * columns / BLOCK
        sets = [torch.randn(count, columns, device=DEVICE) for _ in range(rotations(cost))]
        visible = torch.full((count,), columns, device=DEVICE)
        ours = [lambda x=x, v=visible: kernel.candidate_blocks(x, v, **sizes) for x in sets]
        yield Row(
            "candidate_blocks", f"{count}x{columns}", cost, 0.0, ours,
            lambda x=sets[0], v=visible: float(
                (kernel.candidate_blocks(x, v, **sizes) != blocks_reference(x, v, **sizes)).sum()
            ),
            0.0,
        )  # fmt: skip
