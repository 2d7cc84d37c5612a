"""The exported graphs, executed: logits and caches against the network and the golden numbers."""

from __future__ import annotations

import functools
import io
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

from builder.checkpoint import Checkpoint
from builder.cli import main
from builder.graph.executor import GraphError
from builder.graph.export import default_options, export_engine
from builder.graph.trace import GraphOptions, trace_segment
from builder.graph.weights import weight_leaves
from builder.progress import Progress
from engine.batch import DraftBatch
from engine.directory import Engine
from engine.manifest import EngineError, Manifest
from engine.network import Network, load_weights
from engine.segments import encoder_tensors, least_context
from plugins.graph import DOMAIN, graph_operator
from tests.builder.graphs import (
    GLOBAL_PAGE_TOKENS,
    WINDOW_PAGE_ROWS,
    GraphNetwork,
    export,
    packed_weights,
)
from tests.engine.ragged import PoisonedPages, Timeline, make_batch, step

# Tracing logs every tensor, which takes a quarter of its time when a test run collects it.
logging.getLogger("torch.__trace").setLevel(logging.WARNING)

Golden = Callable[[bool], dict[str, torch.Tensor]]
Tolerance = tuple[float, float]  # relative, absolute
EXACT: Tolerance = (0.0, 1e-9)
SINGLE: Tolerance = (1e-5, 1e-6)
HIT = 32
IMAGE_TOKEN = 411  # any token of the prompts
GOLDEN = "float64, golden, packed caches"
PLAIN = "float64, plain caches"
QUANTISED = "float32, quantised weights, plain caches"
MODELS = [GOLDEN, PLAIN, QUANTISED]


Pair = tuple[Network, GraphNetwork, bool]


