"""From perf_analyzer's profile export to latencies and rates. Times are its time stamps, in ns.

perf_analyzer counts responses, and its own throughput divides by a window rounded up to seconds, so
neither is used here. Tokens are counted from the responses' `output_ids`. Three traps of its
version 2.51, all met in practice:

- the response that only carries the server's final flag is exported like any other;
- an output that a response does not carry is exported with whatever the memory held;
- an empty output tensor is exported as one element.

So a response is trusted up to the one that names a finish reason, which by the protocol carries
`num_output_tokens`; the tokens of that last response are what the others leave of this number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from client.protocol import PROTOCOL_ERROR, DeploymentError, FinishReason

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, eq=False)
class Trace:
    """One request as the load generator saw it.

    sent_ns: when it was sent. received_ns: int64 [n], when each response with tokens arrived.
    tokens: int64 [n], tokens in each of them, at least 1. num_input_tokens and cached_tokens as the
    server counted them.
    """

    sent_ns: int
    received_ns: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    num_input_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Level:
    """One concurrency, measured. Milliseconds, tokens and requests per second.

    ttft_ms, itl_ms: {"p50", "p90", "p99"}; itl_ms is empty when no request made a second token.
    interactivity: output tokens per second of one user, median over the requests; None likewise.
    input_tokens, cached_tokens: mean of a request.
    """

    concurrency: int
    requests: int
    seconds: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    request_ms: dict[str, float]
    output_tokens_per_second: float
    requests_per_second: float
    interactivity: float | None
    input_tokens: float
    cached_tokens: float


def read_profile(path: Path) -> list[Trace]:
    """The requests of a profile export with one experiment.

    Raises DeploymentError when the file is none, or a stream in it does not speak the protocol.
    """
    try:
        requests = json.loads(path.read_text())["experiments"][0]["requests"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DeploymentError(
            PROTOCOL_ERROR, f"expected a profile export of perf_analyzer in {path.name}: {error!r}"
        ) from None
    return [_trace(request) for request in requests]


def summarise(traces: Sequence[Trace], concurrency: int) -> Level:
    """Latencies and rates of one closed-loop run. Definitions: docs/client.md."""
    if not traces:
        raise DeploymentError(PROTOCOL_ERROR, "expected measured requests, got none")
    first = np.array([t.received_ns[0] - t.sent_ns for t in traces])
    whole = np.array([t.received_ns[-1] - t.sent_ns for t in traces])
    gaps = np.concatenate([_gaps(t) for t in traces])
    speeds = [
        t.tokens[1:].sum() / (t.received_ns[-1] - t.received_ns[0]) * 1e9
        for t in traces
        if t.tokens.size > 1
    ]
    began = min(t.sent_ns for t in traces)
    seconds = (max(int(t.received_ns[-1]) for t in traces) - began) / 1e9
    return Level(
        concurrency=concurrency,
        requests=len(traces),
        seconds=seconds,
        ttft_ms=_percentiles(first),
        itl_ms=_percentiles(gaps),
        request_ms=_percentiles(whole),
        output_tokens_per_second=sum(int(t.tokens.sum()) for t in traces) / seconds,
        requests_per_second=len(traces) / seconds,
        interactivity=float(np.median(speeds)) if speeds else None,
        input_tokens=float(np.mean([t.num_input_tokens for t in traces])),
        cached_tokens=float(np.mean([t.cached_tokens for t in traces])),
    )


def _trace(request: dict[str, Any]) -> Trace:
    outputs, stamps = request["response_outputs"], request["response_timestamps"]
    reasons = tuple(FinishReason)
    last = next((i for i, o in enumerate(outputs) if o.get("finish_reason") in reasons), None)
    if last is None:
        raise DeploymentError(
            PROTOCOL_ERROR,
            "expected a finish_reason in each measured stream, got a stream without one: the "
            "request failed, or the server is of another version",
        )
    tokens = np.array([np.size(o["output_ids"]) for o in outputs[: last + 1]], dtype=np.int64)
    total = int(outputs[last]["num_output_tokens"])
    tokens[last] = total - tokens[:last].sum()
    if tokens[last] < 0 or total < 1:
        raise DeploymentError(
            PROTOCOL_ERROR,
            f"expected {total} output tokens as num_output_tokens says, got "
            f"{tokens[:last].sum()} before the last response of a stream",
        )
    received = np.array(stamps[: last + 1], dtype=np.int64)
    return Trace(
        sent_ns=int(request["timestamp"]),
        received_ns=received[tokens > 0],
        tokens=tokens[tokens > 0],
        num_input_tokens=int(outputs[last]["num_input_tokens"]),
        cached_tokens=int(outputs[0]["cached_tokens"]),
    )


def _gaps(trace: Trace) -> npt.NDArray[np.float64]:
    """ns from one token to the next: the wait for a response, shared by the tokens in it."""
    later = trace.tokens[1:]
    return np.repeat(np.diff(trace.received_ns) / later, later)


def _percentiles(nanoseconds: npt.NDArray[Any]) -> dict[str, float]:
    if nanoseconds.size == 0:
        return {}
    values = np.percentile(nanoseconds, _PERCENTILES) / 1e6
    return {f"p{p}": float(v) for p, v in zip(_PERCENTILES, values, strict=True)}
