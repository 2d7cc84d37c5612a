"""What the kernel tests share: where the kernels run, and packed stores of hostile bytes."""

from __future__ import annotations

import dataclasses
import importlib
import types

import pytest
import torch

from plugins.formats.records import RecordLayout
from plugins.formats.rows import PackedRows, RowStore, ValueRows
from plugins.linear import LinearWeight, PackedLinearWeight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_kernel(name: str) -> types.ModuleType:
    """The kernel module of an operator; skips where it can neither run nor be interpreted."""
    triton = pytest.importorskip("triton")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip(
            "no CUDA device and no interpreter (TRITON_INTERPRET=1)", allow_module_level=True
        )
    return importlib.import_module(f"plugins.{name}.kernel")


def paged(values: ValueRows, layout: RecordLayout, rows_per_page: int) -> tuple[RowStore, RowStore]:
    """The rows of `values`, rounded, as packed pages and as float64 values of the same slots.

    The pages are a strided view of larger ones, as in a pool, 16 bytes aligned where rows are of
    whole words; all other bytes are 0xFF, which no kernel may read: NaN in every record.
    """
    rounded = layout.round(values.values.double())
    packed = layout.pack(rounded.nan_to_num())
    packed[rounded.isnan().any(-1)] = 0xFF
    pages = -(-len(packed) // rows_per_page)
    row = layout.bytes_per_row
    rows = torch.full((pages * rows_per_page, row), 0xFF, dtype=torch.uint8)
    rows[: len(packed)] = packed
    size = 32 + rows_per_page * row + 48
    size += -size % 16 if row % 4 == 0 else 0
    memory = torch.full((pages, size), 0xFF, dtype=torch.uint8).to(DEVICE)
    view = memory[:, 32 : 32 + rows_per_page * row].unflatten(1, (rows_per_page, row))
    view.copy_(layout.pages(rows.view(pages, rows_per_page, row)))
    return PackedRows(view, layout), ValueRows(rounded)


def moved(operands: dict) -> dict:
    """Operands of a case on the device that the kernels run on."""
    return {
        name: ValueRows(x.values.to(DEVICE), x.layout)
        if isinstance(x, ValueRows)
        else moved_weight(x)
        if isinstance(x, LinearWeight)
        else x.to(DEVICE)
        if isinstance(x, torch.Tensor)
        else x
        for name, x in operands.items()
    }


def moved_weight(weight: LinearWeight) -> LinearWeight:
    """The weight on the device that the kernels run on."""
    scale = None if weight.input_scale is None else weight.input_scale.to(DEVICE)
    if not isinstance(weight, PackedLinearWeight):
        return LinearWeight(weight.value.to(DEVICE), weight.quantized_input, scale)
    packed = weight.packed
    tensors = {
        name: None if x is None else x.to(DEVICE)
        for name in ("codes", "scale", "global_scale")
        for x in [getattr(packed, name)]
    }
    matrix = dataclasses.replace(packed, **tensors)
    return PackedLinearWeight(matrix, weight.quantized_input, scale)
