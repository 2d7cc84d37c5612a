"""Gate, hyper-connections, norm and rotation at the released sizes."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from harness import DEVICE, Row, relative, rotations
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

            theirs = []
            if peers is not None and half:
                theirs = [
                    lambda u=u, w=w: peers.softplus_sqrt_topk(
                        torch.mm(u, w.T, out_dtype=torch.float32), bias
                    )
                    for u, w in sets
                ]
            ours = [lambda g=g, sizes=sizes: mega_gate(*g, bias, None, None, **sizes) for g in sets]
            name = "bfloat16" if half else "float32"
            yield Row(
                "mega_gate", f"{count} {name}", cost, 2.0 * count * WIDTH * EXPERTS, ours, error,
                1e-5, target if half else None, "cublas + vllm epilogue", theirs,
            )  # fmt: skip


def four_pieces(peers: ModuleType, given: dict[str, torch.Tensor], scale: Any, base: Any) -> Any:
    """Expand, the product of the mix, its coefficients, collapse and norm: compiled by torch but
    for the product, which is DeepGEMM's."""

    @torch.compile(dynamic=True)
    def expand(y: Any, x: Any, post: Any, comb: Any) -> Any:
        new = post.unsqueeze(-1) * y.float().unsqueeze(1)
        for i in range(STREAMS):
            new = new + comb[:, i, :, None] * x[:, i : i + 1].float()
        return new.bfloat16()

    @torch.compile(dynamic=True)
    def collapse(x: Any, pre: Any, norm: Any) -> Any:
        u = (pre.unsqueeze(-1) * x.float()).sum(1).bfloat16().float()
        return (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-20) * norm).bfloat16()

    @torch.compile(dynamic=True, fullgraph=True)
    def coefficients(z: Any, squares: Any) -> Any:
        z = z.sum(0) * torch.rsqrt(squares.sum(0).unsqueeze(-1) / (STREAMS * WIDTH) + 1e-20)
        pre = torch.sigmoid(z[:, :4] * scale[0] + base[:4]) + 1e-6
        post = 2 * torch.sigmoid(z[:, 4:8] * scale[1] + base[4:8])
        c = [
            [z[:, 8 + 4 * i + j] * scale[2] + base[8 + 4 * i + j] for j in range(4)]
            for i in range(4)
        ]
        for i in range(4):
            top = torch.maximum(torch.maximum(c[i][0], c[i][1]), torch.maximum(c[i][2], c[i][3]))
            e = [torch.exp(v - top) for v in c[i]]
            s = 1 / (e[0] + e[1] + e[2] + e[3])
            c[i] = [v * s + 1e-6 for v in e]
        for step in range(20):
            for i in range(4 if step else 0):
                s = 1 / (c[i][0] + c[i][1] + c[i][2] + c[i][3] + 1e-6)
                c[i] = [v * s for v in c[i]]
            for j in range(4):
                s = 1 / (c[0][j] + c[1][j] + c[2][j] + c[3][j] + 1e-6)
                for i in range(4):
                    c[i][j] = c[i][j] * s
        return pre, post, torch.stack([v for r in c for v in r], -1).view(-1, 4, 4)

    def run(given: dict[str, torch.Tensor]) -> Any:
        x = expand(given["y"], given["streams"], given["post"], given["comb"])
        z, squares = peers.hc_prenorm(x.flatten(1), given["fn"], peers.hc_splits(len(x)))
        return x, coefficients(z, squares), collapse(x, given["pre"], given["norm"])

    return run


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

        sets = [one() for _ in range(min(32, rotations(cost)))]

        def error(given=sets[0]) -> float:
            expected = mhc_pieces_on_cpu(given)
            expanded, mix, u = mega_mhc(**given, **SIZES)
            some = [expanded[:64], *(x[:64] for x in mix), u[:64]]
            return max(relative(a.cpu(), b) for a, b in zip(some, expected, strict=True))

        theirs = []
        if peers is not None:
            run = four_pieces(peers, sets[0], scale, base)
            theirs = [lambda given=given, run=run: run(given) for given in sets]
        yield Row(
            "mega_mhc", f"{count}", cost, 2.0 * count * MIXES * STREAMS * WIDTH,
            [lambda given=given: mega_mhc(**given, **SIZES) for given in sets], error, 5e-3, target,
            "compiled pieces + deep_gemm.hc_prenorm", theirs,
        )  # fmt: skip


def mhc_pieces_on_cpu(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of at most 64 rows: the references of the pieces."""
    rows = ("streams", "y", "post", "comb", "pre")
    some = {name: (x[:64] if name in rows else x).cpu() for name, x in given.items()}
    expanded, mix, u = OPERATORS["mega_mhc"].reference(**some, **SIZES)
    return [expanded, *mix, u]


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
            5e-3, None, "torch rms_norm",
            [
                lambda x=x, w=gain: torch.nn.functional.rms_norm(x, (WIDTH,), w, 1e-20)
                for x in sets
            ],
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
            5e-3,
        )  # fmt: skip


def rows(peers: ModuleType | None) -> Iterator[Row]:
    yield from gate_rows(peers)
    yield from mhc_rows(peers)
    yield from row_rows()
