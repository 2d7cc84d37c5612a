"""The nodes and initializers of an ONNX graph while it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import torch

_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.bool: onnx.TensorProto.BOOL,
    torch.uint8: onnx.TensorProto.UINT8,
}


def onnx_type(dtype: torch.dtype) -> int:
    """The TensorProto type of a torch dtype."""
    return int(_TYPES[dtype])


class GraphBuilder:
    """Nodes and initializers of one graph, in order."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._constants: dict[tuple[Any, ...], str] = {}

    def emit(
        self,
        op_type: str,
        inputs: Sequence[str],
        *,
        outputs: Sequence[str] = (),
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Append a node; returns its first output, which has a name of its own unless given."""
        name = f"{op_type}_{len(self.nodes)}"
        made = list(outputs) or [name]
        node = onnx.helper.make_node(op_type, inputs, made, name=name, domain=domain)
        for key, value in attributes.items():
            kind = onnx.AttributeProto.INTS if isinstance(value, list) else None
            node.attribute.append(onnx.helper.make_attribute(key, value, attr_type=kind))
        self.nodes.append(node)
        return made[0]

    def constant(self, values: Any, dtype: torch.dtype = torch.int64) -> str:
        """The name of an initializer with these values; equal ones are one."""
        tensor = torch.tensor(values, dtype=dtype)
        key = (tuple(tensor.shape), dtype, tensor.view(-1).view(torch.uint8).numpy().tobytes())
        if key not in self._constants:
            self._constants[key] = self.initializer(f"constant_{len(self._constants)}", tensor)
        return self._constants[key]

    def initializer(self, name: str, tensor: torch.Tensor) -> str:
        """Keep `tensor` inside the graph."""
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.initializers.append(
            onnx.helper.make_tensor(
                name, onnx_type(tensor.dtype), tuple(tensor.shape), raw, raw=True
            )
        )
        return name
