"""The rows of a step whose logits choose a token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class LogitRows(NamedTuple):
    """One row per choice. A request that verifies drafts has several: row `behind` of it is chosen
    as if its first `behind` drafts were outputs already. Nothing is remembered of drafts, so none
    has to be taken back."""

    slots: Int64Array  # [L]
    output_index: Int64Array  # [L] outputs before the chosen one, drafts included
    behind: Int64Array  # [L]
    drafts: Int32Array  # [L, D] drafts of the row's request, −1 behind the last

    @staticmethod
    def of_step(
        slots: Int64Array, output_index: Int64Array, drafts: Int32Array, num_drafts: Int64Array
    ) -> LogitRows:
        """Rows of R requests with num_drafts[r] drafts each, laid end to end in `drafts`."""
        counts = num_drafts + 1
        request = np.repeat(np.arange(len(slots)), counts)
        behind = np.arange(len(request)) - (np.cumsum(counts) - counts)[request]
        padded = np.full((len(slots), int(num_drafts.max(initial=0))), -1, dtype=np.int32)
        padded[np.arange(padded.shape[1]) < num_drafts[:, None]] = drafts
        return LogitRows(slots[request], output_index[request] + behind, behind, padded[request])

    def take(self, index: Int64Array) -> LogitRows:
        return LogitRows(
            self.slots[index], self.output_index[index], self.behind[index], self.drafts[index]
        )

    @property
    def before(self) -> Int32Array:
        """The drafts before each row, [L, D], −1 elsewhere."""
        within = np.arange(self.drafts.shape[1]) < self.behind[:, None]
        return np.where(within, self.drafts, np.int32(-1))
