"""Linear layers and the grouped output projection over packed weights at the released sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from harness import DEVICE, Call, Peers, Row, relative, rotations

from plugins.formats import mxfp8
from plugins.linear import LinearWeight, PackedFormat, PackedLinearWeight, PackedMatrix
from plugins.linear.kernel import linear
from plugins.wo_a.kernel import wo_a

# Outputs, inputs.
SHAPES = {
    "wq_a": (1280, 5120),
    "wq_b": (32_768, 1280),
    "wkv": (512, 5120),
    "wo_b": (5120, 8192),
    "shared w1": (2304, 5120),
    "engram wkv": (25_600, 6144),
}
ROWS = (1, 16, 64, 256, 1024, 4096)
REQUANTISED = ("wq_b", "wo_b")
GROUPS, RANK, GROUP_WIDTH, HEADS, WIDTH = 8, 1024, 4096, 64, 512
# Rows → microseconds to stay below for the whole chain.
WO_A = {1: 13.0, 16: 13.0, 64: 13.0, 256: 18.0}


def stored_bytes(stored: PackedFormat, outputs: int, inputs: int) -> int:
    values = outputs * inputs
    return {
        PackedFormat.FP8_BLOCKS: values + values // 1024,
        PackedFormat.MXFP8: values + values // 32,
        PackedFormat.FP4_ROWS: values // 2 + values // 32,
        PackedFormat.NVFP4: values // 2 + values // 16,
    }[stored]


def weight(stored: PackedFormat, outputs: int, inputs: int) -> PackedLinearWeight:
    """Random codes that are numbers, and scales that differ by up to 16."""
    fp4 = stored in (PackedFormat.FP4_ROWS, PackedFormat.NVFP4)
    codes = torch.randint(0x7F, (outputs, inputs // (2 if fp4 else 1)), device=DEVICE)
    codes |= torch.randint(2, codes.shape, device=DEVICE) << 7
    shape = (outputs, inputs // (16 if stored is PackedFormat.NVFP4 else 32))
    if stored is PackedFormat.FP8_BLOCKS:
        shape = (-(-outputs // 32), inputs // 32)
    global_scale = None
    scale = torch.randint(116, 120, shape, device=DEVICE)
    if stored is PackedFormat.NVFP4:
        scale, global_scale = scale - 60, torch.tensor(0.01, device=DEVICE)
    kept = (codes.to(torch.uint8), scale.to(torch.uint8), global_scale)
    matrix = PackedMatrix(stored, (outputs, inputs), *kept, torch.bfloat16)
    return PackedLinearWeight(matrix, quantized_input=True)


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def expected(x: torch.Tensor, given: LinearWeight, groups: int = 1) -> torch.Tensor:
    """At most sixteen rows, in float32."""
    rounded = mxfp8.ACTIVATION.round(x[:16].flatten(1).float())
    per_group = rounded.unflatten(1, (groups, -1)).transpose(0, 1)
    value = given.value.float().unflatten(0, (groups, -1)).transpose(1, 2)
    return torch.bmm(per_group, value).transpose(0, 1).flatten(1)


def operand_unit(stored: PackedFormat) -> str:
    """The product whose ceiling holds: E4M3 holds the codes of all but NVFP4, whose scales of 16
    are no powers of two."""
    return "bf16" if stored is PackedFormat.NVFP4 else "float8"


def library(x: torch.Tensor, values: Sequence[torch.Tensor]) -> Sequence[Call]:
    return [lambda v=v: x @ v.T for v in values]


def rows(peers: ModuleType | None) -> Iterator[Row]:
    shapes = SHAPES if DEVICE == "cuda" else {"wq_a": (128, 1280)}
    for name, (outputs, width) in shapes.items():
        for stored in PackedFormat:
            if stored is not PackedFormat.FP8_BLOCKS and name not in REQUANTISED:
                continue
            sets = rotations(stored_bytes(stored, outputs, width))
            weights = [weight(stored, outputs, width) for _ in range(sets)]
            values = [one.value for one in weights[: rotations(2.0 * outputs * width)]]
            for count in ROWS if stored is PackedFormat.FP8_BLOCKS else (1, 64, 1024):
                cost = stored_bytes(stored, outputs, width) + 2.0 * count * (width + outputs)
                x = inputs(count, width)
                ours = [lambda x=x, w=w: linear(x, w) for w in weights]
                yield Row(
                    "linear", f"{name} {stored.value} {count}", cost,
                    2.0 * count * outputs * width, ours,
                    lambda x=x, w=weights[0]: relative(linear(x, w)[:16], expected(x, w)),
                    5e-3, min(16, count), None,
                    {"torch bfloat16 product": lambda x=x, v=values: library(x, v)},
                    operand_unit(stored),
                )  # fmt: skip
            del weights, values
    yield from grouped_rows(peers)


def einsum(
    peers: ModuleType, o: torch.Tensor, weights: Sequence[PackedLinearWeight]
) -> Sequence[Call]:
    """Its inputs are already rounded, and its weight has scales per 128 × 128."""
    codes, scale = peers.quant_rows(o.view(-1, GROUPS, GROUP_WIDTH).transpose(0, 1))
    codes, scale = codes.transpose(0, 1), peers.rows_k_major(scale).transpose(0, 1)
    blocks = [peers.quant_blocks(one.value.view(GROUPS, RANK, GROUP_WIDTH)) for one in weights]
    z = torch.empty(len(o), GROUPS, RANK, device=DEVICE, dtype=torch.bfloat16)
    return [lambda w=w: peers.wo_a_fp8(codes, scale, *w, z) for w in blocks]


def grouped_rows(peers: ModuleType | None) -> Iterator[Row]:
    outputs = GROUPS * RANK if DEVICE == "cuda" else GROUPS * 64
    kept = stored_bytes(PackedFormat.FP8_BLOCKS, outputs, GROUP_WIDTH)
    weights = [
        weight(PackedFormat.FP8_BLOCKS, outputs, GROUP_WIDTH) for _ in range(rotations(kept))
    ]
    for count, target in WO_A.items():
        o = inputs(count, HEADS, WIDTH)
        others: Peers = {}
        if peers:
            others = {"deep_gemm.fp8_einsum": lambda o=o: einsum(peers, o, weights)}
        ours = [lambda o=o, w=w: wo_a(o, w, GROUPS) for w in weights]
        yield Row(
            "wo_a", f"{count}", kept + 2.0 * count * (HEADS * WIDTH + outputs),
            2.0 * count * outputs * GROUP_WIDTH, ours,
            lambda o=o, w=weights[0]: relative(wo_a(o, w, GROUPS)[:16], expected(o, w, GROUPS)),
            5e-3, min(16, count), target, others, operand_unit(PackedFormat.FP8_BLOCKS),
        )  # fmt: skip
