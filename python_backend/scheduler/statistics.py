"""Plain counters of a core, for metrics. Written by the core's thread, read by any."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from python_backend.metrics.latency import Latencies
from python_backend.request import FinishReason

DraftCounts = npt.NDArray[np.int64]


@dataclass
class Statistics:
    """Counters since start, then gauges of the moment. Tokens, rows, pages or requests as named.

    `num_cached_tokens` counts adopted hits, not where replay starts; what replay costs is in
    `num_replayed_rows`. `num_trimmed_rows` are prefill rows that never ran through the decoder.
    `num_verifications` counts rows of requests that verified drafts; element k of `num_drafted`
    and `num_accepted` how often there was a draft k + 1, and how often it stayed.
    `num_prefix_queries` are prompt tokens that were looked for in the prefix cache.
    `num_prefilling` of `num_running` have prompt rows to run. Everybody who waits waits behind the
    first, who needs what `waiting_for` says: slots, pages or rows.
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
    num_drafted: DraftCounts = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    num_accepted: DraftCounts = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    num_finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )

    latencies: Latencies = field(default_factory=Latencies)

    num_running: int = 0
    num_prefilling: int = 0
    num_waiting: int = 0
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
