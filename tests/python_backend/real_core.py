"""Cores on the real network, and random batches for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from engine.contiguous_cache import ContiguousCache
from engine.network import Network
from engine.paged_cache import CachePools
from plugins.sample import sample
from python_backend.core import EngineCore
from python_backend.executor.pools import pools_of
from python_backend.executor.torch_executor import TorchExecutor
from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Choice
from python_backend.request import Request, SamplingParams
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan, StepResult
from tests.engine.ragged import Timeline, step
from tests.python_backend.serving import Int32Array, Stream, limits

VOCAB = 512
MAX_PROMPT, MAX_ANSWER = 40, 12


def cases(count: int) -> settings:
    """So many random cases, times DSV41_TEST_CASES where that is set."""
    count *= int(os.environ.get("DSV41_TEST_CASES", "1"))
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


class RecordingExecutor(TorchExecutor):
    """Keeps the logits behind every sampled token, float64 [vocab], by (seed, output index)."""

    def __init__(self, network: Network, pools: CachePools) -> None:
        super().__init__(network, pools)
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.seeds: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        self.seeds = dict(zip(plan.slots.tolist(), plan.sampling.seed.tolist(), strict=True))
        return super().run(plan)

    def _choose(self, logits: torch.Tensor, rows: LogitRows) -> Choice:
        seeds = [self.seeds[slot] for slot in rows.slots.tolist()]
        keys = zip(seeds, rows.output_index.tolist(), strict=True)
        self.logits.update(zip(keys, logits.clone(), strict=True))
        return super()._choose(logits, rows)


class RealCore(EngineCore):
    """A core on the real network that remembers its logits."""

    def __init__(self, executor: RecordingExecutor, bounds: CoreLimits) -> None:
        super().__init__(executor, bounds)
        self.logits = executor.logits


def assert_same(together: RealCore, alone: RealCore, one: Stream, expected: Stream) -> None:
    """The same tokens, and the same logits behind them to 1e-9. Requests have distinct seeds."""
    assert one.output == expected.output, one.request
    seed = one.request.sampling.seed
    for index in range(len(expected.output)):
        torch.testing.assert_close(
            together.logits[seed, index], alone.logits[seed, index], rtol=0, atol=1e-9
        )


class Alone:
    """The network without a serving core: every row of a request in one forward over a contiguous
    cache, its answer given, behind a hit on `prefix`."""

    def __init__(self, network: Network, prefix: Int32Array | None = None) -> None:
        config = network.config
        self._network = network
        self._window = config.sliding_window
        self._hit = 0 if prefix is None else len(prefix)
        longest = self._hit + MAX_PROMPT + MAX_ANSWER
        self._cache = ContiguousCache(config, 1, longest, network.dtype, quantize=True)
        if prefix is not None and self._hit:
            behind = Timeline(prefix.tolist(), decoder_floor=self._hit)
            step(network, [behind], [self._hit], self._cache, store_context=False)

    def assert_answers(self, core: RealCore, one: Stream) -> None:
        """The core gave the request what it gets here: the same tokens, by the same logits to
        1e-9."""
        request, answer = one.request, one.output
        prompt, sampling = request.input_ids.tolist(), request.sampling
        assert len(answer) == request.max_tokens
        start = max(0, self._hit - self._window)
        rows = Timeline(
            [*prompt, *answer[:-1]],
            position=start,
            encoder_floor=start,
            decoder_floor=max(start, len(prompt) - self._window),
            write_floor=self._hit,
        )
        count = len(rows.tokens) - start
        step(self._network, [rows], [count], self._cache.with_fresh_private(), store_context=False)
        logits = rows.rows(len(prompt) - 1, len(rows.tokens))
        same = torch.ones(len(answer))
        chosen = sample(
            logits,
            same * sampling.temperature,
            same.long() * 0,
            same,
            same * 0,
            same.long() * sampling.seed,
            torch.arange(len(answer)),
        )
        assert answer == chosen.tolist(), request
        made = torch.stack([core.logits[sampling.seed, i] for i in range(len(answer))])
        torch.testing.assert_close(made, logits, rtol=0, atol=1e-9)


def core_of(network: Network, bounds: CoreLimits) -> RealCore:
    return RealCore(
        RecordingExecutor(network, pools_of(network.config, bounds, network.dtype)), bounds
    )


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
        # Lists that Hypothesis draws have five tokens on average, which is less than a window.
        self.prompts = [_drawn_prompt(data) for _ in range(self.count)]
        self.max_tokens = [data.draw(st.integers(1, MAX_ANSWER)) for _ in range(self.count)]
        self.sampled = [data.draw(st.booleans()) for _ in range(self.count)]
        self.arrivals = [data.draw(st.integers(0, 3)) for _ in range(self.count)]

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


def _drawn_prompt(data: st.DataObject) -> Int32Array:
    """Of any length alike."""
    size = data.draw(st.integers(1, MAX_PROMPT), label="prompt tokens")
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    return random.integers(3, VOCAB, size, dtype=np.int32)


def drawn_sizes(data: st.DataObject) -> dict[str, Any]:
    return {
        "max_num_tokens": data.draw(st.sampled_from([16, 17, 24, 40, 64]), label="step rows"),
        "max_batch_size": data.draw(st.integers(1, 4), label="batch"),
        "window_page_tokens": data.draw(st.sampled_from([1, 2, 3, 8]), label="window page"),
        "global_page_tokens": data.draw(st.sampled_from([2, 4, 16, 32]), label="global page"),
    }