@pytest.fixture(scope="module")
def slim_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of TINY, one of each role, in float32: tracing takes its time per layer."""
    directory = tmp_path_factory.mktemp("slim") / "checkpoint"
    options = ["--layer_ids", "1,2,6,8", "--experts", "4", "--format", "float32"]
    assert main(["init", "--config", "tiny", *options, "--output_dir", str(directory)]) == 0
    return directory


def slim_network(directory: Path, dtype: torch.dtype) -> Network:
    checkpoint = Checkpoint.open(directory)
    classes, _ = checkpoint.token_class(None)
    weights = load_weights(checkpoint.config, checkpoint.source, classes, dtype)
    return Network(checkpoint.config, weights)


@pytest.fixture(scope="module")
def pair_of(
    network64: Network, slim_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Pair]:
    """The network, its exported graphs, and whether their caches are quantised."""

    def pair(model: str) -> Pair:
        quantize = model == GOLDEN
        if model == GOLDEN:
            network = network64
        else:
            network = slim_network(slim_dir, getattr(torch, model.partition(",")[0]))
        if model == QUANTISED:
            config = replace(network.config, image_token_id=IMAGE_TOKEN)
            network = Network(config, packed_weights(network.weights))
        directory = tmp_path_factory.mktemp("graphs")
        dtype = network.dtype
        graphs = export(network.config, network.weights, directory, dtype, quantize=quantize)
        return network, graphs, quantize

    return functools.cache(pair)


def make_pages(network: Network | GraphNetwork, quantize: bool) -> PoisonedPages:
    return PoisonedPages(
        network.config,
        network.dtype,
        quantize=quantize,
        num_slots=3,
        max_length=64,
        max_rows=40,
        global_page_tokens=GLOBAL_PAGE_TOKENS,
        window_page_rows=WINDOW_PAGE_ROWS,
        seed=11,
    )


def advance(
    network: Network | GraphNetwork,
    pages: PoisonedPages,
    requests: dict[int, Timeline],
    rows: dict[int, int],
) -> None:
    """One step over the slots of `rows`, in an order of their own."""
    slots = sorted(rows, reverse=True)
    for slot in slots:
        pages.extend(slot, requests[slot].position, requests[slot].position + rows[slot])
    counts = [rows[slot] for slot in slots]
    step(network, [requests[s] for s in slots], counts, pages.view(slots), store_context=False)


def serve(network: Network | GraphNetwork, quantize: bool, tokens: list[int]) -> dict[str, object]:
    """Prefill, decode, verify with roll-back, and a bounded replay after a prefix hit, ragged."""
    pages = make_pages(network, quantize)
    other = random.Random(3).sample(range(512), 50)
    requests = {0: Timeline(tokens), 1: Timeline(other, decoder_floor=24)}
    logits: list[torch.Tensor] = []

    def run(rows: dict[int, int]) -> None:
        first = {slot: requests[slot].position for slot in rows}
        advance(network, pages, requests, rows)
        for slot, count in rows.items():
            request = requests[slot]
            floor = max(first[slot], request.decoder_floor)
            logits.extend(request.logits[p] for p in range(floor, first[slot] + count))

    run({0: 33, 1: 11})  # prefill; request 1 ends below its decoder floor
    run({1: 20})  # a chunk over the floor
    run({0: 1, 1: 1})  # decode
    run({0: 4, 1: 1})  # verify three drafts
    requests[0].position -= 2  # two are rejected
    # Rows 24 … 31 are replayed, their entries are request 0's.
    pages.adopt(2, owner=0, hit=HIT, first=HIT - 8)
    requests[2] = Timeline(tokens[:50] + other[:10], HIT - 8, HIT - 8, 43, HIT)
    run({0: 1, 2: 17})  # replay beside decode; no row of it runs through the decoder
    run({0: 4, 1: 2, 2: 18})
    run({2: 1})  # one row alone
    pools = pages.pools
    memory = {"global": pools.global_pages, "window": pools.window_pages, "tails": pools.tails}
    return {"logits": torch.stack(logits), "requests": requests, "pages": pages, **memory}


@pytest.mark.parametrize("model", MODELS)
def test_graphs_compute_what_the_network_does(
    pair_of: Callable[[str], Pair], golden_of: Golden, model: str
) -> None:
    """Logits of every row and every byte of the caches, the poison of unused pages included."""
    network, graphs, quantize = pair_of(model)
    rtol, atol = EXACT if model.startswith("float64") else SINGLE
    tokens = golden_of(True)["tokens"].tolist()
    expected, got = (serve(one, quantize, tokens) for one in (network, graphs))
    assert torch.isfinite(expected["logits"]).all()
    assert len(expected["logits"]) == 33 + 7 + 2 + 5 + 1 + 22 + 1
    for name in ("logits", "global", "window", "tails"):
        within = max(atol, rtol * float(expected[name].double().nan_to_num().abs().max()))
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=within, equal_nan=True)


@pytest.mark.parametrize("model", MODELS)
def test_drafts_of_a_ragged_batch(
    pair_of: Callable[[str], Pair], golden_of: Golden, model: str
) -> None:
    """The draft's graph stores confirmed rows, leaves out position −1, and drafts per anchor."""
    network, graphs, quantize = pair_of(model)
    rtol, atol = EXACT if model.startswith("float64") else SINGLE
    tokens = golden_of(True)["tokens"].tolist()
    outputs = []
    for one in (network, graphs):
        pages = make_pages(one, quantize)
        requests = {0: Timeline(tokens), 1: Timeline(tokens[::-1])}
        advance(one, pages, requests, {0: 19, 1: 6})
        cache = pages.view([0, 1])
        context = [(slot, position) for slot in (1, 0) for position in requests[slot].features]
        features = torch.stack([requests[slot].features[p] for slot, p in context])
        request, positions = torch.tensor(context).T
        anchors = DraftBatch(
            anchors=torch.tensor([tokens[19], 7]),
            positions=torch.tensor([19, 6]),
            request=torch.tensor([0, 1]),
            floor=torch.tensor([5, 0]),
        )
        if isinstance(one, GraphNetwork):
            stored = (
                torch.cat([features, features[:1] * 2]),
                torch.cat([request, request[:1]]),
                torch.cat([positions, torch.tensor([-1])]),
            )
            outputs.append((one.store_and_draft(stored, anchors, cache), pages))
        else:
            one.store_draft_context(features, request, positions, cache)
            outputs.append((one.draft(anchors, cache), pages))
    (expected, before), (got, after) = outputs
    assert torch.equal(got.tokens, expected.tokens)
    torch.testing.assert_close(got.confidence, expected.confidence, rtol=rtol, atol=atol)
    torch.testing.assert_close(
        after.pools.window_pages, before.pools.window_pages, rtol=rtol, atol=atol, equal_nan=True
    )


