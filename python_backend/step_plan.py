"""What the scheduler asks of an executor for one step, and what comes back. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.batch import StepArrays

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplingArrays:
    """Per request of the step, [R]. `output_index` counts the request's outputs so far, so that a
    draw depends on (seed, output_index) alone."""

    temperature: npt.NDArray[np.float32]
    top_k: Int32Array
    top_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    output_index: Int64Array


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
    """

    arrays: StepArrays
    slots: Int32Array  # [R]
    fresh: npt.NDArray[np.bool_]  # [R] first step since (re)admission
    tables: PageTables
    sampling: SamplingArrays


@dataclass(frozen=True)
class StepResult:
    """`tokens[r]` is the sampled token of request r, −1 where no logits were wanted."""

    tokens: Int32Array  # [R]


class Executor(Protocol):
    """Runs steps in the order given. The result belongs to the caller."""

    def run(self, plan: StepPlan) -> StepResult: ...
