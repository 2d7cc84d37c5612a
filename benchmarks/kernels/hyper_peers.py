"""The hyper-connections in four pieces: expansion, and collapse with the norm, as compiled by
torch, the product of the mix by DeepGEMM, and its coefficients by a kernel of one row, which torch
would take minutes to compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
import triton
import triton.language as tl
from harness import Call

STREAMS, _EPS, _ROUNDS = 4, 1e-6, 20


@torch.compile(dynamic=False)
def _expand(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """y [M, D], x [M, 4, D], post [M, 4], comb [M, 4, 4] → [M, 4, D]."""
    new = post.unsqueeze(-1) * y.float().unsqueeze(1)
    for i in range(STREAMS):
        new = new + comb[:, i, :, None] * x[:, i : i + 1].float()
    return new.bfloat16()


@torch.compile(dynamic=False)
def _collapse(x: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    u = (pre.unsqueeze(-1) * x.float()).sum(1).bfloat16().float()
    return (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-20) * norm).bfloat16()


@triton.jit
def _coefficients(
    z, squares, scale, base, pre, post, comb, splits, num_rows, width,
    SPLITS: tl.constexpr, ROUNDS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One row: the parts of its 24 sums are added up, the last sixteen made doubly stochastic."""
    row, part, four = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, 4)
    place = part * num_rows + row
    there = part < splits
    norm = tl.rsqrt(tl.sum(tl.load(squares + place, mask=there, other=0.0), 0) / width + 1e-20)
    sums = z + place[:, None] * 24 + four[None, :]
    first = tl.sum(tl.load(sums, mask=there[:, None], other=0.0), 0) * norm
    first = first * tl.load(scale) + tl.load(base + four)
    tl.store(pre + row * 4 + four, tl.sigmoid(first) + EPS)
    second = tl.sum(tl.load(sums + 4, mask=there[:, None], other=0.0), 0) * norm
    second = second * tl.load(scale + 1) + tl.load(base + 4 + four)
    tl.store(post + row * 4 + four, 2 * tl.sigmoid(second))
    square = 4 * four[:, None] + four[None, :]
    sums = z + place[:, None, None] * 24 + 8 + square[None, :, :]
    c = tl.sum(tl.load(sums, mask=there[:, None, None], other=0.0), 0) * norm
    c = c * tl.load(scale + 2) + tl.load(base + 8 + square)
    c = tl.exp(c - tl.max(c, 1, keep_dims=True))
    c = c / tl.sum(c, 1, keep_dims=True) + EPS
    c = c / (tl.sum(c, 0, keep_dims=True) + EPS)
    for _ in range(ROUNDS - 1):
        c = c / (tl.sum(c, 1, keep_dims=True) + EPS)
        c = c / (tl.sum(c, 0, keep_dims=True) + EPS)
    tl.store(comb + row * 16 + square, c)


def coefficients(
    z: torch.Tensor, squares: torch.Tensor, width: int, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z float32 [splits, M, 24], squares [splits, M] → pre [M, 4], post [M, 4], comb [M, 4, 4]."""
    splits, rows, _ = z.shape
    pre, post, comb = (z.new_empty(rows, *shape) for shape in ((4,), (4,), (4, 4)))
    _coefficients[(rows,)](
        z, squares, scale, base, pre, post, comb, splits, rows, width,
        triton.next_power_of_2(splits), _ROUNDS, _EPS, num_warps=1,
    )  # fmt: skip
    return pre, post, comb


def four_pieces(peers: ModuleType, sets: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[Call]:
    """`sets` are mega_mhc's operands by name."""

    def run(given: Mapping[str, torch.Tensor]) -> tuple:
        x = _expand(given["y"], given["streams"], given["post"], given["comb"])
        flat = x.flatten(1)
        z, squares = peers.hc_prenorm(flat, given["fn"], peers.hc_splits(len(x)))
        mix = coefficients(z, squares, flat.shape[1], given["scale"], given["base"])
        return x, mix, _collapse(x, given["pre"], given["norm"])

    return [lambda given=given: run(given) for given in sets]