def test_graphs_give_the_golden_logits(pair_of: Callable[[str], Pair], golden_of: Golden) -> None:
    """Numbers of another implementation: a full run, and both replays after a hit of 40."""
    _, graphs, _ = pair_of(GOLDEN)
    golden = golden_of(True)
    tokens = golden["tokens"].tolist()
    pages = make_pages(graphs, quantize=True)
    requests = {0: Timeline(tokens), 1: Timeline(tokens, 32, 32, 53, 40)}
    for count in (40, 21):
        advance(graphs, pages, requests, {0: count})
    pages.adopt(1, owner=0, hit=40, first=32)
    advance(graphs, pages, requests, {1: 29})
    for name, rows in (
        ("logits_full", requests[0].rows(0, 61)),
        ("logits_both_replays", requests[1].rows(53, 61)),
    ):
        torch.testing.assert_close(rows, golden[name], rtol=0, atol=1e-9)


# -- the files -------------------------------------------------------------------------------------


def graph_of(graphs: GraphNetwork, segment: str) -> onnx.ModelProto:
    path = graphs.segments[segment].path
    onnx.checker.check_model(path)
    return onnx.load(path, load_external_data=False)


@pytest.mark.parametrize("segment", ["encoder", "decoder", "draft"])
def test_a_cache_is_written_only_after_all_that_read_it(
    pair_of: Callable[[str], Pair], segment: str
) -> None:
    """In place is safe in any order that keeps the graph's edges: whoever reads what a node
    overwrites is an ancestor of that node."""
    graph = graph_of(pair_of(GOLDEN)[1], segment).graph
    maker = {name: index for index, node in enumerate(graph.node) for name in node.output}
    ancestors: list[set[int]] = []
    for node in graph.node:
        made = {maker[name] for name in node.input if name in maker}
        ancestors.append(made.union(*(ancestors[index] for index in made)))
    writes = 0
    for index, node in enumerate(graph.node):
        if node.domain != DOMAIN:
            continue
        for output in graph_operator(node.op_type).outputs:
            if output.alias is None:
                continue
            writes += 1
            overwritten = node.input[output.alias]
            readers = {i for i, one in enumerate(graph.node) if overwritten in one.input} - {index}
            assert readers <= ancestors[index], node.name
    # Layers' windows; 2 · 3 sources' entries and 2 tails; a block and a context row per stage.
    assert writes == {"encoder": 6 + 2 * 3 + 2, "decoder": 6, "draft": 2 + 2}[segment]


def test_inputs_outputs_and_weights_of_the_graphs(
    pair_of: Callable[[str], Pair],
) -> None:
    network, graphs, _ = pair_of(QUANTISED)
    graph = graph_of(graphs, "decoder").graph
    inputs = {
        one.name: [dim.dim_param or dim.dim_value for dim in one.type.tensor_type.shape.dim]
        for one in graph.input
    }
    assert "tails" not in inputs, "no decoder layer has a compressor"
    assert inputs["streams"] == ["decoder_rows", 4, 128]
    assert inputs["global_tables"] == ["requests", "global_columns"]
    assert [one.name for one in graph.output] == ["logits", "draft_features", "window_pages_out"]
    assert graph.output[0].type.tensor_type.shape.dim[1].dim_value == 512
    kinds = {one.name: one.data_type for one in graph.initializer}
    types = onnx.TensorProto
    layer = network.config.decoder_start
    assert kinds[f"layers.{layer}.moe.routed.w1.codes"] == types.FLOAT4E2M1
    assert kinds[f"layers.{layer}.moe.routed.w1.scale"] == types.FLOAT8E4M3FN
    assert kinds[f"layers.{layer}.moe.routed.w1.global_scale"] == types.FLOAT
    assert kinds[f"layers.{layer}.attention.wq_a.codes"] == types.FLOAT8E4M3FN
    assert kinds["head"] == types.FLOAT
    heads = [
        next(one for one in graph_of(graphs, segment).graph.initializer if one.name == "head")
        for segment in ("decoder", "draft")
    ]
    assert heads[0] == heads[1], "both graphs read the head at one place"
    assert {one.key: one.value for one in heads[0].external_data}["length"] == str(512 * 128 * 4)


