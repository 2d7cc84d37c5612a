"""Which drafts of a step stay.

The target's choice is made behind every verified row, each from its own distribution and by its
own draw. A draft stays while it is what the target chose in its place. For a drafter that proposes
one token that is exact rejection sampling (accept d with probability p(d), otherwise draw from p
without d; arXiv 2211.17192), and more: a request gets the very tokens that it gets without drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from python_backend.step_plan import StepPlan, StepResult

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Verified(NamedTuple):
    num_accepted: Int64Array  # [n] leading drafts that stay
    tokens: Int32Array  # [n] the choice behind the last of them


def verify(choices: Int32Array, drafts: Int32Array, num_drafts: Int64Array) -> Verified:
    """Compare the drafts of n requests with the target's choices.

    `drafts` are laid end to end, num_drafts[i] of request i; `choices` likewise, one more of each:
    choice 0 judges draft 0, and the last has no draft to judge.
    """
    ends = np.cumsum(num_drafts + 1)
    if not len(drafts):
        return Verified(np.zeros_like(num_drafts), choices)
    judging = np.ones(len(choices), dtype=bool)
    judging[ends - 1] = False
    agrees = np.zeros((len(num_drafts), int(num_drafts.max())), dtype=bool)
    agrees[np.arange(agrees.shape[1]) < num_drafts[:, None]] = choices[judging] == drafts
    num_accepted = np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
    return Verified(num_accepted, choices[ends - num_drafts - 1 + num_accepted])


def check_drafts(plan: StepPlan, result: StepResult, vocab_size: int) -> None:
    """Raise ValueError for an answer that accepts drafts which were not there, or proposes what is
    no token."""
    accepted, drafts = result.num_accepted, result.drafts
    if accepted is not None and not (
        accepted.shape == plan.num_drafts.shape
        and bool(((accepted >= 0) & (accepted <= plan.num_drafts)).all())
    ):
        raise ValueError(
            f"expected at most {plan.num_drafts.tolist()} accepted drafts, got {accepted.tolist()}"
        )
    if drafts is None:
        return
    tokens, confidence = drafts
    if tokens.shape != confidence.shape or len(tokens) != plan.arrays.num_requests:
        raise ValueError(
            f"expected drafts and confidences of {plan.arrays.num_requests} requests, got "
            f"{tokens.shape} and {confidence.shape}"
        )
    if tokens.view(np.uint32).max(initial=0) >= vocab_size:
        raise ValueError(f"expected drafts from 0 to {vocab_size - 1}, got others")
