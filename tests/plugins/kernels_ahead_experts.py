"""The kernels around the experts, hyper-connections and norms for kernels_ahead.py: name, kernel,
argument types, compile-time constants at the released sizes, warps and stages."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from plugins.device.launch import Limits
from plugins.mega_gate import kernel as gate
from plugins.mega_mhc import kernel as mhc
from plugins.mega_mhc import kernel_hopper as mhc_hopper
from plugins.mega_mhc.kernel_finish import finish, normalise
from plugins.mega_mhc.kernel_hopper import streams_hopper
from plugins.mega_mhc.kernel_pass import stack, streams_pass
from plugins.moe import kernel as moe
from plugins.moe import kernel_few
from plugins.moe import kernel_hopper as hopper
from plugins.moe import kernel_product as product
from plugins.moe import kernel_route as routing
from plugins.moe.device_weights import FLOAT8
from plugins.norm import kernel as norm
from plugins.rope import kernel as rope

STRIDE = "aligned i32"
DOT = {"DOT": tl.bfloat16, "WIDEN": False}
EXPERTS = {
    "x": "*bf16", "shared_x": "*bf16", "powers": "*fp32", "segments": "*i32",
    "num_segments": "*i32", "order": "*i32", "weights": "*fp32", "table": "*i64",
    "exponents": "*u8",
    "shared_table": "*i64", "activation": "*bf16", "shared_activation": "*bf16", "y": "*fp32",
    "num_rows": "i32", "num_pairs": "i32", "limit": "fp32", "ids": "*i64",
    "num_experts": "i32", "num_groups": "i32", "places": "*i32", "halves": "*fp16",
    "row_stride": STRIDE, "rounded": "*bf16",
    "first_values": "i32", "end_codes": "i32", "total": "*bf16", "first_shared": "i32",
}  # fmt: skip
GATE = {
    "u": "*bf16", "row_stride": STRIDE, "weight": "*bf16", "weight_stride": STRIDE,
    "parts": "*fp32", "num_rows": "i32", "num_experts": "i32",
    "bias": "*fp32", "bias_image": "*fp32", "is_image": "*u8", "ids": "*i64", "weights": "*fp32",
    "route_scale": "fp32", "inverse_temperature": "fp32",
}  # fmt: skip
MHC = {
    "streams": "*bf16", "row_stride": STRIDE, "stream_stride": STRIDE, "y": "*bf16",
    "y_stride": STRIDE, "post": "*fp32", "comb": "*fp32", "pre": "*fp32", "fn": "*fp32",
    "expanded": "*bf16", "collapsed": "*bf16", "sums": "*fp32", "num_rows": "i32",
    "num_tiles": "i32", "base": "*fp32", "scale": "*fp32", "weight": "*bf16", "stacked": "*bf16",
    "sinkhorn_iters": "i32", "hc_eps": "fp32", "norm_eps": "fp32",
}  # fmt: skip
ROWS = {
    "x": "*bf16", "row_stride": STRIDE, "weight": "*bf16", "y": "*bf16", "eps": "fp32",
    "vector_stride": STRIDE, "positions": "*i64", "inv_freq": "*fp64", "num_vectors": "i32",
}  # fmt: skip
STREAMS = {"WIDTH": 5120, "S": 4, "SUMS": 32}


def experts(kernel: Any, rows: int, device: Limits, **more: Any) -> tuple[Any, ...]:
    """A product of the experts with the released formats, as a launch for `rows` makes it."""
    codes = "*fp8e4nv" if device.float8 else "*u8"
    constants = {
        "WIDTH": 5120, "INTER": 2304, "STORED": 9 if device.float8 else 2, "WORDS": True,
        "SHARED_STORED": 0, "SHARED_WORDS": True, "INNER": 128, "ROWS": rows, "SHARED": 1,
        "SHARED_ROWS": moe.most_shared_rows(rows), "SHARED_INNER": 128, "HARDWARE": device.float8,
        "WARPS": moe.warps(rows), "OVERLAP": device.float8, **DOT, **more,
    }  # fmt: skip
    arguments = {**EXPERTS, "codes": codes}
    return kernel, arguments, constants, moe.warps(rows), moe.stages(device, wide=False)


def hopper_experts(pairs: int, matrices: int, stored: int = FLOAT8) -> tuple[Any, ...]:
    """Both matrices that read the hidden state, or the one that writes it."""
    tile = moe.hopper_tile(pairs, stored)
    columns, outputs = (5120, 2304) if matrices == 2 else (2304, 5120)
    constants = {
        "TOP_K": 6 if matrices == 2 else 1, "COLUMNS": columns, "OUTPUTS": outputs,
        "MATRICES": matrices, "STORED": stored, **tile.constants(),
    }  # fmt: skip
    result = "*bf16" if matrices == 2 else "*fp32"
    arguments = {**EXPERTS, "x": "*fp16" if stored == 3 else "*fp8e4nv", "result": result}
    return hopper.product_hopper, arguments, constants, tile.warps


def few_experts(
    matrices: int, tokens: int, pairs: int, stored: int, shared: int
) -> tuple[Any, ...]:
    """Of a few `tokens`, with so many pairs of an expert; chosen and shared experts are stored as
    these numbers say."""
    _, arguments, constants, _ = hopper_experts(64, matrices)
    constants = {n: x for n, x in constants.items() if n in ("TOP_K", "COLUMNS", "OUTPUTS")}
    constants |= {
        "MATRICES": matrices,
        **kernel_few.few_constants(tokens, pairs, constants["COLUMNS"], stored, shared, 1),
    }  # fmt: skip
    return kernel_few.experts_few, arguments, constants, kernel_few.WARPS


def streams(rows: int, **more: Any) -> tuple[Any, ...]:
    """The pass over the streams as a launch for `rows` makes it."""
    size = mhc.launch(rows, wide=False)
    constants = {
        **STREAMS, "MIXES": 24, "MIX_TILE": 64, "ROWS": size.rows, "TILE": size.tile,
        "TILES": size.tiles, "PART": mhc.PART_CHANNELS // size.tile, "PARTS": 16,
        "STACKED": size.stacked, "OVERLAP": False, "EXPAND": True, "MIX": True, "COLLAPSE": True,
        **DOT, **more,
    }  # fmt: skip
    arguments = {**MHC, "fn": "*bf16" if size.stacked else "*fp32"}
    return streams_pass, arguments, constants, size.warps, size.stages


def kernels(device: Limits) -> list[tuple[Any, ...]]:
    """Those whose products differ between generations first; the rest for 9.0."""
    few = [
        ("experts down", *experts(product.down, 16, device, TILE=128)),
        ("mhc", *streams(8192)),
    ]  # fmt: skip
    if not device.float8 or device.tensor_memory or device.shared_memory < 160_000:
        return few
    rounded = {
        "WIDTH": 5120, "HEAD": 4096, "REST": 1024, "VALUES": True, "CODES": True, "HALVES": True,
        "FLOAT8": True, "OVERLAP": True,
    }  # fmt: skip
    tile = {"DEPTH": 128, "EXPERTS": 64, "WIDTH": 5120, "PART": 640}
    return [
        *few,
        ("experts up", *experts(product.gate_up, 128, device, TILE=64, TOP_K=6)),
        ("experts up, many rows", *hopper_experts(512, 2)),
        ("experts down, some rows", *hopper_experts(64, 1)),
        ("experts up, many rows of NVFP4", *hopper_experts(512, 2, 3)),
        ("experts down, some rows of NVFP4", *hopper_experts(64, 1, 3)),
        ("experts up, some rows of MXFP8", *hopper_experts(64, 2, 1)),
        ("experts down, many rows of MXFP8", *hopper_experts(512, 1, 1)),
        ("experts up, few rows", *few_experts(2, 1, 1, FLOAT8, 0)),
        ("experts down, few rows", *few_experts(1, 128, 16, FLOAT8, 1)),
        ("experts up, few rows of NVFP4", *few_experts(2, 64, 8, 3, 3)),
        ("experts down, few rows of NVFP4", *few_experts(1, 8, 2, 3, 0)),
        ("experts down, few rows of MXFP8", *few_experts(1, 64, 8, 1, 1)),
        (
            "route", routing.route, {**EXPERTS, "codes": "*fp8e4nv"},
            {"EXPERTS": 512, "CHUNK": 4096, "MOST": 128, "LATE": False, **rounded}, 8,
        ),
        ("round rows", routing.round_rows, {**EXPERTS, "codes": "*fp8e4nv"}, rounded, 8),
        (
            "combine", routing.combine, EXPERTS,
            {"TOP_K": 6, "PADDED_K": 8, "SHARED": 1, "WIDTH": 5120, "TILE": 1024,
             "OVERLAP": True}, 4,
        ),
        (
            "gate", gate._logits, GATE,
            {**tile, "ROWS": 64, "KEEP": False, "AHEAD": 16, "OVERLAP": True, **DOT}, 4, 5,
        ),
        (
            "gate of few rows", gate._logits, GATE,
            {**tile, "ROWS": 16, "KEEP": True, "AHEAD": 16, "OVERLAP": True, **DOT}, 4,
        ),
        (
            "choose", gate._choose, GATE,
            {
                "NUM_EXPERTS": 384, "TOP_K": 6, "CHUNKS": 12, "CHUNK": 32, "PLACES": 8,
                "IMAGES": True, "PARTS": 8, "SUM_EPS": 1e-20,
                "EARLY": True, "OVERLAP": True,
            }, 1,
        ),
        ("mhc of few rows", *streams(64, OVERLAP=True)),
        ("advance of few rows", *streams(32, OVERLAP=True, MIX=False)),
        ("mhc of a mix alone", *streams(32, OVERLAP=True, EXPAND=False, COLLAPSE=False)),
        (
            "normalise", normalise, MHC,
            {"WIDTH": 5120, "TILE": 1024, "OVERLAP": True}, 4,
        ),
        ("expand", *streams(8192, MIX=False, COLLAPSE=False)),
        (
            "mhc of warp groups", streams_hopper, MHC,
            {
                **{n: x for n, x in STREAMS.items() if n != "S"}, "MIXES": 24, "PARTS": 16,
                **mhc_hopper.SIZES,
            }, 4,
        ),
        ("stack", stack, MHC, {"LENGTH": 20480, "TILE": 1024, "OVERLAP": True}, 4),
        *(
            (
                f"finish of {rows} rows", finish, MHC,
                {
                    **STREAMS, "PARTS": 16, "PER": per, "ROWS": mhc.finish_rows(rows),
                    "NORM": True, "TILE": 1024, "OVERLAP": True, "NATIVE": True,
                }, 4,
            )
            for rows, per in ((1, 5), (1024, 1))
        ),
        ("norm", norm._rms_norm, ROWS, {"WIDTH": 5120, "PADDED": 8192, "OVERLAP": True}, 8),
        (
            "rope", rope._rotate, ROWS,
            {"WIDTH": 512, "ROTATED": 64, "PAIRS": 256, "VECTORS": 32, "INVERSE": False}, 4,
        ),
    ]  # fmt: skip
