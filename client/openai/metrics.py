"""The proxy's own metrics. Prompts, answers and keys are in none of them."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.openai.tokens import Counts

# The edges of vLLM's histograms of the same meaning.
_FIRST_TOKEN_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_REQUEST_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "dsv41_proxy_requests",
            "Requests by path and status; 499: the client left",
            ("path", "status"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "dsv41_proxy_requests_in_flight", "Generations that run or wait", registry=registry
        )
        self.seconds = Histogram(
            "dsv41_proxy_request_seconds",
            "From a request's head to its answer's end, by path",
            ("path",),
            buckets=_REQUEST_EDGES,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "dsv41_proxy_time_to_first_token_seconds",
            "From a generation's body to its first token; streamed answers only",
            buckets=_FIRST_TOKEN_EDGES,
            registry=registry,
        )
        self._tokens = Counter(
            "dsv41_proxy_tokens",
            "Tokens of prompts, of them cached, and of answers that ended",
            ("kind",),
            registry=registry,
        )
        for kind in ("prompt", "cached", "output"):
            self._tokens.labels(kind)

    def count(self, counts: Counts) -> None:
        self._tokens.labels("prompt").inc(counts.prompt)
        self._tokens.labels("cached").inc(counts.cached)
        self._tokens.labels("output").inc(counts.output)


class Measured:
    """Counts and times every request that `app` answers; unknown paths count as one."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            route = scope.get("route")
            path = "other" if route is None else str(getattr(route, "path", "other"))
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(time.perf_counter() - began)
