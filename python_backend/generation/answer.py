"""One answer as text: from output ids to what a client may see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from python_backend.generation.stop_strings import StopStrings
from python_backend.text.detokenizer import Detokenizer

Int32Array = npt.NDArray[np.int32]


class Said(NamedTuple):
    """New text, how many of the ids that came belong to the answer, and what stopped it."""

    text: str
    num_ids: int
    stop: str | None


class AnswerText:
    """Detokenises, and ends the text at a stop string. Without stop strings ids are taken as they
    come; with them one by one, so that the answer ends with the token that completed one."""

    def __init__(
        self, detokenizer: Detokenizer, stops: StopStrings | None, min_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_ids = 0

    def feed(self, ids: Int32Array, *, last: bool, ends_with_end_id: bool) -> Said:
        """The end token is an output id, but no text."""
        spoken = ids[:-1] if ends_with_end_id else ids
        if self._stops is None:
            return Said(self._detokenizer.feed(spoken, last=last), len(ids), None)
        text = []
        for place in range(len(spoken)):
            self._num_ids += 1
            piece = self._detokenizer.feed(spoken[place : place + 1])
            said = self._stops.feed(piece, armed=self._num_ids > self._min_tokens)
            text.append(said.text)
            if said.stop is not None:
                return Said("".join(text), place + 1, said.stop)
        if last:
            said = self._stops.feed(self._detokenizer.feed(ids[:0], last=True), last=True)
            text.append(said.text)
            if said.stop is not None:
                return Said("".join(text), len(ids), said.stop)
        return Said("".join(text), len(ids), None)
