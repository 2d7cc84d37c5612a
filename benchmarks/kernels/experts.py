"""The mixture of experts at the released sizes: 48 of 384 experts, the whole chain, without and
with the shared expert; and experts as requantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from harness import DEVICE, Row, relative
from linear import inputs, stored_bytes, weight

from plugins.linear import PackedFormat
from plugins.moe import ExpertWeights, PackedExpertWeights
from plugins.moe.kernel import moe
from plugins.registry import OPERATORS

WIDTH, INTER, EXPERTS, TOP_K = (5120, 2304, 48, 6) if DEVICE == "cuda" else (256, 128, 4, 2)
MATRIX = WIDTH * INTER
# Tokens → microseconds to stay below without the shared expert.
TARGETS = {1: None, 8: 180.0, 64: 285.0, 512: 500.0, 4096: 2100.0}


def experts(count: int, stored: PackedFormat) -> ExpertWeights:
    if count == 0:
        none = torch.empty(0, INTER, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        return ExpertWeights(none, none, none.transpose(1, 2), quantized_input=False)
    shapes = ((INTER, WIDTH), (INTER, WIDTH), (WIDTH, INTER))
    stacks = [[weight(stored, *shape).packed for _ in range(count)] for shape in shapes]
    return PackedExpertWeights(*stacks, torch.bfloat16, quantized_input=True)


def triton_kernels(peers: ModuleType, routed: PackedExpertWeights, tokens: int) -> list[Callable]:
    """bfloat16 rows, routing tables given, the activation as compiled by torch."""
    w1, w3, w2 = routed.matrices()

    def stacked(*lists: list, name: str) -> torch.Tensor:
        rows = [torch.cat([getattr(m, name) for m in group]) for group in zip(*lists, strict=True)]
        return torch.stack(rows)

    up = peers.triton_mxfp4_pack(
        stacked(w1, w3, name="codes"), stacked(w1, w3, name="scale").view(torch.uint8)
    )
    last = peers.triton_mxfp4_pack(
        stacked(w2, name="codes"), stacked(w2, name="scale").view(torch.uint8)
    )

    @torch.compile(dynamic=True)
    def activate(h: torch.Tensor) -> torch.Tensor:
        gate, linear = h[:, :INTER].float().clamp(max=10), h[:, INTER:].float().clamp(-10, 10)
        return (torch.nn.functional.silu(gate) * linear).bfloat16()

    x = inputs(tokens, WIDTH)
    table, gather, scatter = peers.triton_route(torch.randn(tokens, EXPERTS, device=DEVICE), TOP_K)

    def chain() -> torch.Tensor:
        h = activate(peers.triton_mxfp4_gemm(x, *up, table, gather=gather))
        return peers.triton_mxfp4_gemm(h, *last, table, scatter=scatter, gammas=table.gate_scal)

    return [chain]


def rows(peers: ModuleType | None) -> Iterator[Row]:
    none = experts(0, PackedFormat.FP4_ROWS)
    shared = experts(1, PackedFormat.FP8_BLOCKS)
    for stored in (PackedFormat.FP4_ROWS, PackedFormat.NVFP4, PackedFormat.MXFP8):
        routed = experts(EXPERTS, stored)
        released = stored is PackedFormat.FP4_ROWS
        for tokens, target in TARGETS.items():
            ids, *more_ids = (
                torch.rand(tokens, EXPERTS, device=DEVICE).argsort(1)[:, :TOP_K].contiguous()
                for _ in range(2)
            )
            hit = len(ids.unique())
            chosen = torch.rand(tokens, TOP_K, device=DEVICE)
            read = 3.0 * hit * stored_bytes(stored, WIDTH, INTER) + 4.0 * tokens * WIDTH
            flop = 3.0 * 2 * tokens * TOP_K * MATRIX
            u = inputs(tokens, WIDTH)
            for beside in (none, shared) if released else (none,):
                theirs = []
                if peers is not None and released and beside.count == 0:
                    theirs = triton_kernels(peers, routed, tokens)
                more = beside.count * stored_bytes(PackedFormat.FP8_BLOCKS, WIDTH, INTER) * 3.0
                more_flop = beside.count * tokens * 6.0 * MATRIX
                name = " and a shared one" if beside.count else ""

                def run(u=u, ids=ids, chosen=chosen, routed=routed, beside=beside) -> torch.Tensor:
                    return moe(u, ids, chosen, routed, beside, swiglu_limit=10.0)

                def error(
                    run=run, u=u, ids=ids, chosen=chosen, routed=routed, beside=beside
                ) -> float:
                    some = slice(0, 4)
                    expected = OPERATORS["moe"].reference(
                        u[some], ids[some], chosen[some], routed, beside, swiglu_limit=10.0
                    )
                    return relative(run()[some], expected)

                # The interpreter cuts bfloat16 off: one row alone may be further from it.
                tolerance = 4e-2 if DEVICE == "cpu" and tokens == 1 else 2e-2
                # Of one token's experts half would stay in the cache: others take turns.
                calls = [run]
                if tokens == 1:
                    calls += [lambda run=run, ids=other: run(ids=ids) for other in more_ids]
                yield Row(
                    "moe", f"{tokens} of {EXPERTS} {stored.value}{name}", read + more,
                    flop + more_flop, calls, error, tolerance,
                    target if released and not beside.count else None,
                    "triton_kernels.mxfp4_weight_only", theirs,
                    unit="float8" if released else "bf16",
                )  # fmt: skip
        del routed
