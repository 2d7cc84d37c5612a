"""Steps padded to the sizes of graphs: here without graphs, which need a GPU, so that what padding
does to a step can be seen on any machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import StepShape
from engine.network import Network
from engine.network.decoder import DecoderOutput
from engine.paged_cache import CachePools
from python_backend.core import EngineCore
from python_backend.drafting.rule import DraftRule
from python_backend.executor.cuda_executor import CudaExecutor, waits_for_experts
from python_backend.executor.inputs import DraftShape, HostStep
from python_backend.executor.pools import pools_of
from python_backend.executor.shapes import GraphSizes
from python_backend.executor.torch_executor import PagedExecutor, TorchExecutor
from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Choice
from python_backend.settings import CoreLimits
from tests.python_backend.real_core import bounds_of, serve, stream

PREFIX = np.arange(100, 132, dtype=np.int32)
BOUNDS = bounds_of(
    max_num_tokens=64,
    max_batch_size=5,
    max_seq_len=128,
    global_page_tokens=16,
    window_page_tokens=3,
    prefix_cache=True,
)


class Recording(PagedExecutor):
    """Keeps all logits that a token is chosen from, and which kinds of step it had."""

    seen: list[torch.Tensor]
    kinds: set[tuple[bool, bool]]  # whether a decode size holds it, whether no row is trimmed

    def _choose(self, logits: torch.Tensor, rows: LogitRows) -> Choice:
        self.seen.append(logits.clone())
        return super()._choose(logits, rows)


class Plain(Recording, TorchExecutor):
    """As steps come."""


class Padded(Recording, CudaExecutor):
    """In the sizes of graphs."""

    def _forward(self, step: HostStep) -> DecoderOutput:
        self.kinds.add((self._sizes.decode(step.shape) is not None, step.rows.is_whole))
        return super()._forward(step)


def answered(executor: Recording, bounds: CoreLimits) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Chunked prompts, a prefix hit, decoding of one to four requests."""
    executor.seen, executor.kinds = [], set()
    core = EngineCore(executor, bounds)
    prompts = [np.append(PREFIX, np.arange(200, 200 + n, dtype=np.int32)) for n in (1, 40, 3)]
    prompts.append(np.array([5, 6, 7], dtype=np.int32))
    streams = [stream(f"r{i}", p, 5, i % 2 == 1, seed=i) for i, p in enumerate(prompts)]
    serve(core, streams, [0, 0, 3, 3])
    assert any(one.cached_tokens for one in streams)
    return [one.output for one in streams], executor.seen


@pytest.mark.parametrize("draft", [None, DraftRule(most=3, min_survival=0.0)])
def test_a_padded_step_gives_the_same_bits_and_touches_no_other_page(
    network_of: Callable[[torch.dtype], Network], draft: DraftRule | None
) -> None:
    """float32, where a row's bits do not depend on the rows beside it. All memory is compared, the
    null page included, which nobody writes."""
    network = network_of(torch.float32)
    bounds = replace(BOUNDS, draft=draft)
    pools: list[CachePools] = [pools_of(network.config, bounds, network.dtype) for _ in range(2)]
    plain = Plain(network, pools[0])
    padded = Padded(network, pools[1], bounds, graphs=False, device="cpu")
    expected, expected_logits = answered(plain, bounds)
    outputs, logits = answered(padded, bounds)
    assert outputs == expected
    assert len(logits) == len(expected_logits)
    for one, other in zip(logits, expected_logits, strict=True):
        assert torch.equal(one, other)
    for name in ("global_pages", "window_pages", "tails"):
        assert torch.equal(getattr(pools[0], name), getattr(pools[1], name)), name
    assert {(True, True), (False, False)} <= padded.kinds  # decode sizes, and trimmed prefill


def with_calibrated_inputs(network: Network) -> Network:
    """Of one layer's routed experts, as an engine of nvfp4-w4a4 has them."""
    layers = list(network.weights.layers)
    moe = layers[3].moe
    scale = torch.full((moe.routed.count, 2), 0.01)
    routed = replace(moe.routed, input_scale=scale.to(moe.gate.device))
    layers[3] = replace(layers[3], moe=replace(moe, routed=routed))
    return Network(network.config, replace(network.weights, layers=tuple(layers)))


