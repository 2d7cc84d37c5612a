"""On the real network in float64: a batch answers what each of its requests answers alone.

Arrivals, chunk sizes, page sizes, batch limits and preemptions are drawn at random; with the prefix
cache off the tokens must not depend on any of them. With the cache on they may depend on the hit
length only, so the same hit is prepared for the request that runs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import ModelConfig
from engine.network import Network
from engine.paged_cache import CachePools
from python_backend.core import EngineCore
from python_backend.executor.torch_executor import TorchExecutor
from python_backend.request import Request, SamplingParams
from python_backend.settings import CoreLimits
from tests.python_backend.serving import Int32Array, Stream, limits

VOCAB = 512
MAX_PROMPT, MAX_NEW = 40, 5


def cases(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


def core_of(network: Network, bounds: CoreLimits) -> EngineCore:
    pools = CachePools(
        network.config,
        num_global_pages=bounds.num_global_pages,
        num_window_pages=bounds.num_window_pages,
        num_slots=bounds.max_batch_size,
        global_page_tokens=bounds.global_page_tokens,
        window_page_rows=bounds.window_page_tokens,
        dtype=network.dtype,
        quantize=True,
    )
    return EngineCore(TorchExecutor(network, pools), bounds)


def bounds_of(**changes: Any) -> CoreLimits:
    return limits(vocab_size=VOCAB, **changes)


def stream(name: str, prompt: Int32Array, max_tokens: int, sampled: bool, seed: int) -> Stream:
    made = Stream(name, prompt, max_tokens)
    made.request = Request(
        request_id=name,
        input_ids=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=1.0 if sampled else 0.0, seed=seed),
        end_ids=frozenset(),
        on_delta=made.deltas.append,
    )
    return made


def serve(core: EngineCore, streams: Sequence[Stream], arrivals: Sequence[int]) -> None:
    """Run everything, request i joining before step arrivals[i]."""
    step = 0
    pending = sorted(zip(arrivals, range(len(streams)), strict=True))
    while pending or core.has_work:
        while pending and pending[0][0] <= step:
            core.add_request(streams[pending.pop(0)[1]].request)
        core.step()
        core.check_integrity()
        step += 1
        assert step < 5000, "the core does not finish"


class Drawn:
    """A random batch: prompts, lengths, sampling and arrivals."""

    def __init__(self, data: st.DataObject) -> None:
        self.count = data.draw(st.integers(2, 4), label="requests")
        self.prompts = [
            np.array(
                data.draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=MAX_PROMPT)),
                dtype=np.int32,
            )
            for _ in range(self.count)
        ]
        self.max_tokens = [data.draw(st.integers(1, MAX_NEW)) for _ in range(self.count)]
        self.sampled = [data.draw(st.booleans()) for _ in range(self.count)]
        self.arrivals = [data.draw(st.integers(0, 6)) for _ in range(self.count)]

    def streams(self, prefix: Int32Array | None = None) -> list[Stream]:
        head = np.empty(0, np.int32) if prefix is None else prefix
        return [
            stream(
                f"r{i}",
                np.concatenate([head, self.prompts[i]]),
                self.max_tokens[i],
                self.sampled[i],
                seed=i,
            )
            for i in range(self.count)
        ]


def drawn_sizes(data: st.DataObject) -> dict[str, Any]:
    return {
        "max_num_tokens": data.draw(st.sampled_from([16, 17, 24, 40, 64]), label="step rows"),
        "max_batch_size": data.draw(st.integers(1, 4), label="batch"),
        "window_page_tokens": data.draw(st.sampled_from([1, 2, 3, 8]), label="window page"),
        "global_page_tokens": data.draw(st.sampled_from([2, 16, 32]), label="global page"),
    }


def test_without_prefix_cache(network64: Network) -> None:
    """Random pools, down to what one request needs, so that decoding requests are preempted."""
    preemptions = 0

    @cases(150)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        nonlocal preemptions
        drawn = Drawn(data)
        sizes = drawn_sizes(data)
        page = sizes["global_page_tokens"]
        least = max(
            -(-(len(prompt) + new) // page)
            for prompt, new in zip(drawn.prompts, drawn.max_tokens, strict=True)
        )
        pages = 1 + least + data.draw(st.integers(0, least // 2), label="spare pages")
        small = bounds_of(prefix_cache=False, num_global_pages=pages, **sizes)
        together = drawn.streams()
        core = core_of(network64, small)
        serve(core, together, drawn.arrivals)
        preemptions += core.statistics().num_preemptions
        for one, expected in zip(together, drawn.streams(), strict=True):
            alone = core_of(network64, bounds_of(prefix_cache=False, max_num_tokens=64))
            serve(alone, [expected], [0])
            assert one.output == expected.output, one.request

    check()
    assert preemptions, "no case preempted anything: the pools are too large to test it"


def test_with_equal_prefix_hits(network64: Network) -> None:
    """Everybody shares a cached prefix and differs right behind it; hits must be equal, and then
    so are the tokens."""

    @cases(50)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        drawn = Drawn(data)
        sizes = drawn_sizes(data) | {"global_page_tokens": 16}
        blocks = data.draw(st.integers(0, 3), label="cached blocks")
        prefix = np.arange(100, 100 + 16 * blocks, dtype=np.int32)
        for i, prompt in enumerate(drawn.prompts):
            prompt[0] = 400 + i
        primer = np.append(prefix, np.int32(399))
        core = core_of(network64, bounds_of(**sizes))
        serve(core, [stream("primer", primer, 1, False, 0)], [0])
        together = drawn.streams(prefix)
        serve(core, together, drawn.arrivals)
        for one, expected in zip(together, drawn.streams(prefix), strict=True):
            alone = core_of(network64, bounds_of(max_num_tokens=64))
            serve(alone, [stream("primer", primer, 1, False, 0)], [0])
            serve(alone, [expected], [0])
            assert one.cached_tokens == expected.cached_tokens == (16 * blocks if blocks else 0)
            assert one.output == expected.output, one.request

    check()


def test_a_long_prompt_keeps_private_memory_bounded(tiny_config: ModelConfig) -> None:
    """32,768 tokens through a window pool of 64 pages of 8 rows."""
    from engine.network import load_weights
    from engine.tensor_source import SafetensorsSource
    from tests.conftest import TINY

    config = tiny_config.with_changes(max_position_embeddings=32_800)
    token_class = np.arange(VOCAB) // 2
    source = SafetensorsSource(TINY)
    network = Network(config, load_weights(config, source, token_class, torch.float32))
    bounds = bounds_of(
        max_num_tokens=256,
        max_batch_size=2,
        max_seq_len=32_800,
        window_page_tokens=8,
        num_window_pages=64,
        num_global_pages=32_800 // 16 + 2,
    )
    prompt = np.random.default_rng(0).integers(3, VOCAB, 32_768, dtype=np.int32)
    one = stream("long", prompt, 2, False, 0)
    core = core_of(network, bounds)
    core.add_request(one.request)
    most = 0
    while core.has_work:
        core.step()
        most = max(most, core.statistics().num_window_pages_used)
    core.check_integrity()
    assert len(one.output) == 2
    # ceil((W − 1 + rows of a step) / rows of a page) + 1
    assert most <= (7 + 256 + 7) // 8 + 1
