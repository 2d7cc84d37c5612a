"""One step through the real executor, again and again: as it is served, and as one CUDA graph."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import engine.upload
from engine.network import Network
from engine.network.decoder import DecoderOutput
from engine.paged_cache import CachePools
from plugins.formats.rows import PackedRows
from python_backend.executor.inputs import HostDraft, HostStep
from python_backend.executor.pools import pools_of
from python_backend.executor.torch_executor import TorchExecutor
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan

_SAMPLES = 5
_BUDGET_MS = 400.0  # of all replays of one sample
_SERVED_MS = 1500.0  # of all samples of a served step
_ROWS_AT_ONCE = 1 << 18  # of a cache that is filled


def filled_pools(
    network: Network, limits: CoreLimits, device: str, *, quantize: bool = True
) -> CachePools:
    """Caches full of rows of standard deviation one, no two alike: equal scores would send a
    selection on its slow way."""
    pools = pools_of(network.config, limits, network.dtype, device, quantize=quantize)
    config = network.config
    stores = [pools.window(layer) for layer in range(config.num_layers_total)]
    for source in config.kv_source_layer_ids:
        stores += [pools.main(source), pools.index(source)]
    for store in stores:
        if isinstance(store, PackedRows):
            for pages in store.data.split(max(1, _ROWS_AT_ONCE // store.data.shape[1])):
                rows = torch.randn(*pages.shape[:2], store.width, device=device)
                pages.copy_(store.layout.pages(store.layout.pack(rows)))
    pools.tails.normal_()
    return pools


class Timed(ABC):
    """Something that runs on an executor."""

    @abstractmethod
    def forward(self) -> DecoderOutput:
        """Run it; nobody waits for the device."""

    def served_ms(self, *, samples: int = 9) -> float:
        """Median time until the device has done it, in milliseconds; fewer samples of what takes
        long."""
        self.forward()
        once = self._once()
        samples = int(max(1, min(samples, _SERVED_MS / once)))
        return statistics.median(self._once() for _ in range(samples))

    def host_ms(self, *, samples: int = 9) -> float:
        """Median time until the host has queued it for an idle device, in milliseconds."""
        times = []
        for _ in range(samples):
            _wait()
            started = time.perf_counter()
            self.forward()
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)

    def _once(self) -> float:
        _wait()
        started = time.perf_counter()
        self.forward()
        _wait()
        return (time.perf_counter() - started) * 1e3


@dataclass
class Steps(Timed):
    """Several, one after the other."""

    steps: Sequence[Step]

    def forward(self) -> DecoderOutput:
        return [step.forward() for step in self.steps][-1]


@dataclass
class Step(Timed):
    """One case on one executor."""

    executor: TorchExecutor
    plan: StepPlan
    host: HostStep = field(init=False)

    def __post_init__(self) -> None:
        self.host = HostStep.of(self.plan)

    @torch.inference_mode()
    def forward(self) -> DecoderOutput:
        """The forward, and where drafts are wanted a draft pass as if all had been accepted."""
        output = self.executor._forward(self.host)
        if self.plan.wants_drafts.any():
            tokens = np.full(self.plan.arrays.num_requests, 5, dtype=np.int32)
            draft = HostDraft.of(self.plan, self.host, tokens, self.plan.num_drafts)
            self.executor._draft(draft, output.draft_features)
        return output

    def captured(self) -> tuple[torch.cuda.CUDAGraph, DecoderOutput]:
        """The step as one graph, its uploads included. Its executor must not use graphs itself."""
        uploads = _Uploads()
        with uploads:
            self.forward()
        graph = torch.cuda.CUDAGraph()
        with uploads, torch.cuda.graph(graph):
            output = self.forward()
        self._uploads = uploads  # read again by every replay
        return graph, output


class _Uploads:
    """Puts the same pinned memory behind the same uploads of a step: a graph reads it again, and
    none can be taken while one is captured."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._packed = engine.upload.packed
        self._place = 0

    def __enter__(self) -> None:
        self._place = 0
        engine.upload.packed = self._again

    def __exit__(self, *error: object) -> None:
        engine.upload.packed = self._packed

    def _again(self, arrays: Any) -> torch.Tensor:
        if self._place == len(self._kept):
            self._kept.append(self._packed(arrays))
        self._place += 1
        return self._kept[self._place - 1]


def gpu_ms(graph: torch.cuda.CUDAGraph) -> tuple[float, float]:
    """Median of the samples' means, and their spread (largest less smallest over the median)."""
    _replays(graph, 1)
    count = int(max(2, min(20, _BUDGET_MS / max(_replays(graph, 1), 1e-3))))
    times = sorted(_replays(graph, count) for _ in range(_SAMPLES))
    middle = times[len(times) // 2]
    return middle, (times[-1] - times[0]) / middle


def _replays(graph: torch.cuda.CUDAGraph, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def launches(run: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Kernels that `run` launches, by name: how many, and their microseconds together.

    The profiler stays attached to the process, and every later launch takes the host longer, that
    of a graph with a thousand nodes about a millisecond: nothing is timed behind this.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profile.events() or []:
        is_kernel = not event.name.startswith(("Memcpy", "Memset"))
        if event.device_type != torch.autograd.DeviceType.CUDA or not is_kernel:
            continue
        count, us = found.get(event.name, (0, 0.0))
        found[event.name] = count + 1, us + float(event.device_time)
    return found


def relative_rms(ours: torch.Tensor, expected: torch.Tensor) -> float:
    ours, expected = ours.double(), expected.double()
    return float((ours - expected).norm() / expected.norm())


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
