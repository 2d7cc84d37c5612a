"""From an exported segment to what TensorRT's parser and our plugins take.

Changes nodes and types, never a weight: external data stays where the file says. See
plugins/tensorrt_plugin.py for the differences.
"""

from __future__ import annotations

import onnx

from plugins.graph import DOMAIN, GraphOperator, graph_operator
from plugins.tensorrt_library import TensorRtError
from plugins.tensorrt_plugin import OPERANDS, attribute_text


def adapt(model: onnx.ModelProto) -> dict[str, str]:
    """Change the model in place.

    Returns output to input for the outputs that are an input's memory, written in place. Raises
    TensorRtError for a node that no operator can run.
    """
    for node in model.graph.node:
        if node.domain == DOMAIN:
            _check(node, _operator(node))
    aliased = _aliases(model)
    packed = {one.name for one in (*model.graph.input, *model.graph.output)}
    for node in model.graph.node:
        if node.domain == DOMAIN:
            packed.update(node.output)
            _adapt(node)
    _drop_output_copies(model)
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    for value in values:
        kind = value.type.tensor_type
        if value.name in packed and kind.elem_type == onnx.TensorProto.UINT8:
            kind.elem_type = onnx.TensorProto.INT8
    return aliased


def _aliases(model: onnx.ModelProto) -> dict[str, str]:
    """Any number of nodes may write the memory in turn."""
    source = {one.name: one.name for one in model.graph.input}
    for node in model.graph.node:
        if node.domain == DOMAIN:
            declared = _operator(node).outputs
            for output, made in zip(node.output, declared, strict=True):
                if made.alias is not None and node.input[made.alias] in source:
                    source[output] = source[node.input[made.alias]]
        elif node.op_type == "Identity" and node.input[0] in source:
            source[node.output[0]] = source[node.input[0]]
    return {one.name: source[one.name] for one in model.graph.output if one.name in source}


def _drop_output_copies(model: onnx.ModelProto) -> None:
    """Let nodes make the graph's outputs themselves: a copy of a cache would not be in place."""
    nodes = model.graph.node
    made = {name for node in nodes for name in node.output}
    outputs = {one.name for one in model.graph.output}
    renamed: dict[str, str] = {}
    for node in [node for node in nodes if node.op_type == "Identity"]:
        source, output = node.input[0], node.output[0]
        if output in outputs and source in made - outputs and source not in renamed:
            renamed[source] = output
            nodes.remove(node)
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]


def _operator(node: onnx.NodeProto) -> GraphOperator:
    try:
        return graph_operator(node.op_type)
    except KeyError:
        raise TensorRtError(
            f"node {node.name!r} is of operator {node.op_type}, which this software does not have; "
            "export the segment again"
        ) from None


def _check(node: onnx.NodeProto, operator: GraphOperator) -> None:
    given = {attribute.name for attribute in node.attribute}
    given |= {one.name for one, name in zip(operator.inputs, node.input, strict=False) if name}
    wanted = [one.name for one in operator.inputs if not one.optional]
    wanted += [one.name for one in operator.attributes if not one.optional]
    lacking = [name for name in wanted if name not in given]
    if lacking or len(node.output) != len(operator.outputs):
        raise TensorRtError(
            f"node {node.name!r} ({node.op_type}) lacks {', '.join(lacking) or 'outputs'}; "
            "export the segment again"
        )


def _adapt(node: onnx.NodeProto) -> None:
    present = [index for index, name in enumerate(node.input) if name]
    names = [node.input[index] for index in present]
    del node.input[:]
    node.input.extend(names)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.INTS:
            numbers = list(attribute.ints)
            attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, attribute_text(numbers)))
    node.attribute.append(onnx.helper.make_attribute(OPERANDS, attribute_text(present)))
