"""What the scheduler asks of an executor for one step, and what comes back. Numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.batch import StepArrays
from python_backend.request import LogProbs, Request

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplingArrays:
    """Per request of the step, [R]. `output_index` counts the request's outputs so far, so that a
    draw depends on (seed, output_index) alone."""

    seed: npt.NDArray[np.uint64]
    output_index: Int64Array


class Beginning(NamedTuple):
    """A request whose life in a slot begins with this step. `tokens` are those that it has, int32
    [n], the prompt first and then what it had put out before it was preempted; a view."""

    slot: int
    request: Request
    tokens: Int32Array


class PromptPiece(NamedTuple):
    """Consecutive rows of the step whose logits judge the prompt's next tokens, `targets` [n]."""

    request: int  # of the step
    first_row: int  # of the step
    targets: Int32Array
    num_top: int  # alternatives that are reported beside each target

    @property
    def rows(self) -> Int64Array:
        return np.arange(self.first_row, self.first_row + len(self.targets), dtype=np.int64)


@dataclass(frozen=True)
class PageTables:
    """Persistent tables indexed by slot; the pools own them, an executor only reads.

    `global_pages[slot, p // global_page_tokens]` is the page that holds position p's entries.
    `window_pages[slot, (p // window_page_tokens) % columns]` holds its window row: a ring of
    columns, because rows below the window are gone. Page 0 is the null page: never written, its
    contents never used. A compressor tail has one ring of rows per slot.
    """

    global_pages: Int32Array  # [num_slots, global columns]
    window_pages: Int32Array  # [num_slots, window columns]
    global_page_tokens: int
    window_page_tokens: int


@dataclass(frozen=True)
class StepPlan:
    """One step. `slots[r]` is the slot of request r of `arrays`.

    `fresh[r]` tells an executor that checks itself where a new life of a slot begins. The floors
    already keep a request from what the slot held before, so computing does not need it.

    The last `num_drafts[r]` tokens of request r are drafts, which the step verifies. Who
    `wants_drafts` gets a new block behind its step's last token; until then the executor keeps the
    drafter's context of the rows that stay. A request that stops wanting them never does again.
    """

    arrays: StepArrays
    slots: Int32Array  # [R]
    fresh: npt.NDArray[np.bool_]  # [R] first step since (re)admission
    tables: PageTables
    sampling: SamplingArrays
    beginnings: Sequence[Beginning]  # of the fresh ones
    num_drafts: Int64Array  # [R]
    wants_drafts: npt.NDArray[np.bool_]  # [R]
    prompt_pieces: Sequence[PromptPiece] = ()


class DraftBlocks(NamedTuple):
    """Proposed tokens behind each request's last one, and what each is worth."""

    tokens: Int32Array  # [R, block]
    confidence: npt.NDArray[np.float32]  # [R, block] P(accepted | all before it), NaN for no draft


@dataclass(frozen=True)
class StepResult:
    """`tokens[r]` is the token that request r chose last, −1 where no logits were wanted.

    Before it stand the first `num_accepted[r]` drafts of the plan, which it chose too; None is 0
    for all. `drafts` are for the next step, None when nobody wanted any. `logprobs` are of the
    tokens that a request chose and at least of all that stay, by its number among those who wanted
    logits. `prompt_logprobs` are of the plan's prompt pieces, one for each. `seconds` are the
    executor's own phases, of which metrics.latency has the names. `failures` say, by the number
    that `logprobs` go by, whose answer cannot go on, and why; its tokens are void.
    """

    tokens: Int32Array  # [R]
    num_accepted: Int64Array | None = None  # [R]
    drafts: DraftBlocks | None = None
    logprobs: Mapping[int, LogProbs] = field(default_factory=dict)
    prompt_logprobs: Sequence[LogProbs] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)


class Executor(Protocol):
    """Runs steps in the order given. The result belongs to the caller."""

    def run(self, plan: StepPlan) -> StepResult: ...
