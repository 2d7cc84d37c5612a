"""What a step produced."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from python_backend.request import FinishReason, LogProbs
from python_backend.scheduler.tracked import TrackedRequest

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class StepOutcome(NamedTuple):
    """tokens[i, : counts[i]] for requests[i], counts None for one token
    each, the first num_drafts[i] of which were drafts, None for no drafts; and whose last they
    were. A finished request has left the scheduler. `judged` has log probabilities of the next
    tokens of prompts."""

    requests: list[TrackedRequest]
    tokens: Int32Array
    counts: Int64Array | None
    num_drafts: Int64Array | None
    finished: dict[int, FinishReason]  # index into `requests`
    judged: list[tuple[TrackedRequest, LogProbs]]
