"""Graphs on a GPU: the bits of the same steps without them, and no step waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.network import Network, block, load_weights
from engine.network.decoder import DecoderOutput
from engine.network.device import moved
from engine.network.draft import DraftOutput
from engine.tensor_source import SafetensorsSource
from plugins.formats.rows import ValueRows
from python_backend.drafting.rule import DraftRule
from python_backend.executor.inputs import HostDraft, HostStep
from python_backend.executor.pools import pools_of
from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Choice
from tests.python_backend.test_cuda_executor import (
    BOUNDS,
    Padded,
    answered,
    with_calibrated_inputs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Strict(Padded):
    """Fails where a step waits for the device before it reads the tokens of its rows, once kernels
    have their tables there."""

    watching = False

    def _forward(self, step: HostStep) -> DecoderOutput:
        with waits_refused(self.watching):
            return super()._forward(step)

    def _choose(self, logits: torch.Tensor, rows: LogitRows) -> Choice:
        with waits_refused(self.watching) as reads:
            choice = super()._choose(logits, rows)
        assert len(reads) == self.watching  # all tokens at once
        return choice

    def _draft(self, draft: HostDraft, features: torch.Tensor) -> DraftOutput | None:
        with waits_refused(self.watching):
            return super()._draft(draft, features)


@contextmanager
def waits_refused(watching: bool) -> Iterator[list[torch.Size]]:
    """Nothing may wait for the device but what reads a tensor by name, whose shapes these are."""
    reads: list[torch.Size] = []
    read = torch.Tensor.cpu

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        reads.append(tensor.shape)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    if not watching:
        yield reads
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", noted)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield reads
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draft", [None, DraftRule(most=3, min_survival=0.0)])
def test_graphs_give_the_bits_of_single_launches(
    network_of: Callable[[torch.dtype], Network], dtype: torch.dtype, draft: DraftRule | None
) -> None:
    """The first runs capture on demand what start-up did not; the last only replays."""
    given = network_of(dtype)
    network = Network(given.config, moved(given.weights, "cuda"))
    bounds = replace(BOUNDS, draft=draft)
    pools = [pools_of(network.config, bounds, network.dtype, "cuda") for _ in range(2)]
    single = Strict(network, pools[0], bounds, graphs=False)
    graphs = Strict(network, pools[1], bounds)
    for shape in graphs.shapes_at_start():
        graphs.capture(shape)
    captured = graphs.num_graphs
    assert not pools[1].global_pages.any()  # capturing writes nothing
    assert not pools[1].window_pages.any()
    for attempt in range(4):
        single.watching, graphs.watching = attempt > 0, attempt > 2
        expected, expected_logits = answered(single, bounds)
        outputs, logits = answered(graphs, bounds)
        assert outputs == expected
        for one, other in zip(logits, expected_logits, strict=True):
            assert torch.equal(one, other)
        for name in ("global_pages", "window_pages", "tails"):
            assert torch.equal(getattr(pools[0], name), getattr(pools[1], name)), name
    assert graphs.num_graphs > captured  # prefill's, by use


@pytest.mark.parametrize("graphs", [False, True], ids=["launches", "graphs"])
@pytest.mark.parametrize("packed", [False, True], ids=["values", "packed"])
def test_engram_tables_on_the_host_give_the_bits_of_tables_on_the_device(
    tiny_config: ModelConfig,
    tiny_dir: Path,
    golden_of: Callable[[bool], dict[str, torch.Tensor]],
    packed: bool,
    graphs: bool,
) -> None:
    """Read from pinned memory by the kernels, inside a graph too, with drafts."""
    classes = golden_of(True)["token_class"].numpy()
    weights = load_weights(
        tiny_config, SafetensorsSource(tiny_dir), classes, torch.bfloat16, packed=packed
    )
    bounds = replace(BOUNDS, draft=DraftRule(most=3, min_survival=0.0))
    answers = []
    for on_host in (False, True):
        network = Network(tiny_config, moved(weights, "cuda", engram_on_host=on_host))
        tables = [one.engram.table for one in network.weights.layers if one.engram is not None]
        memories = [
            table.values if isinstance(table, ValueRows) else table.data for table in tables
        ]
        assert memories
        assert all(memory.is_cuda != on_host for memory in memories)
        assert all(memory.is_pinned() == on_host for memory in memories)
        pools = pools_of(tiny_config, bounds, torch.bfloat16, "cuda")
        executor = Padded(network, pools, bounds, graphs=graphs, capture_after=0)
        outputs, logits = answered(executor, bounds)
        assert (executor.num_graphs > 0) == graphs
        answers.append((outputs, logits, pools))
    (expected, expected_logits, device_pools), (ours, ours_logits, host_pools) = answers
    assert ours == expected
    for one, other in zip(ours_logits, expected_logits, strict=True):
        assert torch.equal(one, other)
    for name in ("global_pages", "window_pages", "tails"):
        assert torch.equal(getattr(host_pools, name), getattr(device_pools, name)), name


@pytest.mark.parametrize("graphs", [False, True], ids=["launches", "graphs"])
@pytest.mark.parametrize("draft", [None, DraftRule(most=3, min_survival=0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixes_made_beside_give_the_bits_of_mixes_in_line(
    network_of: Callable[[torch.dtype], Network],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    draft: DraftRule | None,
    graphs: bool,
) -> None:
    """Memory that one stream frees and the other still reads would show, in the second round of the
    same requests too."""
    given = network_of(dtype)
    network = Network(given.config, moved(given.weights, "cuda"))
    bounds = replace(BOUNDS, draft=draft)
    advance, answers = block.hc_advance, []
    for most in (0, block.MOST_ROWS_BESIDE):
        beside: list[int] = []

        def noted(
            streams: torch.Tensor, *rest: Any, beside: list[int] = beside, **sizes: Any
        ) -> Any:
            beside.append(len(streams))
            return advance(streams, *rest, **sizes)

        monkeypatch.setattr(block, "MOST_ROWS_BESIDE", most)
        monkeypatch.setattr(block, "hc_advance", noted)
        pools = pools_of(network.config, bounds, network.dtype, "cuda")
        executor = Padded(network, pools, bounds, graphs=graphs, capture_after=0)
        rounds = [answered(executor, bounds) for _ in range(2)]
        assert bool(beside) == (most > 0)
        assert max(beside, default=0) <= most
        assert (executor.num_graphs > 0) == graphs
        answers.append((rounds, pools))
    (expected, in_line), (ours, made_beside) = answers
    for (outputs, logits), (right, right_logits) in zip(ours, expected, strict=True):
        assert outputs == right
        assert all(map(torch.equal, logits, right_logits))
    for name in ("global_pages", "window_pages", "tails"):
        assert torch.equal(getattr(made_beside, name), getattr(in_line, name)), name


def test_calibrated_inputs_are_served_without_graphs(
    network_of: Callable[[torch.dtype], Network],
) -> None:
    """Where graphs are on, too: to the logits of the references, but for the order of sums."""
    network = with_calibrated_inputs(network_of(torch.float32))
    answers = []
    for device in ("cpu", "cuda"):
        weights = network.weights if device == "cpu" else moved(network.weights, "cuda")
        pools = pools_of(network.config, BOUNDS, network.dtype, device)
        on_device = Network(network.config, weights)
        executor = Padded(on_device, pools, BOUNDS, graphs=device == "cuda", device=device)
        answers.append(answered(executor, BOUNDS))
        assert executor.num_graphs == 0
    (expected, expected_logits), (ours, logits) = answers
    assert ours == expected
    for one, other in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-3)
