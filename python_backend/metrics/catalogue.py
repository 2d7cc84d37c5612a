"""Every metric that the server shows: name, kind, meaning, and where its value comes from.

Names and meanings are vLLM's with the prefix `dsv41_`, labels are not; what only this model has
(replayed, trimmed, dropped) is named beside them. docs/operations.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from python_backend.metrics.histogram import Histogram
from python_backend.metrics.latency import Latencies
from python_backend.scheduler.statistics import Counts, Statistics

WAITING_REASONS = ("slots", "pages", "rows")
NO_LABEL = ""


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Snapshot:
    """Everything that metrics are read from, of one moment. `num_rejected` by error code."""

    statistics: Statistics
    num_rejected: Mapping[str, int]
    engram_rows_per_token: int


# By value of the family's label; NO_LABEL alone for a family without one.
Values = Mapping[str, float | Histogram]


@dataclass(frozen=True)
class Family:
    name: str
    kind: Kind
    description: str
    read: Callable[[Snapshot], Values]
    label: str = NO_LABEL


def _counter(name: str, description: str, read: Callable[[Statistics], float]) -> Family:
    return Family(name, Kind.COUNTER, description, lambda s: {NO_LABEL: read(s.statistics)})


def _gauge(name: str, description: str, read: Callable[[Statistics], float]) -> Family:
    return Family(name, Kind.GAUGE, description, lambda s: {NO_LABEL: read(s.statistics)})


def _histogram(name: str, description: str, read: Callable[[Latencies], Histogram]) -> Family:
    return Family(
        name,
        Kind.HISTOGRAM,
        description,
        lambda s: {NO_LABEL: read(s.statistics.latencies)},
    )


def _by_pool(
    name: str, description: str, read: Callable[[Statistics], tuple[float, float]]
) -> Family:
    return Family(
        name,
        Kind.GAUGE,
        description,
        lambda s: dict(zip(("global", "window"), read(s.statistics), strict=True)),
        "pool",
    )


def _by_position(name: str, description: str, read: Callable[[Statistics], Counts]) -> Family:
    return Family(
        name,
        Kind.COUNTER,
        description,
        lambda s: {str(i): count for i, count in enumerate(read(s.statistics).tolist())},
        "position",
    )


def _waiting(snapshot: Snapshot) -> Values:
    statistics = snapshot.statistics
    queued = statistics.num_waiting - statistics.num_compiling
    reasons = {
        reason: queued if reason == statistics.waiting_for else 0 for reason in WAITING_REASONS
    }
    return reasons | {"grammar": statistics.num_compiling}


def _finished(snapshot: Snapshot) -> Values:
    return {reason.value: n for reason, n in snapshot.statistics.num_finished.items()}


REQUESTS = (
    _gauge(
        "dsv41_num_requests_running",
        "Requests in the model's steps",
        lambda s: s.num_running,
    ),
    _gauge(
        "dsv41_num_requests_prefilling",
        "Of the running requests, those whose prompt is not yet run",
        lambda s: s.num_prefilling,
    ),
    _gauge(
        "dsv41_num_requests_waiting",
        "Requests in the queue, preempted ones included",
        lambda s: s.num_waiting,
    ),
    Family(
        "dsv41_num_requests_waiting_by_reason",
        Kind.GAUGE,
        "Requests in the queue by what the first of them needs",
        _waiting,
        "reason",
    ),
    Family(
        "dsv41_request_success_total",
        Kind.COUNTER,
        "Requests that ended, by finish reason",
        _finished,
        "finished_reason",
    ),
    Family(
        "dsv41_admission_rejections_total",
        Kind.COUNTER,
        "Requests refused before they were queued, by error code",
        lambda s: s.num_rejected,
        "code",
    ),
    _counter(
        "dsv41_num_preemptions_total",
        "Requests put back into the queue for want of pages",
        lambda s: s.num_preemptions,
    ),
)
LATENCIES = (
    _histogram(
        "dsv41_time_to_first_token_seconds",
        "From the arrival of a request to its first token",
        lambda latencies: latencies.time_to_first_token,
    ),
    _histogram(
        "dsv41_inter_token_latency_seconds",
        "Between a request's steps that made tokens",
        lambda latencies: latencies.inter_token,
    ),
    _histogram(
        "dsv41_request_time_per_output_token_seconds",
        "Of a request's tokens behind the first, mean time of one",
        lambda latencies: latencies.time_per_output_token,
    ),
    _histogram(
        "dsv41_request_queue_time_seconds",
        "From the arrival of a request to its first admission",
        lambda latencies: latencies.queue,
    ),
    _histogram(
        "dsv41_request_prefill_time_seconds",
        "From the first admission of a request to its first token",
        lambda latencies: latencies.prefill,
    ),
    _histogram(
        "dsv41_request_decode_time_seconds",
        "From the first to the last token of a request",
        lambda latencies: latencies.decode,
    ),
    _histogram(
        "dsv41_request_inference_time_seconds",
        "From the first admission of a request to its last token",
        lambda latencies: latencies.inference,
    ),
    _histogram(
        "dsv41_e2e_request_latency_seconds",
        "From the arrival of a request to its last token",
        lambda latencies: latencies.end_to_end,
    ),
    _histogram(
        "dsv41_request_prompt_tokens",
        "Prompt tokens of a request",
        lambda latencies: latencies.prompt_tokens,
    ),
    _histogram(
        "dsv41_request_generation_tokens",
        "Tokens of a request's answer",
        lambda latencies: latencies.output_tokens,
    ),
    _histogram(
        "dsv41_step_rows",
        "Rows of a step: decode rows, drafts, prompt rows and replayed rows",
        lambda latencies: latencies.step_rows,
    ),
    Family(
        "dsv41_step_seconds",
        Kind.HISTOGRAM,
        "Time of a step by phase; forward, sample and draft are in execute, engram is in forward",
        lambda s: dict(s.statistics.latencies.phases),
        "phase",
    ),
)
TOKENS = (
    _counter(
        "dsv41_prompt_tokens_total", "Prompt tokens of all requests", lambda s: s.num_prompt_tokens
    ),
    _counter(
        "dsv41_prompt_tokens_cached_total",
        "Prompt tokens that were adopted from the prefix cache",
        lambda s: s.num_cached_tokens,
    ),
    _counter("dsv41_generation_tokens_total", "Tokens of answers", lambda s: s.num_output_tokens),
    _counter(
        "dsv41_prefix_cache_queries_total",
        "Prompt tokens that were looked for in the prefix cache",
        lambda s: s.num_prefix_queries,
    ),
    _counter(
        "dsv41_prefix_cache_hits_total",
        "Of them, tokens that were found and adopted",
        lambda s: s.num_cached_tokens,
    ),
    _counter(
        "dsv41_dropped_short_hits_total",
        "Prefix hits dropped because replay would run all of them again",
        lambda s: s.num_dropped_short_hits,
    ),
    _counter(
        "dsv41_replayed_rows_total",
        "Rows run again after prefix hits, for their windows",
        lambda s: s.num_replayed_rows,
    ),
    _counter(
        "dsv41_trimmed_rows_total",
        "Prompt rows that did not run through the decoder",
        lambda s: s.num_trimmed_rows,
    ),
    _counter("dsv41_rows_total", "Rows of all steps", lambda s: s.num_rows),
    _counter("dsv41_steps_total", "Steps of the model", lambda s: s.num_steps),
    _counter(
        "dsv41_failed_steps_total", "Steps that ended with an error", lambda s: s.num_failed_steps
    ),
    Family(
        "dsv41_engram_rows_total",
        Kind.COUNTER,
        "Engram table rows that steps looked up",
        lambda s: {NO_LABEL: s.statistics.num_rows * s.engram_rows_per_token},
    ),
)
CACHE = (
    _by_pool(
        "dsv41_kv_cache_usage_perc",
        "Share of a pool's pages that requests hold, 0 to 1",
        lambda s: (
            s.num_global_pages_used / s.num_global_pages,
            s.num_window_pages_used / s.num_window_pages,
        ),
    ),
    _by_pool(
        "dsv41_kv_pages_used",
        "Pages that requests hold",
        lambda s: (s.num_global_pages_used, s.num_window_pages_used),
    ),
    _by_pool(
        "dsv41_kv_pages",
        "Pages of a pool",
        lambda s: (s.num_global_pages, s.num_window_pages),
    ),
    _gauge(
        "dsv41_prefix_cache_pages",
        "Global pages that the prefix cache knows, held or not",
        lambda s: s.num_published_pages,
    ),
)
# Drafts are verifications in vLLM's names, and positions count from 0.
DRAFTS = (
    _counter(
        "dsv41_spec_decode_num_drafts_total",
        "Verifications: requests times steps that had drafts",
        lambda s: s.num_verifications,
    ),
    _counter(
        "dsv41_spec_decode_num_draft_tokens_total",
        "Drafts that were verified",
        lambda s: int(s.num_drafted.sum()),
    ),
    _counter(
        "dsv41_spec_decode_num_accepted_tokens_total",
        "Drafts that were accepted",
        lambda s: int(s.num_accepted.sum()),
    ),
    _by_position(
        "dsv41_spec_decode_num_draft_tokens_per_pos_total",
        "Drafts that were verified, by position",
        lambda s: s.num_drafted,
    ),
    _by_position(
        "dsv41_spec_decode_num_accepted_tokens_per_pos_total",
        "Drafts that were accepted, by position",
        lambda s: s.num_accepted,
    ),
)


def catalogue(*, speculative: bool) -> Sequence[Family]:
    """The families that a server shows; those of drafts only where it drafts."""
    return [*REQUESTS, *LATENCIES, *TOKENS, *CACHE, *(DRAFTS if speculative else ())]
