"""The kernels of linear layers for kernels_ahead.py: name, kernel, argument types, compile-time
constants at the released sizes, warps and stages."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from plugins.device.launch import Limits
from plugins.linear import kernel as linear
from plugins.linear import kernel_few as few
from plugins.linear import kernel_long as long
from plugins.linear import kernel_one as one
from plugins.linear import kernel_planes as planes
from plugins.linear import kernel_row as row
from plugins.linear import kernel_split as split

STRIDE = "aligned i32"
DOT = {"DOT": tl.bfloat16, "WIDEN": False}
LINEAR = {
    "x": "*bf16", "row_stride": STRIDE, "codes": "*u8", "scale": "*u8", "scale_stride": STRIDE,
    "global_scale": "*fp32", "y": "*bf16", "num_rows": "i32", "N": STRIDE, "K": STRIDE,
    "chunk": STRIDE, "rounded": "*bf16", "values": "*bf16", "parts": "*fp32", "numel": "i32",
    "planes": "*bf16", "plane_stride": STRIDE, "groups": "i32", "x_stride": STRIDE,
    "other_codes": "*u8", "other_scale": "*u8", "other_y": "*bf16", "other_N": STRIDE,
    "other_global": "*fp32", "programs": "i32", "per_group": "i32",
}  # fmt: skip


def kernels(device: Limits) -> list[tuple[Any, ...]]:
    parted, overlap = {"SPLIT": True}, {"OVERLAP": device.float8}
    whole = {"FLOAT8": device.float8, "GROUPS": 8, **parted}
    made: list[tuple[Any, ...]] = []
    for name, stored, rows in (
        ("planes", 0, 16), ("planes, 128 rows", 0, 128), ("MXFP4", 2, 16), ("NVFP4", 3, 16),
    ):  # fmt: skip
        tile = linear.plane_tiles(rows, 1280, device, stored=stored)
        sizes = {"OUTPUTS": tile.outputs, "ROWS": tile.rows, "INNER": tile.inner}
        constants = {"STORED": stored, "WIDEN": False, **parted, **sizes, **overlap}
        made.append(
            (f"linear {name}", planes.product_planes, LINEAR, constants, tile.warps, tile.stages)
        )
    for name, rows, stored, outputs, inner in (
        ("one row", 1, 0, 5120, 8192), ("few rows", 8, 1, 32_768, 1280),
        ("few rows FP4", 8, 2, 32_768, 1280), ("few rows NVFP4", 8, 3, 1280, 5120),
    ):  # fmt: skip
        tile = few.few_tiles(rows, outputs, inner, 132, stored=stored)
        constants = {
            "STORED": stored, "ROWS": rows, "SHARES": tile.shares, "OUTPUTS": tile.outputs,
            "STEPS": tile.steps, "STAGES": tile.stages, "EVEN": rows == 1, **overlap,
        }  # fmt: skip
        made.append((f"linear {name}", few.linear_few, LINEAR, constants, 8))
    for name, stored, inner in (("FP4", 2, 1280), ("NVFP4", 3, 8192)):
        tile = one.one_tiles(inner)
        constants = {
            "K": inner, "STORED": stored, "SHARES": tile.shares, "OUTPUTS": tile.outputs,
            "EVEN": stored == 2,
        }  # fmt: skip
        made.append((f"linear one row {name}", one.linear_one, LINEAR, constants, tile.warps))
    for name, stored, inner, rounds in (
        ("", 0, long.ROUNDED, True), (" MXFP8", 1, long.ROUNDED, True),
        (" of a group", 0, long.AS_IT_IS, False),
    ):  # fmt: skip
        constants = {
            "STORED": stored, "K": inner, "OUTPUTS": long.OUTPUTS, "BYTES": long.BYTES,
            "ROUND": rounds,
        }  # fmt: skip
        made.append((f"linear long row{name}", long.linear_long, LINEAR, constants, long.WARPS))
    for name, kind, constants in (
        ("values", "*bf16", {"STORED": 0, "WORDS": True, "EVEN": True, **DOT}),
        ("float32", "*fp32", {"STORED": 1, "WORDS": False, "EVEN": False, "DOT": tl.float32,
                              "WIDEN": False}),
    ):  # fmt: skip
        tile = linear.tiles(32, device, wide=kind == "*fp32")
        sizes = {"OUTPUTS": tile.outputs, "ROWS": tile.rows, "INNER": tile.inner}
        made.append(
            (
                f"linear {name}", linear._product, {**LINEAR, "x": kind, "y": kind},
                {**constants, **whole, **sizes}, tile.warps, tile.stages,
            )
        )  # fmt: skip
    return [
        *made,
        (
            "linear spread", planes.spread_rows, LINEAR,
            {"TILE": 1024, "FP4": False, "ROUND": True, "FLOAT8": device.float8, **overlap}, 4,
        ),
        ("linear round", linear._round_rows, LINEAR, {"TILE": 1024, "FLOAT8": device.float8}, 4),
        (
            "linear decode", linear._decode, LINEAR,
            {"STORED": 0, "WORDS": True, "EVEN": True, "ROWS": 32, "COLUMNS": 256,
             "FLOAT8": device.float8}, 4,
        ),
        (
            "linear row of values", row.linear_row,
            {**LINEAR, "weight": "*bf16", "weight_stride": STRIDE, "other": "*bf16",
             "other_stride": STRIDE, "y": "*fp32", "N": "i32"},
            {"K": 5120, "STEP": row.STEP, **overlap}, 4,
        ),
        ("linear join", linear._join, LINEAR, {"PARTS": 8, "TILE": 512, **overlap}, 4),
        # A launch makes a constant of an integer that is 1.
        (
            "linear split", split._split, {**LINEAR, "x": "*fp32", "parts": "*bf16"},
            {"TILE": 1024, "num_rows": 1}, 4,
        ),
        (
            "linear sum", split._sum, {**LINEAR, "products": "*fp32", "y": "*fp32"},
            {"TILE": 1024, "numel": 1}, 4,
        ),
    ]  # fmt: skip
