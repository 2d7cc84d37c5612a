"""A running generation: chunks as they arrive, cancellation, and what has come so far."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

from client.protocol import (
    PROTOCOL_ERROR,
    DeploymentError,
    FinishReason,
    GenerateChunk,
    GenerateResult,
    join_chunks,
)

NO_REASON = (
    "expected a finish reason with the last response, but the stream ended without one: see the "
    "server's log"
)


class GenerateStream(Iterator[GenerateChunk]):
    """Iterates over the chunks of one request; leaving its `with` block cancels what still runs.

    The transport gives `chunks`, which ends where the server's stream ends and raises
    DeploymentError when it fails, and `cancel`, which stops the request on the server, may be
    called from any thread and more than once, and makes `chunks` end or fail soon.

    Errors raised while iterating carry the part received before them (`DeploymentError.partial`),
    of several answers that of the first.
    """

    def __init__(
        self, chunks: Iterator[GenerateChunk], cancel: Callable[[], None], num_answers: int = 1
    ) -> None:
        self._chunks = chunks
        self._num_answers = num_answers
        self._cancel = cancel
        self._received: list[GenerateChunk] = []
        self._ended = False
        self._cancelled = False
        self._failure: DeploymentError | None = None
        self._started = time.perf_counter()
        self._time_to_first_token: float | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerateChunk:
        if self._ended:
            raise StopIteration
        try:
            chunk = next(self._chunks)
        except StopIteration:
            self._ended = True
            if self._cancelled or self._finished():
                raise
            raise self._failed(DeploymentError(PROTOCOL_ERROR, NO_REASON)) from None
        except DeploymentError as error:
            self._ended = True
            if self._cancelled:
                raise StopIteration from None
            raise self._failed(error) from None
        except BaseException:  # an interrupt in mid-read: nobody will read on
            self.cancel()
            raise
        if self._time_to_first_token is None and chunk.output_ids.size:
            self._time_to_first_token = time.perf_counter() - self._started
        self._received.append(chunk)
        return chunk

    def cancel(self) -> None:
        """Stops the request on the server and ends the iteration. Harmless when it has ended."""
        if not self._ended and not self._finished():
            self._cancelled = True
            self._cancel()

    def close(self) -> None:
        """Cancels what still runs; a request that has finished is read to the stream's end."""
        self.cancel()
        if not self._cancelled:
            for _ in self:
                pass

    def result(self) -> GenerateResult:
        """Waits for the rest and returns the whole answer.

        Of a cancelled stream it is what came, with finish reason `cancelled`. Of a stream that
        failed it raises the error again. Raises ValueError for a request of several answers.
        """
        if self._num_answers > 1:
            raise ValueError(
                f"expected a request of one answer, got {self._num_answers}; use stream() and "
                "results()"
            )
        return self.results()[0]

    def results(self) -> list[GenerateResult]:
        """As `result`, for each of the answers that were asked for."""
        for _ in self:
            pass
        if self._failure is not None:
            raise self._failure
        answers = map(self._answer, range(self._num_answers))
        return [
            replace(answer, finish_reason=answer.finish_reason or FinishReason.CANCELLED)
            for answer in answers
        ]

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from sending the request to the first response with a token; None before it."""
        return self._time_to_first_token

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(DeploymentError):
            self.close()

    def _finished(self) -> bool:
        ended = sum(chunk.finish_reason is not None for chunk in self._received)
        return ended >= self._num_answers

    def _answer(self, index: int) -> GenerateResult:
        return join_chunks([c for c in self._received if (c.sequence_index or 0) == index])

    def _failed(self, error: DeploymentError) -> DeploymentError:
        error.partial = self._answer(0) if self._received else None
        self._failure = error
        return error
