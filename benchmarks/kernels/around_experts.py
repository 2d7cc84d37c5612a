"""Gate, hyper-connections, norm and rotation at the released sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from harness import DEVICE, Call, Peers, Row, relative, rotations
from hyper_peers import four_pieces
from linear import inputs

from plugins.elementwise import softplus
from plugins.mega_gate.kernel import mega_gate
from plugins.mega_mhc.kernel import mega_mhc
from plugins.norm.kernel import rms_norm
from plugins.registry import OPERATORS
from plugins.rope.kernel import apply_rope

WIDTH, EXPERTS, TOP_K, STREAMS = (5120, 384, 6, 4) if DEVICE == "cuda" else (256, 32, 6, 4)
MIXES = STREAMS * (2 + STREAMS)
# Rows → microseconds to stay below.
GATE = {1: 8.0, 64: 8.0, 1024: 14.0, 8192: 50.0}
MHC = {1: 12.0, 64: 12.0, 1024: 46.0, 8192: 260.0}
ROWS = (1, 64, 1024, 8192)
SIZES: dict[str, Any] = {"sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}


def two(peers: ModuleType, sets: Sequence[tuple], bias: torch.Tensor) -> Sequence[Call]:
    """The scores by cuBLAS, then one kernel for the choice."""

    def run(u: torch.Tensor, w: torch.Tensor) -> Any:
        return peers.softplus_sqrt_topk(torch.mm(u, w.T, out_dtype=torch.float32), bias)

    return [lambda given=given: run(*given) for given in sets]


def gate_rows(peers: ModuleType | None) -> Iterator[Row]:
    sizes: dict[str, Any] = {"top_k": TOP_K, "route_scale": 1.5, "gate_temp": 1.0}
    bias = 0.1 * torch.randn(EXPERTS, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float32):
        half = dtype == torch.bfloat16
        for count, target in GATE.items():
            read = EXPERTS * WIDTH * (2.0 if half else 4.0)
            cost = read + 2.0 * count * WIDTH + 12.0 * count * TOP_K
            sets = [
                (inputs(count, WIDTH), (0.02 * inputs(EXPERTS, WIDTH)).to(dtype))
                for _ in range(rotations(cost))
            ]

            def error(given=sets[0], sizes=sizes) -> float:
                u, w = given[0].float(), given[1].float()
                expected = OPERATORS["mega_gate"].reference(u, w, bias, None, None, **sizes)
                ours = mega_gate(*given, bias, None, None, **sizes)
                # Another choice is no error where the scores of both are nearly the same.
                biased = softplus(u @ w.T).sqrt() + bias
                chosen, best = (biased.gather(1, ids).sum(1) for ids in (ours.ids, expected.ids))
                same = (ours.ids == expected.ids).all(1)
                off = relative(ours.weights[same], expected.weights[same])
                return max(off, float(((best - chosen) / best).abs().max()))

            others: Peers = {}
            if peers and half:
                others = {"cublas + vllm.topk_softplus_sqrt": lambda s=sets: two(peers, s, bias)}
            ours = [lambda g=g, sizes=sizes: mega_gate(*g, bias, None, None, **sizes) for g in sets]
            name = "bfloat16" if half else "float32"
            yield Row(
                "mega_gate", f"{count} {name}", cost, 2.0 * count * WIDTH * EXPERTS, ours, error,
                1e-5, count, target if half else None, others,
            )  # fmt: skip


def mhc_rows(peers: ModuleType | None) -> Iterator[Row]:
    base, scale = 0.1 * torch.randn(MIXES, device=DEVICE), torch.rand(3, device=DEVICE)
    norm = inputs(WIDTH).abs() + 0.5
    for count, target in MHC.items():
        cost = (
            count * (2.0 * WIDTH * (2 * STREAMS + 2) + 8.0 * MIXES) + 4.0 * MIXES * STREAMS * WIDTH
        )

        def one(count=count) -> dict[str, torch.Tensor]:
            return {
                "streams": inputs(count, STREAMS, WIDTH), "y": inputs(count, WIDTH),
                "post": 2 * torch.rand(count, STREAMS, device=DEVICE),
                "comb": torch.randn(count, STREAMS, STREAMS, device=DEVICE).softmax(-2),
                "pre": torch.rand(count, STREAMS, device=DEVICE),
                "fn": 0.01 * torch.randn(MIXES, STREAMS * WIDTH, device=DEVICE),
                "base": base, "scale": scale, "norm": norm,
            }  # fmt: skip

        sets = [one() for _ in range(rotations(cost))]

        def error(given=sets[0]) -> float:
            expected = mhc_pieces_on_cpu(given)
            expanded, mix, u = mega_mhc(**given, **SIZES)
            some = [expanded[:64], *(x[:64] for x in mix), u[:64]]
            return max(relative(a.cpu(), b) for a, b in zip(some, expected, strict=True))

        others: Peers = {}
        if peers:
            others = {
                "compiled pieces + deep_gemm.hc_prenorm": lambda s=sets: four_pieces(peers, s)
            }
        yield Row(
            "mega_mhc", f"{count}", cost, 2.0 * count * MIXES * STREAMS * WIDTH,
            [lambda given=given: mega_mhc(**given, **SIZES) for given in sets], error, 5e-3,
            min(64, count), target, others,
        )  # fmt: skip


def mhc_pieces_on_cpu(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of at most 64 rows: the references of the pieces."""
    rows = ("streams", "y", "post", "comb", "pre")
    some = {name: (x[:64] if name in rows else x).cpu() for name, x in given.items()}
    expanded, mix, u = OPERATORS["mega_mhc"].reference(**some, **SIZES)
    return [expanded, *mix, u]


def library_norm(sets: Sequence[torch.Tensor], gain: torch.Tensor) -> Sequence[Call]:
    return [lambda x=x: torch.nn.functional.rms_norm(x, (WIDTH,), gain, 1e-20) for x in sets]


def row_rows() -> Iterator[Row]:
    for count in ROWS:
        cost = 4.0 * count * WIDTH
        sets = [inputs(count, WIDTH) for _ in range(rotations(cost))]
        gain = inputs(WIDTH)
        reference = OPERATORS["norm"].reference
        yield Row(
            "norm", f"{count} of {WIDTH}", cost, 0.0,
            [lambda x=x, w=gain: rms_norm(x, w, 1e-20) for x in sets],
            lambda x=sets[0], w=gain, f=reference: relative(rms_norm(x, w, 1e-20), f(x, w, 1e-20)),
            5e-3, count, None, {"torch rms_norm": lambda s=sets, w=gain: library_norm(s, w)},
        )  # fmt: skip
    pair = torch.arange(32, dtype=torch.float64, device=DEVICE)
    frequencies = 10000.0 ** (-pair / 32)
    for count in ROWS:
        cost = 4.0 * count * 32 * 128
        sets = [inputs(count, 32, 128) for _ in range(rotations(cost))]
        positions = torch.randint(1 << 20, (count,), device=DEVICE)
        turn = OPERATORS["rope"].reference
        yield Row(
            "rope", f"{count} of 32x128", cost, 0.0,
            [lambda x=x, p=positions: apply_rope(x, p, frequencies) for x in sets],
            lambda x=sets[0], p=positions, f=turn: relative(
                apply_rope(x, p, frequencies), f(x, p, frequencies)
            ),
            5e-3, count,
        )  # fmt: skip


def rows(peers: ModuleType | None) -> Iterator[Row]:
    yield from gate_rows(peers)
    yield from mhc_rows(peers)
    yield from row_rows()
