"""A network's weights on another device."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch

from plugins.formats.rows import PackedRows, ValueRows
from plugins.linear import PackedFormat, PackedLinearWeight
from plugins.moe import PackedExpertWeights

Value = TypeVar("Value")

_PLAIN = (bool, int, float, str, torch.dtype, PackedFormat)


def moved(value: Value, device: str) -> Value:
    """Weights with every tensor in their dataclasses, tuples and rows on `device`.

    Raises TypeError for a kind of weight that it does not know.
    """
    result: Any = value
    if isinstance(value, torch.Tensor):
        result = value.to(device)
    elif isinstance(value, tuple):
        result = tuple(moved(member, device) for member in value)
    elif isinstance(value, PackedRows):
        result = PackedRows(value.data.to(device), value.layout)
    elif isinstance(value, ValueRows):
        result = ValueRows(value.values.to(device), value.layout)
    elif isinstance(value, PackedLinearWeight):
        result = PackedLinearWeight(moved(value.packed, device), value.quantized_input)
    elif isinstance(value, PackedExpertWeights):
        matrices = moved(value.matrices(), device)
        result = PackedExpertWeights(*matrices, value.dtype, value.quantized_input)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        result = dataclasses.replace(value, **changes)
    elif value is not None and not isinstance(value, _PLAIN):
        raise TypeError(f"expected weights in dataclasses and tuples, got {type(value).__name__}")
    moved_value: Value = result
    return moved_value
