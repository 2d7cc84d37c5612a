"""`dsv41-build engine --plans`: the segments of an engine as ONNX graphs.

    plans/encoder.onnx, decoder.onnx, draft.onnx      nodes; inputs as in engine/segments.py
    plans/weights.bin                                 the weights of all three

Nodes of domain "dsv41" are our operators (plugins/graph.py). Caches are inputs that operators
write in place; Engram tables are inputs too, because the engine maps them from files of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import torch

from builder.graph.nodes import GraphBuilder, onnx_type
from builder.graph.trace import GraphOptions, TracedSegment, trace_segment
from builder.graph.translate import translate
from builder.graph.weights import (
    TRT_DOMAIN,
    WEIGHTS_NAME,
    Leaf,
    WeightFile,
    add_weight,
    stored_bytes,
    weight_leaves,
)
from builder.progress import Progress
from engine.cache_sizes import default_global_page_tokens, default_window_page_rows
from engine.config import ModelConfig
from engine.directory import Engine
from engine.network import load_weights
from engine.network.weights import NetworkWeights
from engine.plans import PLANS_DIR
from engine.segments import model_segments
from plugins.graph import DOMAIN, VERSION

# Opset 23 has FLOAT4E2M1 and block-wise DequantizeLinear, and an older parser still reads it.
_OPSET = 23
_IR_VERSION = 11
OPTIONS_KEY = "dsv41.options"


def default_options(config: ModelConfig, dtype: torch.dtype) -> GraphOptions:
    """Packed caches in pages of the sizes that serving takes unless told otherwise."""
    return GraphOptions(
        dtype=dtype,
        quantize_cache=True,
        global_page_tokens=default_global_page_tokens(config),
        window_page_rows=default_window_page_rows(config),
    )


def export_engine(engine: Engine, options: GraphOptions, progress: Progress) -> dict[str, Path]:
    """Write plans/ of an engine of one rank; returns each segment's graph."""
    directory = engine.path / PLANS_DIR
    directory.mkdir()
    weights = load_weights(
        engine.config, engine.source(), engine.token_class, options.dtype, packed=True
    )
    progress.start("graphs", sum(map(stored_bytes, weight_leaves(weights).values())))
    paths = export_segments(engine.config, weights, directory, options, advance=progress.advance)
    progress.finish()
    return paths


def export_segments(
    config: ModelConfig,
    weights: NetworkWeights,
    directory: Path,
    options: GraphOptions,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Path]:
    """Write every segment's graph and the weights into `directory`; returns the graphs' paths.

    `weights` in `options.dtype`, packed or not; `advance` gets bytes of weights written.
    """
    leaves = weight_leaves(weights)
    paths = {}
    with WeightFile(directory / WEIGHTS_NAME, advance) as file:
        for segment in model_segments(config):
            traced = trace_segment(segment, config, weights, options, leaves)
            model = _model(segment, traced, file, leaves, options)
            paths[segment] = directory / f"{segment}.onnx"
            paths[segment].write_bytes(model.SerializeToString())
    return paths


def read_options(model: onnx.ModelProto) -> GraphOptions:
    """The options that a graph was exported with."""
    texts = {entry.key: entry.value for entry in model.metadata_props}
    return GraphOptions.from_json(json.loads(texts[OPTIONS_KEY]))


def _model(
    segment: str,
    traced: TracedSegment,
    file: WeightFile,
    leaves: Mapping[str, Leaf],
    options: GraphOptions,
) -> onnx.ModelProto:
    graph = GraphBuilder()
    placeholders = {
        node.name: node for node in traced.program.graph.nodes if node.op == "placeholder"
    }
    user_inputs = [placeholders[name] for name in traced.program.graph_signature.user_inputs]
    names = [one.name for one in traced.inputs] + list(traced.leaves)
    used = {
        name: node.name
        for name, node in zip(names, user_inputs, strict=True)
        if any(user.op != "output" for user in node.users)
    }
    values = translate(
        traced.program,
        graph,
        {node: name for name, node in used.items()},
        [result.node for result in traced.results],
    )
    body, graph.nodes = graph.nodes, []
    for name in traced.leaves:
        if name in used:
            add_weight(graph, file, name, leaves[name])
    nodes = [*graph.nodes, *body]
    renamed = {v: result.name for v, result in zip(values, traced.results, strict=True)}
    for node in nodes:
        for ends in (node.input, node.output):
            ends[:] = [renamed.get(name, name) for name in ends]
    inputs = [
        onnx.helper.make_tensor_value_info(one.name, onnx_type(one.dtype), list(one.dims))
        for one in traced.inputs
        if one.name in used
    ]
    outputs = [
        onnx.helper.make_tensor_value_info(one.name, onnx_type(one.dtype), list(one.dims))
        for one in traced.results
    ]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, segment, inputs, outputs, graph.initializers),
        opset_imports=[
            onnx.helper.make_opsetid("", _OPSET),
            onnx.helper.make_opsetid(DOMAIN, VERSION),
            onnx.helper.make_opsetid(TRT_DOMAIN, 1),
        ],
        ir_version=_IR_VERSION,
        producer_name="dsv41-build",
    )
    onnx.helper.set_model_props(model, {OPTIONS_KEY: json.dumps(options.to_json())})
    return model
