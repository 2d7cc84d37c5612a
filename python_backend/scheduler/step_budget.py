"""How many rows a step may have.

A step cannot be interrupted: other streams, freed pages and new requests wait for its end. A GPU
runs the largest in a fraction of a second. A CPU takes many seconds for as many; how many depends
on model and machine, so there the budget follows what was measured.

What is bounded is the time that prompts add to a step. Were it the step's whole time, rows that
decode would take it from the prompts, the more requests run, and who waits would wait for ever
longer. Were it not bounded, who decodes would wait for all who come. Where both are many, a machine
is overloaded, and the work of a request is the same whatever the rows: its first token comes the
later, the sooner its others follow. So then prompts are given as long again as decoding takes.
"""

from __future__ import annotations

from python_backend.settings import CoreLimits

_MOST_GROWTH = 2.0  # from one step to the next
# Prompt rows that take as long as one decoding row. That runs all layers, and a prompt's rows but
# its last window only the encoder's half of them.
_DECODE_WEIGHT = 2


class StepBudget:
    """`max_num_tokens` rows a step. With `step_seconds` only as many beside those that decode as
    lately ran in that time, and more where others wait; in all never fewer than what all places
    and a replay need: shorter steps would be little else than what every step costs."""

    def __init__(self, limits: CoreLimits) -> None:
        self._most = limits.max_num_tokens
        self._least = min(limits.max_batch_size + 2 * limits.window, self._most)
        self._seconds = limits.step_seconds
        self._beside = self._most if self._seconds is None else 0

    def rows(self, num_decodes: int, num_waiting: int) -> int:
        """Of the next step, one for each of `num_decodes` requests that make tokens among them.
        `num_waiting` have no place yet."""
        for_waiting = _DECODE_WEIGHT * min(num_decodes, num_waiting)
        wanted = num_decodes + self._beside + for_waiting
        return min(max(wanted, self._least), self._most)

    def ran(self, num_decodes: int, num_rows: int, seconds: float) -> None:
        """A step took so long. Of one that was short, only what filled the budget tells that more
        would have done: a step has costs that its rows do not share."""
        beside = num_rows - num_decodes
        if self._seconds is None or not beside or not seconds:
            return
        added = seconds * beside / (beside + _DECODE_WEIGHT * num_decodes)
        if added > self._seconds or num_rows >= self.rows(num_decodes, 0):
            wanted = int(beside * min(_MOST_GROWTH, self._seconds / added))
            self._beside = min(wanted, self._most)
