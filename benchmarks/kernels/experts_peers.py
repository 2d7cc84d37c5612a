"""Experts as others have them on Hopper: MXFP4 weights with bfloat16 rows in triton_kernels, FP8 of
both in DeepGEMM. Torch compiles what lies between the products."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from harness import DEVICE, Call, Peers
from linear import inputs

from plugins.moe import PackedExpertWeights

_LIMIT, _LARGEST = 10.0, 448.0
# From so many tokens on FP8 products win, below them the smaller weights.
_FP8_TOKENS = 512


def _activated(h: torch.Tensor) -> torch.Tensor:
    gate, linear = h.float().chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=_LIMIT)) * linear.clamp(-_LIMIT, _LIMIT)


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [rows, K] and its powers of two, one per 128."""
    grouped = x.unflatten(-1, (-1, 128))
    most = grouped.abs().amax(-1).clamp_min(1e-4)
    step = (most / _LARGEST).log2().ceil().exp2()
    return (grouped / step.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), step


@torch.compile(dynamic=False)
def activate(h: torch.Tensor) -> torch.Tensor:
    return _activated(h).bfloat16()


@torch.compile(dynamic=False)
def activate_rounded(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _rounded(_activated(h))


@torch.compile(dynamic=False)
def gather_rounded(x: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _rounded(x[token].float())


@torch.compile(dynamic=False)
def combine(y: torch.Tensor, place: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return (y[place].float() * share.unsqueeze(-1)).sum(1).bfloat16()


class ExpertPeers:
    """Each library's weights, packed when first asked for.

    Marlin is left out: it has never been the fastest of these."""

    def __init__(self, peers: ModuleType, routed: PackedExpertWeights) -> None:
        self._peers, self._routed = peers, routed
        self._kept: dict[str, tuple] = {}

    def of(self, ids: torch.Tensor, share: torch.Tensor) -> Peers:
        """ids int64 and share float32 [tokens, chosen]: the routing that ours has."""
        share = share / share.sum(-1, keepdim=True)
        if len(ids) >= _FP8_TOKENS:
            return {"deep_gemm.fp8_masked": lambda: self.deep_gemm(ids, share)}
        return {"triton_kernels.mxfp4_weight_only": lambda: self.triton_kernels(ids, share)}

    def _fp4(self) -> tuple:
        """w1 over w3, and w2, packed."""
        if "fp4" not in self._kept:
            w1, w3, w2 = self._routed.matrices()
            pairs = [tuple(pair) for pair in zip(w1, w3, strict=True)]
            self._kept["fp4"] = tuple(
                self._peers.triton_mxfp4_pack(
                    torch.stack([torch.cat([m.codes for m in group]) for group in groups]),
                    torch.stack([torch.cat([m.scale for m in group]) for group in groups]),
                )
                for groups in (pairs, [(m,) for m in w2])
            )
        return self._kept["fp4"]

    def _fp8(self) -> tuple:
        if "fp8" not in self._kept:
            inter, width = self._routed.matrices()[0][0].shape
            count = self._routed.count
            self._kept["fp8"] = tuple(
                tuple(
                    torch.stack(parts)
                    for parts in zip(
                        *(self._peers.quant_blocks(0.02 * inputs(*shape)) for _ in range(count)),
                        strict=True,
                    )
                )
                for shape in ((2 * inter, width), (width, inter))
            )
        return self._kept["fp8"]

    def triton_kernels(self, ids: torch.Tensor, share: torch.Tensor) -> Sequence[Call]:
        """Routing tables given; the shares are a softmax over the chosen."""
        up, last = self._fp4()
        scores = torch.full((len(ids), self._routed.count), -100.0, device=DEVICE)
        scores.scatter_(1, ids, share.log())
        table, gather, scatter = self._peers.triton_route(scores, ids.shape[1])
        x = inputs(len(ids), self._routed.matrices()[0][0].shape[1])

        def chain() -> torch.Tensor:
            h = self._peers.triton_mxfp4_gemm(x, *up, table, gather=gather)
            return self._peers.triton_mxfp4_gemm(
                activate(h), *last, table, scatter=scatter, gammas=table.gate_scal
            )

        return [chain]

    def deep_gemm(self, ids: torch.Tensor, share: torch.Tensor) -> Sequence[Call]:
        """Each expert's rows in slots of its own; gather, roundings and combination are inside."""
        (up, up_scale), (last, last_scale) = self._fp8()
        inter, width = self._routed.matrices()[0][0].shape
        count, (tokens, chosen) = self._routed.count, ids.shape
        used = ids.flatten().bincount(minlength=count)
        slots = -(-int(used.max()) // 64) * 64
        order = ids.flatten().argsort(stable=True)
        expert = ids.flatten()[order]
        rank = torch.arange(tokens * chosen, device=DEVICE) - (used.cumsum(0) - used)[expert]
        slot = expert * slots + rank
        place = torch.empty_like(order).scatter_(0, order, slot).view(tokens, chosen)
        token = torch.zeros(count * slots, dtype=torch.int64, device=DEVICE)
        token[slot] = order // chosen
        used, expected = used.int(), -(-tokens * chosen // count)
        x, h = inputs(tokens, width), inputs(count, slots, 2 * inter)
        y = torch.zeros(count, slots, width, dtype=torch.bfloat16, device=DEVICE)

        def chain() -> torch.Tensor:
            product = self._peers.grouped_fp8_masked
            codes, step = (part.unflatten(0, (count, slots)) for part in gather_rounded(x, token))
            product(codes, step, up, up_scale, used, expected, h)
            rounded = activate_rounded(h.view(-1, 2 * inter))
            codes, step = (part.unflatten(0, (count, slots)) for part in rounded)
            product(codes, step, last, last_scale, used, expected, y)
            return combine(y.view(-1, width), place, share)

        return [chain]
