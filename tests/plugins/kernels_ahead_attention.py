"""The kernels of attention for kernels_ahead.py: name, kernel, argument types, compile-time
constants at the released sizes, warps and stages."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from plugins.device.launch import Limits
from plugins.mega_attention import kernel as attention
from plugins.mega_attention import kernel_hopper as hopper
from plugins.mega_attention import kernel_hopper_few as few
from plugins.mega_attention import kernel_hopper_whole as many

STRIDE = "aligned i32"
MAIN = {"ROWS": 64, "ROW": 288, "STORED": 4}
WINDOW = {"ROWS": 32, "ROW": 528, "STORED": 2}
DOT = {"DOT": tl.bfloat16, "WIDEN": False}
HEAD = {"H": 64, "WIDTH": 512, "ROTATED": 64, "PAIRS": 256}
SMALL_ATTENTION = {
    "H": 8, "WIDTH": 128, "ROTATED": 16, "PAIRS": 64, "HEADS": 16, "TILE": 32, "CHUNK": 128,
    "SPLIT": False, "DOT": tl.float32, "WIDEN": False,
    "WINDOW_ROWS": 1, "WINDOW_ROW": 128, "WINDOW_STORED": 0,
    "MAIN_ROWS": 8, "MAIN_ROW": 72, "MAIN_STORED": 1,
}  # fmt: skip
ATTENTION = {
    "q": "*bf16", "row_stride": STRIDE, "head_stride": STRIDE, "positions": "*i64",
    "inv_freq": "*fp64", "sink": "*fp32", "o": "*bf16", "parts": "*fp32", "stats": "*fp32",
    "scale": "fp32", "window": "*u8", "window_pages": STRIDE, "main": "*u8", "main_pages": STRIDE,
    "window_slots": "*i64", "window_stride": STRIDE, "window_keys": STRIDE,
    "main_slots": "*i64", "main_stride": STRIDE, "main_keys": STRIDE, "num_parts": "i32",
    "window_chunk": "i32", "chunk": "i32", "lead": "i32", "num_items": "i32", "num_rows": "i32",
    "window_parts": "i32",
}  # fmt: skip


def prefixed(prefix: str, constants: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in constants.items()}


def of_warp_groups(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Those of `constants` that a kernel in Gluon has."""
    return {name: x for name, x in constants.items() if name in kernel.arg_names}


def kernels(device: Limits) -> list[tuple[Any, ...]]:
    whole = {
        **HEAD, **DOT, **prefixed("WINDOW", WINDOW), **prefixed("MAIN", MAIN),
        "HEADS": attention.most_heads(device, torch.bfloat16),
        "TILE": 32, "CHUNK": 128,
    }  # fmt: skip
    return [
        ("attention", attention._attention, ATTENTION, {**whole, "SPLIT": False}, 8),
        ("attention in chunks", attention._attention, ATTENTION, {**whole, "SPLIT": True}, 8),
        (
            "attention float32", attention._attention, {**ATTENTION, "q": "*fp32", "o": "*fp32"},
            {
                **whole, "HEADS": attention.most_heads(device, torch.float32), "TILE": 16,
                "SPLIT": False, "DOT": tl.float32,
            }, 4, 1,
        ),
        (
            "attention small", attention._attention,
            {**ATTENTION, "q": "*fp32", "o": "*fp32", "window": "*fp32"}, SMALL_ATTENTION, 4,
        ),
        ("attention join", attention._join, ATTENTION, {**HEAD, "HEADS": 4, "GROUP": 16}, 4),
        *(
            (
                f"attention of few rows, {keys} keys, {heads} heads", few.attention_few, ATTENTION,
                {**of_warp_groups(few.attention_few, whole), "HEADS": heads, "KEYS": keys}, 8,
            )
            for _, keys, heads in few.CUTS
        ),
        (
            "attention join, kept order", attention._join_kept, ATTENTION,
            {**HEAD, "HEADS": 1, "GROUP": 16, "MORE": False}, 4,
        ),
        *(
            (
                f"attention of warp groups{cut}", kernel, ATTENTION,
                {**of_warp_groups(kernel, whole), "HEADS": hopper.HEADS, "TILE": hopper.TILE},
                warps,
            )
            for cut, kernel, warps in (
                ("", many.attention_whole, 4), (" in chunks", hopper.attention_hopper, 8),
            )
        ),
    ]  # fmt: skip
