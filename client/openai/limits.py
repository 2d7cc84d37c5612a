"""How often and how much: calls a minute by caller, generations at once, bytes of a body."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from client.openai.errors import RETRY_SECONDS, ApiError

BODY_SECONDS = 60.0
_MOST_CALLERS = 10_000


@dataclass
class _Bucket:
    tokens: float
    filled_at: float


class RateLimit:
    """A token bucket per caller: `per_minute` calls at once, refilled evenly. None: no limit."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, caller: str) -> None:
        """Raises ApiError 429 with the time after which a call is allowed."""
        if self._per_minute is None:
            return
        now, size = self._clock(), float(self._per_minute)
        rate = size / 60.0
        if caller not in self._buckets and len(self._buckets) >= _MOST_CALLERS:
            self._forget(now, rate, size)
        bucket = self._buckets.setdefault(caller, _Bucket(size, now))
        bucket.tokens = min(size, bucket.tokens + (now - bucket.filled_at) * rate)
        bucket.filled_at = now
        if bucket.tokens < 1.0:
            raise ApiError(
                429,
                f"expected at most {self._per_minute} requests a minute, got more; wait",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_seconds=(1.0 - bucket.tokens) / rate,
            )
        bucket.tokens -= 1.0

    def _forget(self, now: float, rate: float, size: float) -> None:
        """Callers whose buckets are full again; where all are busy, all start anew, which bounds
        the memory and lets a caller by once too often."""
        self._buckets = {
            caller: bucket
            for caller, bucket in self._buckets.items()
            if bucket.tokens + (now - bucket.filled_at) * rate < size
        }
        if len(self._buckets) >= _MOST_CALLERS:
            self._buckets.clear()


class InFlight:
    """Generations at once. `watch` is told the number whenever it changes."""

    def __init__(self, most: int, watch: Callable[[float], object]) -> None:
        self._most = most
        self._watch = watch
        self._count = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Raises ApiError 503 when there is no room."""
        if self._count >= self._most:
            raise ApiError(
                503,
                f"expected at most {self._most} generations at once, got more; try again",
                kind="unavailable_error",
                code="overloaded",
                retry_seconds=RETRY_SECONDS,
            )
        self._count += 1
        self._watch(self._count)
        try:
            yield
        finally:
            self._count -= 1
            self._watch(self._count)


async def read_body(parts: AsyncIterator[bytes], length: str | None, most: int) -> bytes:
    """The whole body. Raises ApiError: 413 for one that is, or says it is, longer than `most`
    bytes, and 408 for one that takes longer than a minute."""
    if length is not None and length.isdecimal() and int(length) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in parts:
                body += part
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise ApiError(408, f"expected a body within {BODY_SECONDS:.0f} seconds") from None
    return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"expected a body of at most {most} bytes, got more; shorten it", code="body_too_large"
    )
