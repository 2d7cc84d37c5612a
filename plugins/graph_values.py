"""An operator's operands as a graph holds them: plain tensors and plain attributes.

    rows      one tensor of pages, with `X_region` (where in a page the rows lie) and `X_record`
    weight    its values, with `X_quantized_input`, and `X_input_scale` of a W4A4 weight
    experts   `X_w1`, `X_w3`, `X_w2`, with the same
    float64   its bits as int64: TensorRT has no float64, and angles need it

Attributes are ints, lists of ints, texts and floats; an Engram layout, a record layout and a dtype
are taken apart. A store in a traced graph is a `GraphRows`: a write replaces the tensor of its
`Pages`, so that what reads afterwards depends on the write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plugins.engram.layout import EngramLayout
from plugins.formats.records import (
    RecordLayout,
    engram_record,
    index_record,
    main_record,
    nvfp4_engram_record,
    window_record,
)
from plugins.formats.rows import PackedRows, Region, RowStore, ValueRows
from plugins.linear.weight import LinearWeight
from plugins.moe import ExpertWeights
from plugins.schema import TensorSpec

Attribute = int | float | str | list[int]
EXPERT_PARTS = ("w1", "w3", "w2")

_RECORDS = {
    "main": main_record,
    "window": window_record,
    "index": index_record,
    "engram": engram_record,
}
# As ONNX numbers them; the compute dtypes.
_DTYPE_CODES = {torch.float32: 1, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16}
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}


@dataclass
class Pages:
    """The tensor that a cache's memory is at this point of a traced graph."""

    tensor: torch.Tensor  # [num_pages, elements]


@dataclass(frozen=True)
class GraphRows:
    """A row store in a traced graph; outside of one it reads and writes like any other."""

    pages: Pages
    region: Region
    record: RecordLayout | None

    @property
    def width(self) -> int:
        return self.region.width

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.region.store(self.pages.tensor, self.record).read(slots, dtype)

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        self.region.store(self.pages.tensor, self.record).write(slots, values)


def flatten_operand(
    spec: TensorSpec, value: Any
) -> tuple[list[torch.Tensor | None], dict[str, Attribute]]:
    """One operand of a reference as graph tensors and attributes; the inverse of
    `restore_operand`."""
    name = spec.name
    match spec.kind:
        case "rows" if value is None:
            return [None], {f"{name}_region": [0, 1, 0], f"{name}_record": ""}
        case "rows":
            pages, region, record = _parts(value)
            return [pages], {
                f"{name}_region": [region.offset, region.rows, region.width],
                f"{name}_record": _record_text(record),
            }
        case "weight":
            tensors = [value.value, value.input_scale]
            return tensors, {f"{name}_quantized_input": int(value.quantized_input)}
        case "experts":
            tensors = [*(getattr(value, part) for part in EXPERT_PARTS), value.input_scale]
            return tensors, {f"{name}_quantized_input": int(value.quantized_input)}
        case "float64" if value.dtype != torch.int64:
            return [value.view(torch.int64)], {}
    return [value], {}


def restore_operand(
    spec: TensorSpec, tensors: list[torch.Tensor | None], attributes: Mapping[str, Attribute]
) -> Any:
    """The operand that a reference takes, over the graph's tensors: no copy."""
    name, first = spec.name, tensors[0]
    if first is None:
        return None
    match spec.kind:
        case "rows":
            offset, rows, width = _ints(attributes[f"{name}_region"])
            record = _record(str(attributes[f"{name}_record"]), width)
            return Region(offset, rows, width).store(first, record)
        case "weight":
            return LinearWeight(first, bool(attributes[f"{name}_quantized_input"]), tensors[1])
        case "experts":
            w1, w3, w2, input_scale = tensors
            assert w1 is not None
            assert w3 is not None
            assert w2 is not None
            quantized = bool(attributes[f"{name}_quantized_input"])
            return ExpertWeights(w1, w3, w2, quantized, input_scale)
        case "float64":
            return first.view(torch.float64)
    return first


