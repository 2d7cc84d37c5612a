"""Plain counters of a core, for metrics. Written by the core's thread, read by any."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engine.batch import StepArrays
from python_backend.metrics.latency import Latencies
from python_backend.request import FinishReason

Counts = npt.NDArray[np.int64]


@dataclass
class Statistics:
    """Counters since start, then gauges of the moment. Tokens, rows, pages or requests as named.

    `num_cached_tokens` counts adopted hits, not where replay starts; what replay costs is in
    `num_replayed_rows`. `num_trimmed_rows` are prefill rows that never ran through the decoder.
    `num_verifications` counts rows of requests that verified drafts; element k of `num_drafted`
    and `num_accepted` how often there was a draft k + 1, and how often it stayed.
    `num_prefix_queries` are prompt tokens that were looked for in the prefix cache.
    `num_prefilling` of `num_running` have prompt rows to run. Everybody who waits waits behind the
    first, who needs what `waiting_for` says: slots, pages or rows. `num_compiling` of `num_waiting`
    wait beside the queue until their grammars are compiled.
    """

    num_steps: int = 0
    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_prefix_queries: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_replayed_rows: int = 0
    num_trimmed_rows: int = 0
    num_dropped_short_hits: int = 0
    num_preemptions: int = 0
    num_failed_steps: int = 0
    num_verifications: int = 0
    num_drafted: Counts = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    num_accepted: Counts = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    num_finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )

    latencies: Latencies = field(default_factory=Latencies)

    num_running: int = 0
    num_prefilling: int = 0
    num_waiting: int = 0
    num_compiling: int = 0
    waiting_for: str = ""
    num_global_pages_used: int = 0
    num_global_pages: int = 0
    num_window_pages_used: int = 0
    num_window_pages: int = 0
    num_published_pages: int = 0

    def copy(self) -> Statistics:
        """What was counted so far. From any thread."""
        return replace(
            self,
            num_finished=dict(self.num_finished),
            num_drafted=self.num_drafted.copy(),
            num_accepted=self.num_accepted.copy(),
            latencies=self.latencies.copy(),
        )

    def count_rows(self, arrays: StepArrays, num_decodes: int) -> None:
        """A step's rows. A decode row is never replayed and never trimmed, so only those of the
        requests behind the first `num_decodes` are looked at."""
        self.num_steps += 1
        self.num_rows += arrays.num_rows
        if num_decodes < arrays.num_requests:
            first, counts = arrays.first_position[num_decodes:], np.diff(arrays.query_start)
            counts = counts[num_decodes:]
            replayed = np.clip(arrays.write_floor[num_decodes:] - first, 0, counts)
            trimmed = np.clip(arrays.decoder_floor[num_decodes:] - first, 0, counts)
            self.num_replayed_rows += int(replayed.sum())
            self.num_trimmed_rows += int(trimmed.sum())

    def count_drafts(self, num_drafts: Counts, num_accepted: Counts | None) -> None:
        """Of each request [R] of a step. Acceptance is the drafter's: it counts also when an end id
        cut the accepted drafts."""
        self.num_verifications += int(np.count_nonzero(num_drafts))
        self.num_drafted += _num_above(num_drafts, len(self.num_drafted))
        if num_accepted is not None:
            self.num_accepted += _num_above(num_accepted, len(self.num_accepted))


def _num_above(values: Counts, most: int) -> Counts:
    """How many of `values` ≤ most are above 0, 1, … most − 1."""
    counts: Counts = np.bincount(values, minlength=most + 1)[:0:-1].cumsum()[::-1]
    return counts
