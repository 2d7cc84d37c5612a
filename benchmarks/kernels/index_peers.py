"""Index scores by DeepGEMM over FP8 keys of 132 bytes, in pages of 64: paged, of one prompt, and of
candidates behind a gather. Its schedule is made outside, as once a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
import triton
import triton.language as tl
from harness import DEVICE, Call, rotations

HEADS, WIDTH, PAGE, BLOCK = 32, 128, 64, 8
KEY_BYTES = WIDTH + 4
_PAGES = 1 << 19
_PAGE_WORDS = PAGE * KEY_BYTES // 4
_BLOCK_WORDS, _BLOCK_SCALES = BLOCK * WIDTH // 4, BLOCK


@cache
def _pool(peers: ModuleType) -> torch.Tensor:
    return peers.random_index_cache(_PAGES, PAGE, 3)


def _queries(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(count, HEADS, WIDTH, device=DEVICE).to(torch.float8_e4m3fn)
    return q, torch.randn(count, HEADS, device=DEVICE)


def paged(peers: ModuleType, requests: int, context: int) -> Sequence[Call]:
    keys = _pool(peers)
    q, weights = _queries(requests)
    lengths = torch.full((requests, 1), context, dtype=torch.int32, device=DEVICE)
    schedule = peers.paged_mqa_schedule(lengths)

    def one() -> Call:
        shape = (requests, context // PAGE)
        table = torch.randint(_PAGES, shape, dtype=torch.int32, device=DEVICE)
        q4 = q.unsqueeze(1)
        return lambda: peers.paged_mqa_logits(q4, keys, weights, lengths, table, schedule, context)

    return [one() for _ in range(rotations(requests * context * (KEY_BYTES + 4)))]


def prompt(peers: ModuleType, count: int, context: int) -> Sequence[Call]:
    """The last `count` rows of one prompt, each as far as it sees."""
    q, weights = _queries(count)
    keys = torch.randn(context, WIDTH, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.rand(context, device=DEVICE) + 0.5
    end = context - torch.arange(count - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    start = torch.zeros_like(end)
    return [lambda: peers.mqa_logits(q, keys, scale, weights, start, end, context)]


@triton.jit
def _copy_blocks(
    keys, table, blocks, out, table_columns, listed,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PAGE_WORDS: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """One listed block: its codes and scales go to the next place of pages laid out alike."""
    place, request = tl.program_id(0), tl.program_id(1)
    per_page: tl.constexpr = PAGE // BLOCK
    block = tl.load(blocks + request * listed + place)
    page = tl.load(table + request * table_columns + block // per_page).to(tl.int64)
    source = keys + page * PAGE_WORDS
    target = out + (request * (listed // per_page) + place // per_page).to(tl.int64) * PAGE_WORDS
    old, new = block % per_page, place % per_page
    code, scale = tl.arange(0, CODES), tl.arange(0, SCALES)
    tl.store(target + new * CODES + code, tl.load(source + old * CODES + code))
    behind: tl.constexpr = per_page * CODES
    moved = tl.load(source + behind + old * SCALES + scale)
    tl.store(target + behind + new * SCALES + scale, moved)


def gathered(peers: ModuleType, requests: int, context: int, listed: int) -> Sequence[Call]:
    """The listed blocks into pages of their own, then the paged scores of those."""
    keys = _pool(peers)
    q, weights = _queries(requests)
    candidates = listed * BLOCK
    lengths = torch.full((requests, 1), candidates, dtype=torch.int32, device=DEVICE)
    schedule = peers.paged_mqa_schedule(lengths)
    pages = requests * candidates // PAGE
    near = torch.empty(pages, PAGE, 1, KEY_BYTES, dtype=torch.uint8, device=DEVICE)
    own = torch.arange(pages, dtype=torch.int32, device=DEVICE).view(requests, -1)
    words = (keys.view(-1).view(torch.int32), near.view(-1).view(torch.int32))

    def one() -> Call:
        table = torch.randint(_PAGES, (requests, context // PAGE), device=DEVICE)
        noise = torch.rand(requests, context // BLOCK, device=DEVICE)
        blocks = noise.topk(listed, sorted=False).indices.sort(-1).values

        def call() -> torch.Tensor:
            _copy_blocks[(listed, requests)](
                words[0], table, blocks, words[1], table.shape[1], listed,
                PAGE, BLOCK, _PAGE_WORDS, _BLOCK_WORDS, _BLOCK_SCALES, num_warps=2,
            )  # fmt: skip
            return peers.paged_mqa_logits(
                q.unsqueeze(1), near, weights, lengths, own, schedule, candidates
            )

        return call

    return [one() for _ in range(rotations(requests * candidates * (KEY_BYTES + 4)))]
