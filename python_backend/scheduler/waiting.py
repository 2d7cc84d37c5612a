"""The queue of requests that wait for a slot: by priority, then by arrival."""

from __future__ import annotations

from bisect import bisect_left, insort

from python_backend.scheduler.tracked import TrackedRequest

# (−priority, −arrival): the next request has the largest, so that taking it moves nothing.
_Turn = tuple[int, int]


class WaitingQueue:
    """A preempted request comes back to the turn that it had. `num_tokens` are prompts and outputs
    that may come."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._requests: dict[_Turn, TrackedRequest] = {}
        self._num_arrived = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def head(self) -> TrackedRequest:
        return self._requests[self._turns[-1]]

    def add(self, tracked: TrackedRequest) -> None:
        if tracked.arrival is None:
            self._num_arrived += 1
            tracked.arrival = self._num_arrived
        turn = _turn(tracked)
        insort(self._turns, turn)
        self._requests[turn] = tracked
        self.num_tokens += tracked.token_limit

    def remove(self, tracked: TrackedRequest) -> None:
        turn = _turn(tracked)
        del self._requests[turn], self._turns[bisect_left(self._turns, turn)]
        self.num_tokens -= tracked.token_limit


def _turn(tracked: TrackedRequest) -> _Turn:
    assert tracked.arrival is not None
    return -tracked.request.priority, -tracked.arrival
