"""The request that travels: what was asked, and what is sent back. No tensors, no torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the library behind it is optional
    from python_backend.grammar.grammar import Grammar

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


class RequestError(ValueError):
    """A request that cannot be served. `code` is machine-readable and starts the message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"[{code}] {message}")
        self.code = code


# What a request is told that a stopping server does not let end.
STOPPED = ("shutting_down", "expected to finish, but the server stopped")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Every default changes nothing; python_backend.generation says how.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    seed: drives every draw; output i of a request is drawn by (seed, i) alone.
    repetition_penalty: divides a positive and multiplies a negative logit of every token that
    stands in the prompt or the output; 1 is off. presence_penalty is subtracted from the logit of
    every token in the output, frequency_penalty as often as it stands there.
    logit_bias: (token id, what is added to its logit).
    bad_words: token sequences that the output shall not contain.
    min_tokens: as many tokens come before an end id may.
    logprobs: how many of the most probable tokens are reported beside each output token, with
    their log probabilities before any rule; None reports nothing. prompt_logprobs: the same of
    each prompt token; such a prompt runs whole, without the prefix cache.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class LogProbs(NamedTuple):
    """Natural logarithms of the model's own probabilities for n consecutive tokens of a request."""

    chosen: Float32Array  # [n] of the tokens themselves
    top_ids: Int32Array  # [n, K] the K most probable, most probable first
    top: Float32Array  # [n, K]

    def first(self, count: int) -> LogProbs:
        return LogProbs(self.chosen[:count], self.top_ids[:count], self.top[:count])


class Delta(NamedTuple):
    """New tokens of one request. The first delta carries `cached_tokens`; the last a reason.

    A token of `end_ids` is delivered like any other, in the delta that ends with STOP. The first
    `num_drafts` tokens were drafts. `logprobs` come with their tokens where they were asked for;
    `prompt_logprobs` in one or more pieces, of the prompt from its second token on, before the
    first token.
    """

    output_ids: Int32Array
    cached_tokens: int
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    num_drafts: int = 0
    logprobs: LogProbs | None = None
    prompt_logprobs: LogProbs | None = None


@dataclass
class Request:
    """One generation. `input_ids` is a buffer that never becomes a Python list.

    `on_delta` is called from the core's thread, in order, and must not block; the last call has a
    finish reason. `use_prefix_cache` off neither reads the prefix cache nor publishes to it.
    `speculative` off makes one token a step, also on a server that drafts. `cache_salt`: only
    requests of the same salt share pages. `priority`: a smaller one is admitted earlier and
    preempted later. `grammar` is what this answer alone follows; it waits until that is compiled.
    `receiver_tells_end`: the receiver, which sees stop strings and clients that leave, calls the
    core's `cancel` with the reason that its client saw, and the request is counted by that.
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
    priority: int = 0
    grammar: Future[Grammar] | None = None
    receiver_tells_end: bool = False
