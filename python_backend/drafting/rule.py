"""Which drafts of a request are worth keeping for its next step.

The survival of a draft is P(it and all before it are accepted), the product of the confidences up
to it (technical report, section on DSpark).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DraftRule:
    """At most `most` drafts of a request are verified in one step, and none whose survival is below
    `min_survival`; 0 keeps all. `by_cost`: of those only as many as pay for their rows."""

    most: int
    min_survival: float
    by_cost: bool = False

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"expected at least one draft to be verified, got {self.most}")
        if not 0 <= self.min_survival <= 1:
            raise ValueError(f"expected a survival from 0 to 1, got {self.min_survival}")

    def survival(self, confidence: Float32Array) -> Float32Array:
        """Of the drafts, [n, most], of blocks with these confidences [n, block]."""
        survival: Float32Array = np.cumprod(confidence[:, : self.most], axis=1)
        return survival

    def lengths(self, survival: Float32Array, room: Int64Array) -> Int64Array:
        """Drafts worth keeping, [n], of blocks with these survivals [n, most].

        `room[i]` is the most that request i can use. A survival that is not a number ends its
        block.
        """
        return np.minimum((survival >= self.min_survival).sum(axis=1), room)


def granted(wanted: Int64Array, budget: int) -> Int64Array:
    """What each gets of `budget`, first come first served."""
    return np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted)
