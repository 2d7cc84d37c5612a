"""The door of a core: who comes in, and who is told that the queue is full.

A request has arrived when it is in the core's inbox or waits for its grammar, until the scheduler
has it. Its caller's threads are many, so whoever uses this holds `door`.
"""

from __future__ import annotations

import threading

from python_backend.request import RequestError
from python_backend.scheduler.scheduler import Scheduler
from python_backend.scheduler.tracked import TrackedRequest
from python_backend.settings import CoreLimits


def check_sequences(limits: CoreLimits, num_sequences: int, token_limit: int) -> None:
    """Raises RequestError for a request of more sequences, of `token_limit` tokens each, than an
    idle server takes: it would be told for ever that the queue is full. Where it depends on whether
    one of them runs before the others come, it is refused as well, for it would be told so often.
    """
    num_waiting = num_sequences - limits.max_batch_size
    if num_waiting > limits.max_queued_requests:
        raise RequestError(
            "too_many_sequences",
            f"expected at most {limits.max_batch_size + limits.max_queued_requests} sequences of "
            f"one request, what runs at once and what waits here, got {num_sequences}; ask for "
            "fewer",
        )
    num_tokens = num_sequences * token_limit
    if num_waiting > 1 and num_tokens > limits.max_queued_tokens:
        raise RequestError(
            "too_many_sequences",
            f"expected sequences of one request that queue with at most {limits.max_queued_tokens} "
            f"tokens, got {num_sequences} of {token_limit}, prompt and max_tokens together; ask "
            "for fewer or shorter ones",
        )


class Arrivals:
    """Counts requests that the scheduler does not have yet, and keeps the queue's limits."""

    def __init__(self, limits: CoreLimits, scheduler: Scheduler) -> None:
        self.door = threading.Lock()
        self._limits = limits
        self._scheduler = scheduler
        self._num_requests = 0
        self._num_tokens = 0  # theirs, prompts and outputs that may come

    def enter(self, tracked: TrackedRequest) -> None:
        """Raises RequestError when the queue is full. As many as there are free places are not in
        it, whatever else they wait for, and an empty queue takes any sequence."""
        limits, scheduler = self._limits, self._scheduler
        queued = scheduler.num_waiting + self._num_requests - scheduler.num_free_slots
        num_tokens = scheduler.num_waiting_tokens + self._num_tokens
        if queued >= limits.max_queued_requests:
            raise RequestError(
                "queue_full",
                f"expected a queue of fewer than {limits.max_queued_requests} requests, got one "
                "that is full; try again later or another server",
            )
        if queued > 0 and num_tokens + tracked.token_limit > limits.max_queued_tokens:
            raise RequestError(
                "queue_full",
                f"expected at most {limits.max_queued_tokens} tokens in the queue, got "
                f"{num_tokens} and a request of {tracked.token_limit}; try again later or another "
                "server",
            )
        self._num_requests += 1
        self._num_tokens += tracked.token_limit

    def leave(self, tracked: TrackedRequest) -> None:
        """When the scheduler has it, or nobody. In one hold of the door with `Scheduler.add`, lest
        another who comes meanwhile finds it counted twice, or never."""
        self._num_requests -= 1
        self._num_tokens -= tracked.token_limit
