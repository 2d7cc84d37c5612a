"""A training step as a captured graph: one launch in place of about ten thousand.

Every variant of a step (its shapes, whether weights are rounded) runs a few times as it is, so that
all kernels are compiled and all state exists, and is then captured once and replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator

import torch

from examples.tinyflash.training.batch import TrainingBatch

Values = dict[str, torch.Tensor]
Step = Callable[[TrainingBatch], Values]

_EAGER_STEPS = 2
_AHEAD = 2  # steps that may wait on the device


class CapturedSteps:
    """Runs a step function by variant on a stream of its own; it must not wait for the device.

    `step(data)` trains on device tensors; whatever else it reads or writes must stay in place
    between steps. `before_capture` drops gradients that an earlier step left behind.
    """

    def __init__(self, before_capture: Callable[[], None]) -> None:
        self._before_capture = before_capture
        self._seen: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[torch.Tensor], Values]] = {}
        self._waiting: deque[tuple[torch.cuda.Event, TrainingBatch]] = deque()
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, variant: Hashable, step: Step, data: TrainingBatch) -> Values:
        """The step's values, which the next step of the variant overwrites."""
        self.stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(self.stream):
            if variant not in self._graphs:
                self._seen[variant] = self._seen.get(variant, 0) + 1
                if self._seen[variant] <= _EAGER_STEPS:
                    values = step(data)
                    self.stream.synchronize()
                    return values
                self._capture(variant, step, data)
            graph, inputs, values = self._graphs[variant]
            torch._foreach_copy_(inputs, list(_tensors(data)))
            graph.replay()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        # The inputs live until the device has copied them.
        self._waiting.append((done, data))
        if len(self._waiting) > _AHEAD:
            self._waiting.popleft()[0].synchronize()
        return values

    def forget(self) -> None:
        """Free the captured graphs, for a phase that needs them no more."""
        torch.cuda.synchronize()
        self._graphs.clear()
        self._seen.clear()
        torch.cuda.empty_cache()

    def _capture(self, variant: Hashable, step: Step, data: TrainingBatch) -> None:
        self._before_capture()
        pool = next((graph.pool() for graph, _, _ in self._graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=pool, stream=self.stream):
            values = step(data)
        self._before_capture()
        self._graphs[variant] = graph, list(_tensors(data)), values


def _tensors(data: TrainingBatch) -> Iterator[torch.Tensor]:
    yield from (value for value in vars(data.ragged).values() if isinstance(value, torch.Tensor))
    yield from (value for value in data if isinstance(value, torch.Tensor))
    yield from data.engram_rows.values()
