"""How many rows a step may have.

A step cannot be interrupted: other streams, freed pages and new requests wait for its end. A GPU
runs the largest in a fraction of a second. A CPU takes many seconds for as many; how many depends
on model and machine, so there the budget follows what was measured.
"""

from __future__ import annotations

from python_backend.settings import CoreLimits

_MOST_GROWTH = 2.0  # of the budget, from one step to the next


class StepBudget:
    """`rows` of the next step, always between what every running request and a replay need and
    `max_num_tokens`. Without `step_seconds` it is the latter."""

    def __init__(self, limits: CoreLimits) -> None:
        self._most = limits.max_num_tokens
        self._least = min(self._most, limits.max_batch_size + 2 * limits.window)
        self._seconds = limits.step_seconds
        self.rows = self._most if self._seconds is None else self._least

    def ran(self, num_rows: int, seconds: float) -> None:
        """A step took so long. Of one that was short, only what filled the budget tells that more
        would have done: a step has costs that its rows do not share."""
        if self._seconds is None or not seconds:
            return
        if seconds > self._seconds or num_rows >= self.rows:
            wanted = int(num_rows * min(_MOST_GROWTH, self._seconds / seconds))
            self.rows = min(max(wanted, self._least), self._most)
