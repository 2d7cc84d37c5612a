"""The standard ONNX operators that exported segments use, on torch tensors.

As the ONNX specification has them, for the inputs and attributes that builder/graph/translate.py
and builder/graph/weights.py write; the two dequantisers of quantised weights included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import torch

from plugins.formats.rounding import decode_e4m3, decode_e8m0, unpack_e2m1

Tensors = list[torch.Tensor]
Attributes = Mapping[str, Any]
Run = Callable[[Tensors, Attributes], Any]

_TYPES = onnx.TensorProto
TORCH_DTYPES: dict[int, torch.dtype] = {
    _TYPES.FLOAT: torch.float32,
    _TYPES.FLOAT16: torch.float16,
    _TYPES.DOUBLE: torch.float64,
    _TYPES.BFLOAT16: torch.bfloat16,
    _TYPES.INT64: torch.int64,
    _TYPES.INT32: torch.int32,
    _TYPES.BOOL: torch.bool,
    _TYPES.UINT8: torch.uint8,
    _TYPES.FLOAT8E4M3FN: torch.float8_e4m3fn,
    # Two codes a byte, low nibble first, in the shape of bytes.
    _TYPES.FLOAT4E2M1: torch.uint8,
}


def _div(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    a, b = tensors
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _reshape(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    a, shape = tensors
    return a.reshape(shape.tolist())


def _expand(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    a, shape = tensors
    wanted = a.new_empty(()).expand(shape.tolist())
    spread: torch.Tensor = torch.broadcast_tensors(a, wanted)[0]  # type: ignore[no-untyped-call]
    return spread.contiguous()  # a cache may be made so, and is then written


def _slice(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    a, starts, ends, axes, steps = tensors
    index = [slice(None)] * a.dim()
    for start, end, axis, step in zip(
        *(t.tolist() for t in (starts, ends, axes, steps)), strict=True
    ):
        index[axis] = slice(start, end, step)
    return a[tuple(index)]


def _shape(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    shape = tensors[0].shape[attributes.get("start", 0) : attributes.get("end")]
    return torch.tensor(list(shape), dtype=torch.int64)


def _gather(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    a, index = tensors
    axis = attributes["axis"] % a.dim()
    index = torch.where(index < 0, index + a.shape[axis], index)
    picked = a.index_select(axis, index.reshape(-1))
    return picked.view(*a.shape[:axis], *index.shape, *a.shape[axis + 1 :])


def _split(tensors: Tensors, attributes: Attributes) -> tuple[torch.Tensor, ...]:
    a, sizes = tensors
    return torch.split(a, sizes.tolist(), dim=attributes["axis"])


def _squeeze(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    a, axes = tensors
    return a.squeeze(tuple(axes.tolist()))


def _unsqueeze(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    a, axes = tensors
    return a.unsqueeze(int(axes[0]))


def _range(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    return torch.arange(*(int(bound) for bound in tensors))


def _argmax(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    return tensors[0].argmax(attributes["axis"], keepdim=bool(attributes["keepdims"]))


def _reduce_mean(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    a, axes = tensors
    return a.mean(axes.tolist(), keepdim=bool(attributes["keepdims"]))


def _dequantize(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    """codes · scale in the scale's dtype: a scale per block of the last axis, or one per index of
    the first."""
    codes, scale = tensors
    if codes.dtype == torch.uint8:
        values = unpack_e2m1(codes, scale.dtype)
    else:
        values = decode_e4m3(codes, scale.dtype)
    block = attributes.get("block_size", 0)
    if block:
        groups = torch.unflatten(values, -1, (-1, block))
        return (groups * scale.unsqueeze(-1)).flatten(-2)
    return (
        values * scale.view(*scale.shape, *[1] * (values.dim() - 1))
        if scale.dim()
        else values * scale
    )


def _mxfp8(tensors: Tensors, attributes: Attributes) -> torch.Tensor:
    codes, scale = tensors
    dtype = TORCH_DTYPES[attributes["output_dtype"]]
    groups = torch.unflatten(decode_e4m3(codes, dtype), -1, (-1, attributes["block_size"]))
    return (groups * decode_e8m0(scale, dtype).unsqueeze(-1)).flatten(-2)


OPERATORS: dict[tuple[str, str], Run] = {
    ("", "Add"): lambda t, _: t[0] + t[1],
    ("", "And"): lambda t, _: t[0] & t[1],
    ("", "ArgMax"): _argmax,
    ("", "Cast"): lambda t, a: t[0].to(TORCH_DTYPES[a["to"]]),
    ("", "Concat"): lambda t, a: torch.cat(t, dim=a["axis"]),
    ("", "DequantizeLinear"): _dequantize,
    ("", "Div"): _div,
    ("", "Equal"): lambda t, _: t[0] == t[1],
    ("", "Exp"): lambda t, _: t[0].exp(),
    ("", "Expand"): _expand,
    ("", "Gather"): _gather,
    ("", "Greater"): lambda t, _: t[0] > t[1],
    ("", "GreaterOrEqual"): lambda t, _: t[0] >= t[1],
    ("", "Identity"): lambda t, _: t[0],
    ("", "Less"): lambda t, _: t[0] < t[1],
    ("", "Max"): lambda t, _: torch.maximum(*t),
    ("", "Min"): lambda t, _: torch.minimum(*t),
    ("", "Mod"): lambda t, _: torch.remainder(*t),
    ("", "Mul"): lambda t, _: t[0] * t[1],
    ("", "Neg"): lambda t, _: -t[0],
    ("", "Not"): lambda t, _: ~t[0],
    ("", "Range"): _range,
    ("", "Reciprocal"): lambda t, _: t[0].reciprocal(),
    ("", "ReduceMean"): _reduce_mean,
    ("", "Reshape"): _reshape,
    ("", "Shape"): _shape,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Squeeze"): _squeeze,
    ("", "Sub"): lambda t, _: t[0] - t[1],
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Where"): lambda t, _: torch.where(*t),
    ("trt", "TRT_MXFP8DequantizeLinear"): _mxfp8,
}
