"""Shows the catalogue in the Triton server's /metrics, from one thread of its own.

The server's metrics are touched by this thread alone, because two threads inside a metric crash
the server. One call is a round trip to the server's process (10 µs), so only what changed is sent.
A histogram's observations are sent one by one, as the server wants them, each with the mean of
what came since in its bucket: numbers by bucket and the sum are exact. What one round cannot send
is sent in the next ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from python_backend.metrics.catalogue import NO_LABEL, Family, Kind, Snapshot
from python_backend.metrics.histogram import Histogram

logger = logging.getLogger(__name__)

ROUND_SECONDS = 0.1
OBSERVATIONS_PER_ROUND = 2_000  # 20 ms of 100


class Publisher:
    """`metric_family` is the server's own class of that name."""

    def __init__(
        self,
        metric_family: Any,
        families: Sequence[Family],
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._families = [(family, _made(metric_family, family)) for family in families]
        self._snapshot = snapshot
        self._metrics: dict[tuple[str, str], Any] = {}
        self._sent: dict[tuple[str, str], float | Histogram] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Show every metric, and from now on its changes, until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Show the last changes and end."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        stopping = False
        while True:
            try:
                self._publish()
            except Exception:  # metrics must not end the service, nor themselves
                logger.exception("metrics_failed")
            if stopping:
                return
            stopping = self._stopping.wait(ROUND_SECONDS)

    def _publish(self) -> None:
        snapshot = self._snapshot()
        left = OBSERVATIONS_PER_ROUND
        for family, made in self._families:
            for value, current in family.read(snapshot).items():
                key = family.name, value
                if isinstance(current, Histogram):
                    left -= self._observe(key, family, made, current, left)
                    continue
                metric, sent = self._metric(key, family, made), self._sent.get(key, 0)
                assert not isinstance(sent, Histogram)
                if current != sent:
                    if family.kind is Kind.COUNTER:
                        metric.increment(current - sent)
                    else:
                        metric.set(current)
                    self._sent[key] = current

    def _observe(
        self, key: tuple[str, str], family: Family, made: Any, current: Histogram, most: int
    ) -> int:
        """Send at most `most` observations; returns how many were sent."""
        metric = self._metric(key, family, made, buckets=list(current.edges))
        sent = self._sent.setdefault(key, Histogram(current.edges))
        assert isinstance(sent, Histogram)
        left = most
        for bucket, number in enumerate(current.numbers):
            count = min(number - sent.numbers[bucket], left)
            if count <= 0:
                continue
            mean = (current.sums[bucket] - sent.sums[bucket]) / (number - sent.numbers[bucket])
            mean = current.within(bucket, mean)
            for _ in range(count):
                metric.observe(mean)
            sent.numbers[bucket] += count
            sent.sums[bucket] += count * mean
            left -= count
        return most - left

    def _metric(self, key: tuple[str, str], family: Family, made: Any, **more: Any) -> Any:
        if key not in self._metrics:
            labels = {} if family.label == NO_LABEL else {family.label: key[1]}
            self._metrics[key] = made.Metric(labels=labels, **more)
        return self._metrics[key]


def _made(metric_family: Any, family: Family) -> Any:
    kind = getattr(metric_family, family.kind.name)
    return metric_family(name=family.name, description=family.description, kind=kind)
