"""Exact top-k of index scores and the candidate blocks at the released sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
from harness import DEVICE, Call, Row, rotations

from plugins.registry import OPERATORS
from plugins.topk_select import kernel

# Rows, columns → microseconds of the best peer for k = 512.
TOPK = {(64, 8192): 5.3, (64, 131_072): 29.0, (1, 1 << 20): 25.0, (4096, 16_384): 199.0}
BLOCKS = ((1, 131_072), (64, 131_072))
K, BLOCK, LISTED = 512, 8, 2048


def library(pick: Callable, sets: Sequence[torch.Tensor]) -> Sequence[Call]:
    """One of vLLM's two; that of cooperating blocks takes up to 64 rows."""
    lengths = torch.full((len(sets[0]),), sets[0].shape[1], dtype=torch.int32, device=DEVICE)
    space = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    return [lambda x=x: pick(x, lengths, K, space) for x in sets]


def rows(peers: ModuleType | None) -> Iterator[Row]:
    reference = OPERATORS["topk_select"].reference
    for (count, columns), target in TOPK.items():
        cost = 4.0 * count * columns + 8 * count * K
        sets = [torch.randn(count, columns, device=DEVICE) for _ in range(rotations(cost))]
        others = {
            f"vllm.{name}": lambda f=name, s=sets: library(getattr(peers, f), s)
            for name in ("persistent_topk", "cooperative_topk")[: 2 if count <= 64 else 1]
            if peers
        }
        ours = [lambda x=x: kernel.topk_select(x, K) for x in sets]
        yield Row(
            "topk_select", f"{count}x{columns} k {K}", cost, 0.0, ours,
            # Exact: any difference is one too many.
            lambda x=sets[0]: float((kernel.topk_select(x, K) != reference(x, K)).sum()),
            0.0, count, target, others,
        )  # fmt: skip
    blocks_reference = OPERATORS["candidate_blocks"].reference
    sizes = {"block_size": BLOCK, "num_blocks": LISTED}
    for count, columns in BLOCKS:
        cost = 4.0 * count * columns + 8 * count * LISTED
        sets = [torch.randn(count, columns, device=DEVICE) for _ in range(rotations(cost))]
        visible = torch.full((count,), columns, device=DEVICE)
        ours = [lambda x=x, v=visible: kernel.candidate_blocks(x, v, **sizes) for x in sets]
        yield Row(
            "candidate_blocks", f"{count}x{columns}", cost, 0.0, ours,
            lambda x=sets[0], v=visible: float(
                (kernel.candidate_blocks(x, v, **sizes) != blocks_reference(x, v, **sizes)).sum()
            ),
            0.0, count,
        )  # fmt: skip
