"""A network's weights on another device."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, TypeVar

import torch

from engine.host_memory import pinned_copy
from engine.network.weights import EngramWeights, MoeWeights, NetworkWeights
from plugins.formats.rows import PackedRows, RowStore, ValueRows
from plugins.linear import LinearWeight, PackedLinearWeight
from plugins.moe import PackedExpertWeights
from plugins.registry import runs_kernels

Value = TypeVar("Value")

_PLAIN = (bool, int, float, str, Enum, torch.dtype)


def moved(value: Value, device: str, *, engram_on_host: bool = False) -> Value:
    """Weights with every tensor in their dataclasses, tuples and rows on `device`.

    Packed weights stay packed. With `engram_on_host` the Engram tables are pinned in the host's
    memory instead. On a GPU a bfloat16 network's wide weights of bfloat16 values become bfloat16:
    gates, compressors and the head are that on disk, and the kernels that multiply them read half
    the bytes for the same products. Raises TypeError for a kind of weight that it does not know.
    """
    is_half = isinstance(value, NetworkWeights) and value.embed.dtype == torch.bfloat16
    narrow = is_half and runs_kernels(torch.empty(0, device=device))
    return _moved(value, device, engram_on_host=engram_on_host, narrow=narrow)


def _moved(value: Value, device: str, *, engram_on_host: bool, narrow: bool) -> Value:
    def move(one: Any) -> Any:
        return _moved(one, device, engram_on_host=engram_on_host, narrow=narrow)

    def move_wide(one: torch.Tensor) -> torch.Tensor:
        moved_one: torch.Tensor = move(_narrowed(one) if narrow else one)
        return moved_one

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
        scale = move(value.input_scale)
        result = LinearWeight(move_wide(value.value), value.quantized_input, scale)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        stays = {"table"} if engram_on_host and isinstance(value, EngramWeights) else set()
        changes: dict[str, Any] = {
            f.name: (_pinned if f.name in stays else move)(getattr(value, f.name))
            for f in dataclasses.fields(value)
        }
        if isinstance(value, MoeWeights):
            changes["gate"] = move_wide(value.gate)
        result = dataclasses.replace(value, **changes)
    elif value is not None and not isinstance(value, _PLAIN):
        raise TypeError(f"expected weights in dataclasses and tuples, got {type(value).__name__}")
    moved_value: Value = result
    return moved_value


def _narrowed(weight: torch.Tensor) -> torch.Tensor:
    """As bfloat16 where that keeps every value. A meta tensor, whose values nobody knows, is taken
    for one that was bfloat16 on disk."""
    narrow = weight.to(torch.bfloat16)
    kept = weight.is_meta or torch.equal(narrow.to(weight.dtype), weight)
    return narrow if kept else weight


def _pinned(table: RowStore) -> RowStore:
    """The table in memory that the device reads by itself. A mapped file is read whole."""
    if isinstance(table, PackedRows):
        return PackedRows(pinned_copy(table.data), table.layout)
    assert isinstance(table, ValueRows), f"a table of {type(table).__name__} cannot be pinned"
    return ValueRows(pinned_copy(table.values), table.layout)
