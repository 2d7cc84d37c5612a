"""What the tests of experts share: packed experts, and their sum in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_oracle import DEVICE

from plugins.formats import mxfp8
from plugins.formats.nvfp4 import quantize_weight
from plugins.formats.released import quantize_fp4_rows, quantize_fp8_blocks, quantize_fp8_rows
from plugins.linear.weight import PackedFormat, PackedMatrix
from plugins.moe import ExpertWeights, PackedExpertWeights

QUANTIZERS: dict[str, Callable] = {
    "fp4": quantize_fp4_rows,
    "fp8": quantize_fp8_blocks,
    "mxfp8": quantize_fp8_rows,
    "nvfp4": quantize_weight,
}


def packed(weight: torch.Tensor, name: str, dtype: torch.dtype) -> PackedMatrix:
    codes, scale, *rest = QUANTIZERS[name](weight)
    factor = rest[0].to(DEVICE) if rest else None
    shape = (weight.shape[0], weight.shape[1])
    return PackedMatrix(
        PackedFormat(name), shape, codes.to(DEVICE), scale.to(DEVICE), factor, dtype
    )


def experts(
    count: int, hidden: int, inter: int, name: str, dtype: torch.dtype, spread: int = 0
) -> PackedExpertWeights:
    """Groups of 32 differ by up to 2^spread; one row of every matrix is zero."""
    draw = torch.Generator().manual_seed(count + spread)

    def matrices(rows: int, columns: int) -> list[PackedMatrix]:
        made = []
        for _ in range(count):
            powers = 2.0 ** -torch.randint(spread + 1, (rows, columns // 32), generator=draw)
            weight = torch.randn(rows, columns, generator=draw) * columns**-0.5
            weight *= powers.repeat_interleave(32, 1)
            weight[rows // 2] = 0.0
            made.append(packed(weight, name, dtype))
        return made

    w1, w3, w2 = matrices(inter, hidden), matrices(inter, hidden), matrices(hidden, inter)
    return PackedExpertWeights(w1, w3, w2, dtype, quantized_input=True)


def on_device(operands: dict) -> dict:
    def moved(x: object) -> object:
        if isinstance(x, PackedExpertWeights):
            return x
        if isinstance(x, ExpertWeights):
            return ExpertWeights(*(w.to(DEVICE) for w in (x.w1, x.w3, x.w2)), x.quantized_input)
        return x.to(DEVICE) if isinstance(x, torch.Tensor) else x

    return {name: moved(x) for name, x in operands.items()}


def in_float64(operands: dict) -> torch.Tensor:
    """Token by token and expert by expert."""
    u, ids, weights = (operands[name].cpu() for name in ("u", "ids", "weights"))
    limit = operands["swiglu_limit"]
    total = torch.zeros(u.shape, dtype=torch.float64)
    for which in ("routed", "shared"):
        of = operands[which]
        w1, w3, w2 = (w.cpu().double() for w in (of.w1, of.w3, of.w2))
        for t in range(len(u)):
            x = u[t].double()
            x = mxfp8.ACTIVATION.round(x) if of.quantized_input else x
            chosen = ids[t].tolist() if which == "routed" else range(of.count)
            for place, e in enumerate(chosen):
                gate = (w1[e] @ x).clamp(max=limit)
                a = gate * torch.sigmoid(gate) * (w3[e] @ x).clamp(-limit, limit)
                a = a * weights[t, place].double() if which == "routed" else a
                a = a.to(u.dtype).double()
                total[t] += w2[e] @ (mxfp8.ACTIVATION.round(a) if of.quantized_input else a)
    return total


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    difference = ours.cpu().double() - expected.double()
    return float(difference.norm() / expected.double().norm().clamp(min=1e-30))


def no_experts(hidden: int, inter: int, dtype: torch.dtype) -> ExpertWeights:
    up = torch.empty(0, inter, hidden, dtype=dtype, device=DEVICE)
    return ExpertWeights(up, up, up.transpose(1, 2), quantized_input=False)
