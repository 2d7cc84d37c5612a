"""The hyper-connections in four pieces: expansion, coefficients, collapse and norm as compiled by
torch, the product of the mix by DeepGEMM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from harness import Call

STREAMS, _EPS = 4, 1e-6


@torch.compile(dynamic=True)
def _expand(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """y [M, D], x [M, 4, D], post [M, 4], comb [M, 4, 4] → [M, 4, D]."""
    new = post.unsqueeze(-1) * y.float().unsqueeze(1)
    for i in range(STREAMS):
        new = new + comb[:, i, :, None] * x[:, i : i + 1].float()
    return new.bfloat16()


@torch.compile(dynamic=True)
def _collapse(x: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    u = (pre.unsqueeze(-1) * x.float()).sum(1).bfloat16().float()
    return (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-20) * norm).bfloat16()


@torch.compile(dynamic=True, fullgraph=True)
def _coefficients(
    z: torch.Tensor, squares: torch.Tensor, width: int, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Written on sixteen vectors, so that one kernel holds all rounds of the normalisation."""
    z = z.sum(0) * torch.rsqrt(squares.sum(0).unsqueeze(-1) / width + 1e-20)
    pre = torch.sigmoid(z[:, :4] * scale[0] + base[:4]) + _EPS
    post = 2 * torch.sigmoid(z[:, 4:8] * scale[1] + base[4:8])
    mixed = (z[:, 8:] * scale[2] + base[8:]).unbind(-1)
    c = [list(mixed[4 * i : 4 * i + 4]) for i in range(4)]
    for i in range(4):
        top = torch.maximum(torch.maximum(c[i][0], c[i][1]), torch.maximum(c[i][2], c[i][3]))
        e = [torch.exp(v - top) for v in c[i]]
        s = 1 / (e[0] + e[1] + e[2] + e[3])
        c[i] = [v * s + _EPS for v in e]
    for step in range(20):
        for i in range(4 if step else 0):
            s = 1 / (c[i][0] + c[i][1] + c[i][2] + c[i][3] + _EPS)
            c[i] = [v * s for v in c[i]]
        for j in range(4):
            s = 1 / (c[0][j] + c[1][j] + c[2][j] + c[3][j] + _EPS)
            for i in range(4):
                c[i][j] = c[i][j] * s
    return pre, post, torch.stack([v for r in c for v in r], -1).view(-1, 4, 4)


def four_pieces(peers: ModuleType, sets: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[Call]:
    """`sets` are mega_mhc's operands by name."""

    def run(given: Mapping[str, torch.Tensor]) -> tuple:
        x = _expand(given["y"], given["streams"], given["post"], given["comb"])
        flat = x.flatten(1)
        z, squares = peers.hc_prenorm(flat, given["fn"], peers.hc_splits(len(x)))
        mix = _coefficients(z, squares, flat.shape[1], given["scale"], given["base"])
        return x, mix, _collapse(x, given["pre"], given["norm"])

    return [lambda given=given: run(given) for given in sets]
