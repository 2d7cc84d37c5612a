"""How many drafts of each request the next step verifies.

Only the cost depends on it, never a token: whatever is verified, the target's own choices are
what a request gets.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

_FIRST = 8  # steps that are soon forgotten: kernels and graphs are made in them
_MEMORY = 50  # steps back the weight of one has fallen to a third
_MOST = 2.0  # times what was expected that a step counts as: a hiccup is no measurement
# Of the rows of the remembered steps, as a share of (drafts to choose from)²; with less, nothing is
# known of what a row costs. One step with all of 5 or 500 drafts among others without is forgotten
# after some 80, whatever it seemed to cost: it may have been a hiccup.
_LEAST_VARIANCE = 0.004
_FEWEST = 5  # drafts to choose from that are reckoned with


class DraftSchedule:
    """Verifies what pays, by what steps cost. That is learned from steps in which every request
    decodes: seconds as a line over their rows, by least squares over the last steps. Where these
    had nearly the same number of rows, nothing is known (any more), and all and half of the drafts
    are tried in turn; where every step also runs prompts, nothing is learned and all are."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._tried_at = 0  # the number of steps when drafts were last tried
        # Weighted means: rows, seconds, rows², rows · seconds.
        self._means: Float64Array = np.zeros(4)

    def ran(self, num_rows: int, seconds: float) -> None:
        """A step in which every request decodes had so many rows and took so long."""
        self._num_steps += 1
        rows, mean = self._means[:2].tolist()
        expected = self.seconds(np.array([num_rows]))
        if expected is not None:
            seconds = min(seconds, _MOST * float(expected[0]))
        elif self._num_steps > _FIRST:  # no dearer than if rows were all that is paid for
            seconds = min(seconds, _MOST * mean * max(1.0, num_rows / rows))
        counted = max(1, self._num_steps - _FIRST)  # till then each takes the place of the last
        sample = np.array([num_rows, seconds, num_rows**2, num_rows * seconds], dtype=np.float64)
        self._means += (sample - self._means) / min(counted, _MEMORY)

    def seconds(self, num_rows: Int64Array, num_drafts: int = 0) -> Float64Array | None:
        """Of steps with so many rows [n]; None while that is not known well enough to choose from
        so many drafts. More rows never cost less, nor more than in proportion."""
        rows, seconds, squares, products = self._means.tolist()
        variance = squares - rows**2
        if variance < _LEAST_VARIANCE * max(num_drafts, _FEWEST) ** 2:
            return None
        # Not more than if rows were all that is paid for: a steeper line, found in noise, would say
        # that few rows cost nothing, and what they really take would pass for a hiccup.
        per_row = min(max(0.0, (products - rows * seconds) / variance), seconds / rows)
        cost: Float64Array = np.maximum(seconds + per_row * (num_rows - rows), 1e-9)
        return cost

    def worthwhile(self, survival: Float32Array, wanted: Int64Array, budget: int) -> Int64Array:
        """How many of its first wanted[i] drafts, with survivals [n, most] that do not rise along a
        row, each of n decoding requests verifies: those that survive most likely, `budget` at most,
        as many as make the expected tokens a second greatest (SGLang's rule, which has a profiled
        table for the line)."""
        num_requests = len(survival)
        is_wanted = np.arange(survival.shape[1]) < wanted[:, None]
        values = survival[is_wanted]
        order = np.argsort(-values, kind="stable")[:budget]  # equal ones of a row stay in order
        seconds = self.seconds(num_requests + np.arange(len(order) + 1), len(order))
        if seconds is None:
            teaches = self._num_steps > self._tried_at
            self._tried_at = self._num_steps
            order = order[: len(order) // (1 + (teaches and self._num_steps % 2))]
        else:
            tokens = np.full(len(order) + 1, num_requests, dtype=np.float64)
            tokens[1:] += np.cumsum(values[order], dtype=np.float64)
            order = order[: int((tokens / seconds).argmax())]
        return np.bincount(np.nonzero(is_wanted)[0][order], minlength=num_requests)
