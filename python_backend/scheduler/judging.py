"""Prompts whose tokens' log probabilities were asked for: which rows of a step make them.

The logits of such rows are the largest thing that a step makes, so a step has a bounded number of
them; a prompt that is judged runs in smaller chunks than others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from engine.batch import StepArrays
from python_backend.drafting.rule import granted
from python_backend.request import LogProbs
from python_backend.scheduler.tracked import TrackedRequest
from python_backend.step_plan import PromptPiece

Int64Array = npt.NDArray[np.int64]


class Judging:
    """The running requests with prompt tokens to judge, by slot; false when there are none.
    `max_rows` of them run in one step."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._tracked: dict[int, TrackedRequest] = {}

    def __bool__(self) -> bool:
        return bool(self._tracked)

    def add(self, slot: int, tracked: TrackedRequest) -> None:
        if tracked.is_judging:
            self._tracked[slot] = tracked

    def discard(self, slot: int) -> None:
        self._tracked.pop(slot, None)

    def limited(self, slots: Int64Array, wanted: Int64Array) -> Int64Array:
        """Rows that each slot may run of those that it wants, first come first served."""
        mine = self._among(slots)
        allowed = wanted.copy()
        allowed[mine] = granted(wanted[mine], self._max_rows)
        return allowed

    def room(self, slots: Int64Array, counts: Int64Array) -> int:
        """Rows that a step of these may still have."""
        return self._max_rows - int(counts[self._among(slots)].sum())

    def pieces(self, slots: Int64Array, arrays: StepArrays) -> list[PromptPiece]:
        """The step's rows before prompt tokens that have not been judged yet."""
        pieces = []
        for r in np.flatnonzero(self._among(slots)).tolist():
            tracked = self._tracked[int(slots[r])]
            first, begin, end = int(arrays.first_position[r]), *arrays.query_start[r : r + 2]
            start = max(first, tracked.num_judged - 1)
            stop = min(first + int(end - begin), tracked.num_prompt_tokens - 1)
            if start < stop:
                num_top = tracked.request.sampling.prompt_logprobs
                assert num_top is not None
                targets = tracked.tokens[start + 1 : stop + 1]
                pieces.append(PromptPiece(r, int(begin) + start - first, targets, num_top))
        return pieces

    def book(
        self, slots: Int64Array, pieces: Sequence[PromptPiece], made: Iterable[LogProbs]
    ) -> list[tuple[TrackedRequest, LogProbs]]:
        """The judgements of a step that ran, each with its request."""
        booked = []
        for piece, logprobs in zip(pieces, made, strict=True):
            slot = int(slots[piece.request])
            tracked = self._tracked[slot]
            tracked.num_judged += len(piece.targets)
            if not tracked.is_judging:
                self.discard(slot)
            booked.append((tracked, logprobs))
        return booked

    def _among(self, slots: Int64Array) -> npt.NDArray[np.bool_]:
        return np.isin(slots, list(self._tracked))
