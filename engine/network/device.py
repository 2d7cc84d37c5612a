"""A network's weights on another device."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, TypeVar

import torch

from engine.host_memory import pinned_copy
from engine.network.weights import EngramWeights, MoeWeights
from plugins.formats.rows import PackedRows, RowStore, ValueRows
from plugins.linear import LinearWeight, PackedLinearWeight
from plugins.moe import PackedExpertWeights

Value = TypeVar("Value")

_PLAIN = (bool, int, float, str, Enum, torch.dtype)


def moved(value: Value, device: str, *, engram_on_host: bool = False) -> Value:
    """Weights with every tensor in their dataclasses, tuples and rows on `device`.

    Packed weights stay packed. With `engram_on_host` the Engram tables are pinned in the host's
    memory instead. Raises TypeError for a kind of weight that it does not know.
    """

    def move(one: Any) -> Any:
        return moved(one, device, engram_on_host=engram_on_host)

    result: Any = value
    if isinstance(value, torch.Tensor):
        result = value.to(device)
    elif isinstance(value, tuple):
        result = tuple(move(member) for member in value)
    elif isinstance(value, PackedRows):
        result = PackedRows(value.data.to(device), value.layout)
    elif isinstance(value, ValueRows):
        result = ValueRows(value.values.to(device), value.layout)
    elif isinstance(value, PackedLinearWeight):
        scale = move(value.input_scale)
        result = PackedLinearWeight(move(value.packed), value.quantized_input, scale)
    elif isinstance(value, PackedExpertWeights):
        w1, w3, w2 = move(value.matrices())
        scale = move(value.input_scale)
        result = PackedExpertWeights(w1, w3, w2, value.dtype, value.quantized_input, scale)
    elif isinstance(value, LinearWeight):
        kept, scale = _narrowed(value.value.to(device)), move(value.input_scale)
        result = LinearWeight(kept, value.quantized_input, scale)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        stays = {"table"} if engram_on_host and isinstance(value, EngramWeights) else set()
        changes: dict[str, Any] = {
            f.name: (_pinned if f.name in stays else move)(getattr(value, f.name))
            for f in dataclasses.fields(value)
        }
        if isinstance(value, MoeWeights):
            changes["gate"] = _narrowed(changes["gate"])
        result = dataclasses.replace(value, **changes)
    elif value is not None and not isinstance(value, _PLAIN):
        raise TypeError(f"expected weights in dataclasses and tuples, got {type(value).__name__}")
    moved_value: Value = result
    return moved_value


def _narrowed(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight of bfloat16 values as bfloat16 on a GPU, whose kernels read half the bytes
    for the same products: gates, compressors and the head are bfloat16 on disk."""
    if weight.dtype != torch.float32 or weight.device.type != "cuda":
        return weight
    narrow = weight.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(torch.float32), weight) else weight


def _pinned(table: RowStore) -> RowStore:
    """The table in memory that the device reads by itself. A mapped file is read whole."""
    if isinstance(table, PackedRows):
        return PackedRows(pinned_copy(table.data), table.layout)
    assert isinstance(table, ValueRows), f"a table of {type(table).__name__} cannot be pinned"
    return ValueRows(pinned_copy(table.values), table.layout)
