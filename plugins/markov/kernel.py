"""The greedy choice in the Triton language: the best of every part of a row, then of all parts."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugins.device.launch import padded, unit_stride
from plugins.device.overlap import after_previous, overlaps
from plugins.registry import OPERATORS

_PART = 2048


@triton.jit
def _best_of_parts(
    base, base_stride, correction, correction_stride, keys, vocab,
    PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Keys int64 [rows, parts] that order values first and then columns, the first one highest."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    there = column < vocab
    value = tl.load(base + row * base_stride + column, mask=there, other=float("-inf"))
    value += tl.load(correction + row * correction_stride + column, mask=there, other=0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    # A row of −inf alone has a column too.
    key = tl.where(there, key, -(1 << 63))
    tl.store(keys + row * tl.num_programs(1) + tl.program_id(1), tl.max(key, axis=0))


@triton.jit(do_not_specialize=["parts"])
def _take_best(
    keys, parts, embed, embed_stride, tokens, taken, RANK: tl.constexpr, PADDED: tl.constexpr,
    PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    key = tl.load(keys + row * parts + part, mask=part < parts, other=-(1 << 63))
    token = 0x7FFFFFFF - (tl.max(key, axis=0) & 0xFFFFFFFF)
    tl.store(tokens + row, token)
    place = tl.arange(0, PADDED)
    value = tl.load(embed + token * embed_stride + place, mask=place < RANK, other=0.0)
    tl.store(taken + row * RANK + place, value, mask=place < RANK)


def markov_choice(
    base: torch.Tensor, correction: torch.Tensor, embed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, which runs for other than float32 sums."""
    if not base.dtype == correction.dtype == torch.float32:
        made: tuple[torch.Tensor, torch.Tensor] = OPERATORS["markov_choice"].reference(
            base, correction, embed
        )
        return made
    base, correction, embed = unit_stride(base), unit_stride(correction), unit_stride(embed)
    (rows, vocab), rank = base.shape, embed.shape[1]
    parts, overlap = triton.cdiv(vocab, _PART), overlaps(base.device)
    keys = base.new_empty((rows, parts), dtype=torch.int64)
    tokens, taken = base.new_empty(rows, dtype=torch.int64), embed.new_empty((rows, rank))
    if rows:
        _best_of_parts[(rows, parts)](
            base, base.stride(0), correction, correction.stride(0), keys, vocab, _PART, overlap,
            num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
        _take_best[(rows,)](
            keys, parts, embed, embed.stride(0), tokens, taken, rank, padded(rank),
            padded(parts, 1), overlap, num_warps=1, launch_pdl=overlap,
        )  # fmt: skip
    return tokens, taken