def flatten_attribute(name: str, value: Any) -> dict[str, Attribute]:
    """One attribute of a reference as graph attributes; None is left out."""
    match value:
        case None:
            return {}
        case EngramLayout():
            return {f"{name}_{field}": getattr(value, field).tolist() for field in _LAYOUT_FIELDS}
        case RecordLayout():
            return {f"{name}_record": _record_text(value), f"{name}_width": value.width}
        case torch.dtype():
            return {name: _DTYPE_CODES[value]}
        case bool():
            return {name: int(value)}
        case int() | float() | str():
            return {name: value}
    raise TypeError(f"expected an attribute {name} that a graph can hold, got {value!r}")


def restore_attribute(name: str, kind: Any, attributes: Mapping[str, Attribute]) -> Any:
    """The attribute of type `kind` that a reference takes."""
    if kind is EngramLayout:
        fields = (attributes[f"{name}_{field}"] for field in _LAYOUT_FIELDS)
        return EngramLayout(*(np.array(field, dtype=np.int64) for field in fields))
    if kind is RecordLayout:
        width = attributes[f"{name}_width"]
        assert isinstance(width, int)
        return _record(str(attributes[f"{name}_record"]), width)
    value = attributes.get(name)
    if kind is torch.dtype:
        assert isinstance(value, int)
        return _DTYPES[value]
    return bool(value) if kind is bool else value


def attribute_dtype(code: Attribute) -> torch.dtype:
    """The dtype that an attribute of that kind stands for."""
    assert isinstance(code, int)
    return _DTYPES[code]


_LAYOUT_FIELDS = ("multipliers", "primes", "offsets")


def attribute_types(name: str, kind: Any) -> dict[str, type]:
    """The names that `flatten_attribute` gives to an attribute of type `kind`, with their types:
    int, float, str or list."""
    if kind is EngramLayout:
        return {f"{name}_{field}": list for field in _LAYOUT_FIELDS}
    if kind is RecordLayout:
        return {f"{name}_record": str, f"{name}_width": int}
    return {name: float if kind is float else str if kind is str else int}


def operand_attribute_types(spec: TensorSpec) -> dict[str, type]:
    """The names and types of the attributes that `flatten_operand` gives."""
    match spec.kind:
        case "rows":
            return {f"{spec.name}_region": list, f"{spec.name}_record": str}
        case "weight" | "experts":
            return {f"{spec.name}_quantized_input": int}
    return {}


def _parts(store: RowStore) -> tuple[torch.Tensor, Region, RecordLayout | None]:
    if isinstance(store, GraphRows):
        return store.pages.tensor, store.region, store.record
    if isinstance(store, PackedRows) and store.data.dim() == 2:
        return store.data, Region(0, 1, store.width), store.layout
    if isinstance(store, ValueRows) and store.values.dim() == 2:
        return store.values, Region(0, 1, store.width), store.layout
    raise TypeError(
        f"expected rows that a graph can hold, got {type(store).__name__} over pages; "
        "give GraphRows over the whole page"
    )


def replace_rows(store: RowStore, written: torch.Tensor) -> None:
    """Let a traced store go on with the tensor that a write returned."""
    if isinstance(store, GraphRows):
        store.pages.tensor = written
    elif isinstance(store, ValueRows):
        store.values = written
    else:
        raise TypeError(f"expected rows that may be written, got {type(store).__name__}")


def _record_text(record: RecordLayout | None) -> str:
    """The record's name, with its global scale where it has one; "" for plain values."""
    if record is None:
        return ""
    scale = getattr(record.format, "global_scale", None)
    if record.name not in _RECORDS and scale is None:
        raise TypeError(f"expected a record that a graph can name, got {record.name}")
    return record.name if scale is None else f"{record.name} {scale!r}"


def _record(text: str, width: int) -> RecordLayout | None:
    if not text:
        return None
    name, _, scale = text.partition(" ")
    return nvfp4_engram_record(width, float(scale)) if scale else _RECORDS[name](width)


def _ints(value: Attribute) -> list[int]:
    assert isinstance(value, list)
    return value
