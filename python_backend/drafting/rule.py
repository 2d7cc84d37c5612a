"""How many drafts of a request are verified in its next step.

Only the cost depends on it, never a token: whatever is verified, the target's own choices are
what a request gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftRule:
    """`most` drafts of a request are verified in one step, those whose survival is at least
    `min_survival`: P(this draft and all before it are accepted), the product of the confidences
    up to it (technical report, section on DSpark). 0 verifies all."""

    most: int
    min_survival: float

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"expected at least one draft to be verified, got {self.most}")
        if not 0 <= self.min_survival <= 1:
            raise ValueError(f"expected a survival from 0 to 1, got {self.min_survival}")

    def lengths(self, confidence: npt.NDArray[np.float32], room: Int64Array) -> Int64Array:
        """Drafts to verify, [n], of blocks with these confidences [n, block].

        `room[i]` is the most that request i can use. A confidence that is not a number ends its
        block.
        """
        survival = np.cumprod(confidence[:, : self.most].T, axis=0)
        return np.minimum((survival >= self.min_survival).sum(axis=0), room)


def granted(wanted: Int64Array, budget: int) -> Int64Array:
    """What each gets of `budget`, first come first served."""
    return np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted)
