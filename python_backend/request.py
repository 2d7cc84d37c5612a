"""The request that travels: what was asked, and what is sent back. No tensors, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class RequestError(ValueError):
    """A request that cannot be served. `code` is machine-readable and starts the message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"[{code}] {message}")
        self.code = code


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy, top_k 0 and top_p 1 are off. `seed` drives every draw."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Delta(NamedTuple):
    """New tokens of one request. The first delta carries `cached_tokens`; the last a reason.

    A token of `end_ids` is delivered like any other, in the delta that ends with STOP.
    """

    output_ids: Int32Array
    cached_tokens: int
    finish_reason: FinishReason | None = None
    error: RequestError | None = None


@dataclass
class Request:
    """One generation. `input_ids` is a buffer that never becomes a Python list.

    `on_delta` is called from the core's thread, in order, and must not block; the last call has a
    finish reason. `use_prefix_cache` off neither reads the prefix cache nor publishes to it.
    `speculative` off makes one token a step, also on a server that drafts.
    """

    request_id: str
    input_ids: Int32Array
    max_tokens: int
    sampling: SamplingParams
    end_ids: frozenset[int]
    on_delta: Callable[[Delta], None]
    use_prefix_cache: bool = True
    cache_salt: bytes = field(default=b"")
    speculative: bool = True