def test_steps_that_wait_for_the_device_have_no_graphs(
    network_of: Callable[[torch.dtype], Network], caplog: pytest.LogCaptureFixture
) -> None:
    """A capture of one would fail at start."""
    pytest.importorskip("triton")
    network = network_of(torch.float32)
    assert not waits_for_experts(network)
    assert waits_for_experts(network_of(torch.float64))
    calibrated = with_calibrated_inputs(network)
    assert waits_for_experts(calibrated)
    pools = pools_of(network.config, BOUNDS, network.dtype)
    executor = CudaExecutor(calibrated, pools, BOUNDS, device="cpu")
    assert executor.shapes_at_start() == []
    (message,) = caplog.messages
    assert message.startswith("steps run without CUDA graphs: the experts have calibrated NVFP4")


SIZES = GraphSizes(
    requests=(1, 2, 4, 8),
    contexts=(64, 256),
    long_contexts=(128, 256),
    verify_rows=6,
    encoder_rows=(128, 256),
    decoder_rows=(128,),
)


@pytest.mark.parametrize(
    ("requests", "rows", "context", "expected"),
    [
        (1, 1, 9, (1, 1, 1, 64)),
        (3, 3, 65, (4, 4, 4, 256)),
        (3, 18, 9, (4, 24, 24, 64)),
        (3, 4, 9, (4, 24, 24, 64)),  # a fourth request of no row would have no row to begin at
        (8, 8, 9, (8, 8, 8, 64)),
        (8, 9, 9, (8, 48, 48, 64)),
        (1, 7, 9, (2, 12, 12, 64)),  # a short prompt's tail
        (9, 9, 9, None),
        (1, 49, 9, None),
        (1, 1, 257, None),
    ],
)
def test_decode_sizes(
    requests: int, rows: int, context: int, expected: tuple[int, ...] | None
) -> None:
    assert SIZES.decode(StepShape(requests, rows, rows, context)) == expected


@pytest.mark.parametrize(
    ("shape", "encoder", "decoder"),
    [
        (StepShape(1, 100, 1, 100), (1, 128, 0, 256), (1, 128, 1, 256)),
        (StepShape(3, 128, 3, 64), (4, 256, 0, 64), None),  # no padding row among 128
        (StepShape(4, 128, 4, 64), (4, 128, 0, 64), (4, 128, 4, 64)),
        (StepShape(2, 99, 7, 64), (2, 128, 0, 64), (2, 128, 12, 64)),  # six logit rows at most
        (StepShape(1, 257, 1, 64), None, None),
    ],
)
def test_prefill_sizes(
    shape: StepShape, encoder: tuple[int, ...] | None, decoder: tuple[int, ...] | None
) -> None:
    assert SIZES.encoder(shape._replace(logit_rows=0)) == encoder
    assert SIZES.decoder(shape) == decoder


def test_sizes_of_long_segments() -> None:
    assert SIZES.long(StepShape(1, 257, 1, 64)) == (1, 257, 1, 128)
    assert SIZES.long(StepShape(9, 300, 9, 129)) == (9, 300, 9, 256)


def test_sizes_of_draft_passes() -> None:
    """Behind a step of no decode size: its rows as they are, and every request an anchor."""
    assert SIZES.draft(DraftShape(3, 300, 2)) == (4, 300, 4)
    assert SIZES.draft(DraftShape(8, 257, 8)) == (8, 257, 8)


def test_a_long_segment_sees_an_eighth_too_much_at_most() -> None:
    limits = bounds_of(
        max_batch_size=1, max_num_tokens=1024, max_seq_len=1_000_000, global_page_tokens=256
    )
    sizes = GraphSizes.of(limits).long_contexts
    assert sizes[:3] == (4096, 8192, 12288)
    assert sizes[-2:] == (983_040, 1_000_192)  # whole pages
    assert all(size % 4096 == 0 for size in sizes[:-1])
    assert max(b / a for a, b in itertools.pairwise(sizes[7:])) <= 1.125
    assert len(sizes) < 50


def test_sizes_of_a_core() -> None:
    limits = bounds_of(
        max_batch_size=100, max_num_tokens=1024, max_seq_len=65536, global_page_tokens=256,
        draft=DraftRule(most=3, min_survival=0.0),
    )  # fmt: skip
    sizes = GraphSizes.of(limits)
    assert sizes.requests == (1, 2, 4, 8, 16, 32, 48, 64, 96, 100)
    assert sizes.contexts == (4096, 16384, 65536)
    assert sizes.long_contexts == (*range(4096, 65536, 4096), 65536)
    assert sizes.verify_rows == 4
    assert sizes.encoder_rows == (128, 256, 384, 512, 640, 768, 896, 1024)
    first = next(sizes.at_start())
    assert first == (100, 400, 400, 65536)
