"""What a step makes on a second stream of its device, beside its own chain of launches.

A chain of small launches leaves most of a device idle; what only a later launch needs can run
there meanwhile. In a CUDA graph the second stream is a branch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Made = TypeVar("Made")


class Beside(Generic[Made]):
    """What `make` makes of tensors, on the stream named `stream` and behind all that was launched
    so far. Without a CUDA device there is one chain of launches, and `make` has run.

    Each kind of work has a stream, as what is launched on one waits for what was launched before.
    Whoever makes one while a graph is captured must take it before the capture ends.
    """

    def __init__(self, stream: str, make: Callable[..., Made], *reads: torch.Tensor) -> None:
        # As long as this lives: the allocator knows nothing of the other stream's reading, and
        # may give out their memory again where nobody else holds them.
        self._reads = reads
        self._ready: torch.cuda.Event | None = None
        device = reads[0].device
        if device.type != "cuda":
            self._made = make(*reads)
            return
        beside = _stream(stream, device)
        # Also what used the memory that the allocator gives out there has then run.
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._made = make(*reads)
            self._ready = beside.record_event()

    def take(self) -> Made:
        """The result. What the current stream is given from now on runs behind it."""
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
        return self._made


@functools.cache
def _stream(name: str, device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
