"""Small cores on the checking executor, and what they must answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from python_backend.core import EngineCore
from python_backend.executor.simulated import SimulatedExecutor, next_token
from python_backend.kv.window_pool import pages_for
from python_backend.replay import ReplayRule
from python_backend.request import Delta, FinishReason, Request, SamplingParams
from python_backend.scheduler.scheduler import Scheduler
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan

Int32Array = npt.NDArray[np.int32]

VOCAB_SIZE = 50


def limits(**changes: Any) -> CoreLimits:
    """A window of 8, hits of 16 tokens, steps of 32 rows, 4 requests; `changes` as in CoreLimits.
    The replay rule and the window pool follow from the rest unless given."""
    base = CoreLimits(
        vocab_size=VOCAB_SIZE,
        window=8,
        history_width=3,
        max_num_tokens=32,
        max_batch_size=4,
        max_seq_len=512,
        global_page_tokens=16,
        window_page_tokens=2,
        num_global_pages=200,
        num_window_pages=0,
        replay=ReplayRule(8, 8, 8, 16),
        prefix_cache=True,
    )
    result = replace(base, **changes)
    window = result.window
    if "replay" not in changes:
        rule = ReplayRule(window, window, window, result.global_page_tokens)
        result = replace(result, replay=rule)
    if "num_window_pages" not in changes:
        pages = pages_for(
            window, result.window_page_tokens, result.max_batch_size, result.max_num_tokens
        )
        result = replace(result, num_window_pages=pages)
    return result


def tokens(seed: int, count: int) -> Int32Array:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count, dtype=np.int32)


class Stream:
    """A request and everything that was delivered to it."""

    def __init__(
        self,
        request_id: str,
        prompt: Int32Array,
        max_tokens: int,
        *,
        end_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        use_prefix_cache: bool = True,
        salt: bytes = b"",
    ) -> None:
        self.deltas: list[Delta] = []
        self.request = Request(
            request_id=request_id,
            input_ids=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(seed=seed),
            end_ids=end_ids,
            on_delta=self.deltas.append,
            use_prefix_cache=use_prefix_cache,
            cache_salt=salt,
        )

    @property
    def output(self) -> list[int]:
        return [int(token) for delta in self.deltas for token in delta.output_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason if self.deltas else None

    @property
    def cached_tokens(self) -> int:
        return self.deltas[0].cached_tokens

    def alone(self) -> list[int]:
        """What the request answers when it is served alone, from the definition of the simulated
        model: no pools, no scheduler."""
        history, output = self.request.input_ids, list[int]()
        while len(output) < self.request.max_tokens:
            token = next_token(history, VOCAB_SIZE, self.request.sampling.seed, len(output))
            history = np.append(history, np.int32(token))
            output.append(token)
            if token in self.request.end_ids:
                break
        return output

    def assert_served(self) -> None:
        expected = self.alone()
        where = next(
            (
                i
                for i, pair in enumerate(zip(self.output, expected, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(self.output), len(expected)),
        )
        assert self.output == expected, (
            f"request {self.request.request_id} of {len(self.request.input_ids)} tokens differs "
            f"first at output {where}: got {self.output[where:][:3]}, "
            f"expected {expected[where:][:3]}; last delta {self.deltas[-1:]}"
        )
        reasons = [delta.finish_reason for delta in self.deltas]
        ended = expected[-1] in self.request.end_ids
        assert reasons[-1] == (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert reasons[:-1] == [None] * (len(reasons) - 1), "a delta came after the last one"


class Driver:
    """A scheduler whose steps are looked at one by one."""

    def __init__(self, bounds: CoreLimits) -> None:
        self.scheduler = Scheduler(bounds)
        self.executor = SimulatedExecutor(bounds)

    def add(self, stream: Stream) -> None:
        self.scheduler.add(self.scheduler.track(stream.request))

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def step(self) -> StepPlan:
        plan = self.plan()
        self.scheduler.commit(self.executor.run(plan))
        self.scheduler.check_integrity()
        return plan


def new_core(bounds: CoreLimits) -> EngineCore:
    return EngineCore(SimulatedExecutor(bounds), bounds)


def finish(core: EngineCore, max_steps: int = 100_000) -> int:
    """Run until nothing is left, checking the books after each step. Returns the steps."""
    for num_steps in range(max_steps):
        if not core.has_work:
            return num_steps
        core.step()
        core.check_integrity()
    raise AssertionError(f"still not done after {max_steps} steps: {core.statistics()}")


def serve(core: EngineCore, *streams: Stream) -> int:
    """Serve the streams together, assert their answers, return the number of steps."""
    for stream in streams:
        core.add_request(stream.request)
    num_steps = finish(core)
    for stream in streams:
        stream.assert_served()
    return num_steps
