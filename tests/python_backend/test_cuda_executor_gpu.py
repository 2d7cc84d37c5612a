"""Graphs on a GPU: the bits of the same steps without them, and no step waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.network import Network
from engine.network.decoder import DecoderOutput
from engine.network.device import moved
from python_backend.drafting.rule import DraftRule
from python_backend.executor.inputs import HostStep
from python_backend.executor.pools import pools_of
from tests.python_backend.test_cuda_executor import BOUNDS, Padded, answered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Strict(Padded):
    """Fails where a forward waits for the device, once kernels have their tables there."""

    watching = False

    def _forward(self, step: HostStep) -> DecoderOutput:
        torch.cuda.set_sync_debug_mode("error" if self.watching else "default")
        try:
            return super()._forward(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draft", [None, DraftRule(most=3, min_survival=0.0)])
def test_graphs_give_the_bits_of_single_launches(
    network_of: Callable[[torch.dtype], Network], dtype: torch.dtype, draft: DraftRule | None
) -> None:
    """The first run captures on demand what start-up did not; the second only replays."""
    given = network_of(dtype)
    network = Network(given.config, moved(given.weights, "cuda"))
    bounds = replace(BOUNDS, draft=draft)
    pools = [pools_of(network.config, bounds, network.dtype, "cuda") for _ in range(2)]
    single = Strict(network, pools[0], bounds, graphs=False)
    graphs = Padded(network, pools[1], bounds)
    for shape in graphs.shapes_at_start():
        graphs.capture(shape)
    captured = graphs.num_graphs
    assert not pools[1].global_pages.any()  # capturing writes nothing
    assert not pools[1].window_pages.any()
    for attempt in range(3):
        single.watching = attempt > 0
        expected, expected_logits = answered(single, bounds)
        outputs, logits = answered(graphs, bounds)
        assert outputs == expected
        for one, other in zip(logits, expected_logits, strict=True):
            assert torch.equal(one, other)
        for name in ("global_pages", "window_pages", "tails"):
            assert torch.equal(getattr(pools[0], name), getattr(pools[1], name)), name
    assert graphs.num_graphs > captured  # prefill's, by use
