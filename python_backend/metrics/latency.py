"""How long requests wait and run, and steps take: names, meanings and edges as vLLM has them.

A request arrives when the core takes it, is scheduled at its first admission, and has its first and
its last token when the step that made them is booked. Preemption changes none of these moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from python_backend.metrics.histogram import Histogram, one_two_five

FIRST_TOKEN_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ROW_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PHASE_EDGES = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0),
)
# Parts of a step, in order. The executor's own parts of `execute` are forward, sample and draft;
# of forward, engram is the wait for Engram rows.
CORE_PHASES = ("schedule", "execute", "commit", "deliver")
EXECUTOR_PHASES = ("forward", "engram", "sample", "draft")


@dataclass
class Moments:
    """Of one request, in seconds of the core's clock; NaN where it did not come yet."""

    arrived: float
    scheduled: float = float("nan")
    first_token: float = float("nan")
    last_token: float = float("nan")


def _per_request() -> Histogram:
    return Histogram(REQUEST_EDGES)


@dataclass
class Latencies:
    """Seconds, except where the name says tokens or rows. Requests count when they end with an
    answer (a stop or the length), so that failed ones do not make the server look fast."""

    max_seq_len: int = 1
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_EDGES))
    inter_token: Histogram = field(default_factory=lambda: Histogram(PER_TOKEN_EDGES))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(PER_TOKEN_EDGES))
    queue: Histogram = field(default_factory=_per_request)
    prefill: Histogram = field(default_factory=_per_request)
    decode: Histogram = field(default_factory=_per_request)
    inference: Histogram = field(default_factory=_per_request)
    end_to_end: Histogram = field(default_factory=_per_request)
    step_rows: Histogram = field(default_factory=lambda: Histogram(ROW_EDGES))
    prompt_tokens: Histogram = field(init=False)
    output_tokens: Histogram = field(init=False)
    phases: dict[str, Histogram] = field(
        default_factory=lambda: {
            phase: Histogram(PHASE_EDGES) for phase in (*CORE_PHASES, *EXECUTOR_PHASES)
        }
    )

    def __post_init__(self) -> None:
        self.prompt_tokens = Histogram(one_two_five(self.max_seq_len))
        self.output_tokens = Histogram(one_two_five(self.max_seq_len))

    def made_tokens(
        self,
        now: float,
        slots: npt.NDArray[np.int64],
        last_token_at: npt.NDArray[np.float64],
        requests: npt.NDArray[np.object_],
    ) -> None:
        """These slots have a new token: the first, or one that came some time after the last.

        `last_token_at` by slot, NaN for none, is brought up to date; `requests` by slot have
        `moments`.
        """
        gaps = now - last_token_at[slots]
        last_token_at[slots] = now
        if np.isnan(np.add.reduce(gaps)):
            is_first = np.isnan(gaps)
            for request in requests[slots[is_first]].tolist():
                request.moments.first_token = now
                self.time_to_first_token.observe(now - request.moments.arrived)
            gaps = gaps[~is_first]
        self.inter_token.observe_all(gaps)

    def answered(self, moments: Moments, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request ended with an answer; its last token is what ends the time that it took."""
        first, last = moments.first_token, moments.last_token
        self.queue.observe(moments.scheduled - moments.arrived)
        self.prefill.observe(first - moments.scheduled)
        self.decode.observe(last - first)
        self.inference.observe(last - moments.scheduled)
        self.end_to_end.observe(last - moments.arrived)
        self.prompt_tokens.observe(num_prompt_tokens)
        self.output_tokens.observe(num_output_tokens)
        if num_output_tokens > 1:
            self.time_per_output_token.observe((last - first) / (num_output_tokens - 1))

    def stepped(self, num_rows: int, seconds: Mapping[str, float]) -> None:
        """A step of `num_rows` rows ended; seconds by phase."""
        self.step_rows.observe(num_rows)
        for phase, value in seconds.items():
            self.phases[phase].observe(value)

    def copy(self) -> Latencies:
        """The observations so far."""
        other = Latencies(self.max_seq_len)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Histogram):
                setattr(other, each.name, value.copy())
        other.phases = {phase: value.copy() for phase, value in self.phases.items()}
        return other
