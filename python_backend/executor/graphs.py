"""A function of a step as a CUDA graph: captured once for its sizes, replayed with other numbers.

Everything that the function reads from the host is one buffer on the device, filled by one copy
before each replay. What it computes in between lies in memory that all graphs share, so a result
lives until the next replay unless the function put it somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine.upload import Array, packed, packed_size, views

Inputs = TypeVar("Inputs")
Output = TypeVar("Output")
Inputs_co = TypeVar("Inputs_co", covariant=True)


class HostInputs(Protocol[Inputs_co]):
    """What a function reads, on the host."""

    def arrays(self) -> Sequence[Array]: ...

    def bind(self, tensors: Sequence[torch.Tensor]) -> Inputs_co: ...


class StepGraph(Generic[Inputs, Output]):
    """`run` for inputs of the sizes of `host`, which must be such that running it does no harm: it
    runs once to compile what it launches, before the capture."""

    def __init__(
        self,
        run: Callable[[Inputs], Output],
        host: HostInputs[Inputs],
        *,
        device: str,
        pool: Any,
    ) -> None:
        """`pool`: the memory that graphs share, of torch.cuda.graph_pool_handle."""
        arrays = host.arrays()
        self._memory = torch.empty(packed_size(arrays), dtype=torch.uint8, device=device)
        self._memory.copy_(packed(arrays))
        inputs = host.bind(views(self._memory, arrays))
        run(inputs)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = run(inputs)

    def replay(self, host: HostInputs[Inputs]) -> Output:
        """The result for inputs of the same sizes; nobody waits for it."""
        self._memory.copy_(packed(host.arrays()), non_blocking=True)
        self._graph.replay()
        return self._output
