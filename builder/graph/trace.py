"""A segment of the network as an exported program over named tensors.

The network itself is traced: its operators become nodes (plugins/registry.py), its cache is a
`PagedCache` whose stores are tensors of the graph, and its weights are inputs, so that tracing
takes no memory for them. See docs/adr/0005-graph-operators.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from builder.graph.weights import Leaf, leaf_form, with_leaves
from engine.batch import DraftBatch, RaggedBatch
from engine.config import ModelConfig
from engine.network.block import Residual
from engine.network.decoder import Decoder
from engine.network.draft import Draft
from engine.network.encoder import Encoder
from engine.network.engram import EngramHash
from engine.network.rope import RopeTables
from engine.network.weights import NetworkWeights
from engine.paged_cache import PagedCache, PoolLayout, StepTables
from engine.segments import CACHES, SegmentTensor, engram_tables, least_context, segment_inputs
from plugins.formats.rows import Region
from plugins.graph_dims import evaluate
from plugins.graph_values import GraphRows, Pages

# Output and its first dim.
_OUTPUTS = {
    "encoder": (("streams", "decoder_rows"), ("pre", "decoder_rows")),
    "decoder": (("logits", "logit_rows"), ("draft_features", "decoder_rows")),
    "draft": (("tokens", "anchors"), ("confidence", "anchors")),
}


@dataclass(frozen=True)
class GraphOptions:
    """What a graph fixes. dtype: the compute dtype. quantize_cache: caches are packed records."""

    dtype: torch.dtype
    quantize_cache: bool
    global_page_tokens: int
    window_page_rows: int

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> GraphOptions:
        return GraphOptions(**{**raw, "dtype": getattr(torch, raw["dtype"])})

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}

    def layout(self, config: ModelConfig) -> PoolLayout:
        return PoolLayout(
            config,
            global_page_tokens=self.global_page_tokens,
            window_page_rows=self.window_page_rows,
            quantize=self.quantize_cache,
        )


@dataclass(frozen=True)
class GraphResult:
    """One output of a traced program; the first dim is called `rows`."""

    name: str
    rows: int | str
    node: torch.fx.Node

    @property
    def dims(self) -> tuple[int | str, ...]:
        return (self.rows, *self.node.meta["val"].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.node.meta["val"].dtype
        return dtype


@dataclass(frozen=True)
class TracedSegment:
    """`program` takes `inputs`, then the weights named `leaves`. `results`: what the segment
    computes, then the caches that it writes."""

    program: torch.export.ExportedProgram
    inputs: tuple[SegmentTensor, ...]
    leaves: tuple[str, ...]
    results: tuple[GraphResult, ...]


class GraphPools:
    """Pools whose memory is tensors of a traced graph."""

    def __init__(self, layout: PoolLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        self.layout = layout
        self.pages = {name: Pages(tensors[name]) for name in CACHES if name in tensors}

    def window(self, layer: int) -> GraphRows:
        return self._rows("window_pages", self.layout.window[layer], "window_layout")

    def main(self, source: int) -> GraphRows:
        return self._rows("global_pages", self.layout.main[source], "main_layout")

    def index(self, source: int) -> GraphRows:
        return self._rows("global_pages", self.layout.index[source], "index_layout")

    def tail(self, source: int) -> GraphRows:
        return GraphRows(self.pages["tails"], self.layout.tail[source], None)

    def _rows(self, pool: str, region: Region, layout: str) -> GraphRows:
        return GraphRows(self.pages[pool], region, getattr(self.layout, layout))


class _Segment(torch.nn.Module):
    """A segment as a function of named tensors."""

    def __init__(self, segment: str, weights: NetworkWeights, layout: PoolLayout) -> None:
        super().__init__()
        self._segment = segment
        self._weights = weights
        self._layout = layout
        rope = RopeTables.build(layout.config, torch.device("cpu"))
        # Graph operators take the bits of a float64 (plugins/graph_values.py).
        plain, compressed = (
            None if table is None else table.view(torch.int64)
            for table in (rope.plain, rope.compressed)
        )
        self._rope = RopeTables(plain, compressed, rope.ratios)
        self._hash = EngramHash(layout.config, weights.token_class)

    def forward(
        self, tensors: dict[str, torch.Tensor], leaves: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        config, weights = self._layout.config, with_leaves(self._weights, {**leaves, **tensors})
        pools = GraphPools(self._layout, tensors)
        absent = tensors["window_tables"]  # of tables that the segment has no use for
        cache = PagedCache(
            pools,
            StepTables(
                slots=tensors.get("slots", absent),
                global_pages=tensors.get("global_tables", absent),
                window_pages=tensors["window_tables"],
            ),
        )
        outputs: tuple[torch.Tensor, ...]
        if self._segment == "encoder":
            encoder = Encoder(config, weights, self._rope, self._hash)
            outputs = encoder.run(_batch(tensors), cache)
        elif self._segment == "decoder":
            encoded = Residual(tensors["streams"], tensors["pre"])
            outputs = Decoder(config, weights, self._rope).run(_batch(tensors), cache, encoded)
        else:
            outputs = self._draft(weights, tensors, cache)
        return (*outputs, *(pages.tensor for pages in pools.pages.values()))

    def _draft(
        self, weights: NetworkWeights, tensors: dict[str, torch.Tensor], cache: PagedCache
    ) -> tuple[torch.Tensor, ...]:
        assert weights.draft is not None, "a model without draft stages has no draft segment"
        draft = Draft(self._layout.config, weights, weights.draft, self._rope)
        draft.store_context(
            tensors["features"], tensors["context_request"], tensors["context_positions"], cache
        )
        names = ("tokens", "positions", "request", "floor")
        return draft.run(DraftBatch(*(tensors[f"anchor_{name}"] for name in names)), cache)


def _batch(tensors: Mapping[str, torch.Tensor]) -> RaggedBatch:
    """The batch of one segment; what only the other one reads is any tensor of the kind."""
    fields = {field.name for field in dataclasses.fields(RaggedBatch)} - {"max_context"}
    of_requests = tensors["slots"]
    return RaggedBatch(
        **{name: tensors.get(name, of_requests) for name in fields},
        max_context=tensors["context"].shape[0],
    )


def trace_segment(
    segment: str,
    config: ModelConfig,
    weights: NetworkWeights,
    options: GraphOptions,
    forms: Mapping[str, Leaf],
) -> TracedSegment:
    """Trace `segment`; `forms` are the weights by name, as `weight_leaves` gives them."""
    layout = options.layout(config)
    inputs = segment_inputs(
        segment,
        layout,
        options.dtype,
        quantize=options.quantize_cache,
        tables=engram_tables(weights),
    )
    sizes = _sizes(inputs, least_context(layout.config))
    module = _Segment(segment, weights, layout)
    with FakeTensorMode(shape_env=ShapeEnv()):
        tensors = {
            one.name: torch.empty(
                [
                    evaluate(str(dim), {n: size for n, (size, _) in sizes.items()})
                    for dim in one.dims
                ],
                dtype=one.dtype,
            )
            for one in inputs
        }
        leaves = {
            name: torch.empty(form.shape, dtype=form.dtype)
            for name, form in ((n, leaf_form(leaf)) for n, leaf in forms.items())
        }
    dims = {name: torch.export.Dim(name, min=least) for name, (_, least) in sizes.items()}
    shapes = {
        "tensors": {
            one.name: {
                axis: evaluate(dim, dims) for axis, dim in enumerate(one.dims) if type(dim) is str
            }
            for one in inputs
        },
        "leaves": dict.fromkeys(leaves),
    }
    with torch.no_grad():
        program = torch.export.export(
            module, (), {"tensors": tensors, "leaves": leaves}, dynamic_shapes=shapes
        )
    caches = [one for name in CACHES for one in inputs if one.name == name]
    outputs = [*_OUTPUTS[segment], *((f"{one.name}_out", one.dims[0]) for one in caches)]
    results = next(node for node in program.graph.nodes if node.op == "output").args[0]
    # A cache that comes out as it went in is only read.
    kept = [
        GraphResult(name, rows, node)
        for (name, rows), node in zip(outputs, results, strict=True)
        if node.op != "placeholder"
    ]
    return TracedSegment(program, inputs, tuple(leaves), tuple(kept))


def _sizes(inputs: Sequence[SegmentTensor], least: int) -> dict[str, tuple[int, int]]:
    """Every varying size: one to trace with, no two alike, and the smallest that may come."""
    names = dict.fromkeys(
        dim for one in inputs for dim in one.dims if isinstance(dim, str) and dim.isidentifier()
    )
    return {
        name: (least + 1 if name == "context" else 5 + 2 * i, least if name == "context" else 1)
        for i, name in enumerate(names)
    }