def test_what_does_not_fit_the_graph_is_named(
    pair_of: Callable[[str], Pair], golden_of: Golden
) -> None:
    network, graphs, quantize = pair_of(PLAIN)
    pages = make_pages(network, quantize)
    request = Timeline(golden_of(False)["tokens"].tolist())
    pages.extend(0, 0, 5)
    cache = pages.view([0])
    batch = make_batch(network.config, [request], [5])
    tensors = encoder_tensors(batch, cache._tables, cache._pools, graphs._engram)
    assert len(tensors["context"]) == least_context(network.config) == 10
    run = graphs.segments["encoder"].run
    with pytest.raises(GraphError, match=r"tokens of encoder.onnx: expected int64 \['rows'\], got"):
        run({**tensors, "tokens": batch.tokens.to(torch.int32)})
    with pytest.raises(GraphError, match=r"positions of encoder.onnx.* got torch.int64 \[4\]"):
        run({**tensors, "positions": batch.positions[:4]})
    with pytest.raises(GraphError, match=r"history of encoder.onnx: expected .* got none"):
        run({name: tensor for name, tensor in tensors.items() if name != "history"})


def test_graphs_take_contexts_of_any_length(slim_dir: Path) -> None:
    """Tracing refuses a size that something depends on. Of a model with more candidate blocks than
    entries to select, as the released one is and TINY is not."""
    network = slim_network(slim_dir, torch.float32)
    config = replace(network.config, index_topk=2, candidate_topk_blocks=3)
    options = GraphOptions(torch.float32, False, GLOBAL_PAGE_TOKENS, WINDOW_PAGE_ROWS)
    forms = weight_leaves(network.weights)
    traced = trace_segment("decoder", config, network.weights, options, forms)
    nodes = [str(node.target) for node in traced.program.graph.nodes]
    assert "dsv41.candidate_blocks.default" in nodes
    assert "dsv41.topk_of_blocks.default" not in nodes


def test_engine_in_the_released_layout(slim_dir: Path, tmp_path: Path) -> None:
    """FP8 blocks and FP4 experts as bfloat16 graphs: the very logits of the engine's network."""
    released, directory = tmp_path / "released", tmp_path / "an engine"
    options = ["--checkpoint_dir", str(slim_dir), "--output_dir", str(released)]
    assert main(["quantize", *options, "--format", "as-released"]) == 0
    options = ["--checkpoint_dir", str(released), "--output_dir", str(directory)]
    assert main(["engine", *options]) == 0
    engine = Engine.open(directory)
    settings = default_options(engine.config, torch.bfloat16)
    assert (settings.global_page_tokens, settings.window_page_rows) == (16, 2)
    export_engine(engine, settings, Progress(io.StringIO()))
    weights = engine.load_weights(torch.bfloat16, packed=True)
    network = Network(engine.config, weights)
    graphs = GraphNetwork(engine.config, weights, directory / "plans")
    logits = []
    for one in (network, graphs):
        pages = PoisonedPages(
            engine.config, torch.bfloat16, quantize=True, num_slots=1, max_length=32, max_rows=24,
            global_page_tokens=16, window_page_rows=2, seed=5,
        )  # fmt: skip
        requests = {0: Timeline(list(range(100, 124)))}
        advance(one, pages, requests, {0: 23})
        advance(one, pages, requests, {0: 1})
        logits.append(requests[0].rows(0, 24))
    assert torch.equal(logits[0], logits[1])


def test_manifest_lists_the_plans(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "draft.onnx").write_bytes(b"abc")
    Manifest.write(tmp_path, {}, lambda _: None)
    manifest = Manifest.read(tmp_path)
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest.files == {"plans/draft.onnx": (3, digest)}
    (tmp_path / "plans" / "draft.onnx").write_bytes(b"abd")
    with pytest.raises(EngineError, match=r"plans/draft.onnx was altered"):
        manifest.check(tmp_path, verify=False)
