"""From deltas to responses: one thread that turns tokens to text, sends, and watches for clients
that went away.

The core's thread only queues deltas, so neither detokenising nor sending delays a step. What waits
here is bounded: a delta is a response, but where steps are faster than sending, all that waits for
one sequence becomes one. A slow reader stalls nobody: the server buffers what it has not read yet.
A request that is late, or whose client left, ends here at once, whatever step runs; the core frees
its pages when that step has ended, and what it still sends is dropped.
All sending and watching of a request happens on this one thread, which is why a sender is never
asked about cancellation after its final response: the server's objects behind it are gone then, and
asking crashes the server.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from python_backend.logs import fields
from python_backend.request import Delta, FinishReason, RequestError
from python_backend.sequence import AnswerSequence, Outputs

logger = logging.getLogger(__name__)

# Every request is asked for cancellation, and `tick` called, this often. Asking costs about 40 µs.
ROUND_SECONDS = 0.1
_CHECKS_BETWEEN_SENDS = 4
# Deltas of a stream that may wait to be sent one by one; more than that are joined. Sending one
# costs about 0.1 ms, joining one about a tenth of that.
MOST_WAITING = 16


class Reply(Protocol):
    """The way back to one client. The last call is a `send` that is final, or `fail`."""

    def send(self, outputs: Outputs, *, final: bool) -> None: ...

    def fail(self, error: RequestError) -> None: ...

    def is_cancelled(self) -> bool: ...


@dataclass(eq=False)
class ResponseStream:
    """One request's way back: its sequences in turn, one of them unless several were asked for.

    `begin_others` gives the others to the core when the first has its first token, because then
    the prompt stands in the prefix cache. It raises RequestError. `session_id` is logged, for
    routers that send a session's requests to one server.
    """

    request_id: str
    reply: Reply
    sequences: Sequence[AnswerSequence]
    begin_others: Callable[[], None] | None = None
    session_id: str = ""
    seconds: float | None = None  # that it may take
    opened_at: float = field(default_factory=time.monotonic)
    closed: bool = False
    # With the number of their sequence; the core's thread appends, the responder's takes.
    waiting: deque[tuple[int, Delta]] = field(default_factory=deque)

    @property
    def key(self) -> str:
        return self.sequences[0].key

    @property
    def is_late(self) -> bool:
        return self.seconds is not None and time.monotonic() - self.opened_at >= self.seconds

    def late(self) -> RequestError:
        """What such a request is told."""
        return RequestError(
            "deadline_exceeded",
            f"expected an answer within the timeout of {self.seconds} s, which has passed; allow "
            "more time, or ask for less",
        )


class Responder:
    """`cancel` takes a sequence's key and why it ended, for every end; `tick` is called once a
    round, on this thread."""

    def __init__(
        self, cancel: Callable[[str, FinishReason], None], tick: Callable[[], None]
    ) -> None:
        self._cancel = cancel
        self._tick = tick
        # A stream once to open it, and once for each delta that waits in it. None ends the thread.
        self._queue: queue.SimpleQueue[ResponseStream | None] = queue.SimpleQueue()
        self._open: dict[str, ResponseStream] = {}
        self._unasked: list[ResponseStream] = []
        self._next_round = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="responder")

    def start(self) -> None:
        self._thread.start()

    def open(self, stream: ResponseStream) -> None:
        """Watch a stream. Before its first delta; from any thread."""
        self._queue.put(stream)

    def deliver(self, stream: ResponseStream, index: int, delta: Delta) -> None:
        """Queue a delta of one of the stream's sequences; never blocks."""
        stream.waiting.append((index, delta))
        self._queue.put(stream)

    def forget(self, stream: ResponseStream, error: RequestError) -> None:
        """End a stream that the core never took."""
        no_tokens = np.empty(0, np.int32)
        self.deliver(stream, 0, Delta(no_tokens, 0, FinishReason.ERROR, error))

    @property
    def num_open(self) -> int:
        """Streams that still wait for their final response."""
        return len(self._open)

    def end_all(self, error: RequestError) -> None:
        """Give every open stream this as its final response. From `tick` only."""
        for stream in list(self._open.values()):
            self._end(stream, FinishReason.ERROR, error)

    def close(self) -> None:
        """Return when every open stream has had its final response."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not (self._closing and not self._open and self._queue.empty()):
            try:
                self._turn()
            except Exception:  # this thread must live: every client waits for it
                logger.exception("responder_failed")

    def _turn(self) -> None:
        self._watch()
        wait = 0.0 if self._unasked else max(0.0, self._next_round - time.monotonic())
        try:
            stream = self._queue.get(timeout=wait) if wait else self._queue.get_nowait()
        except queue.Empty:
            return
        if stream is None:
            self._closing = True
            return
        if not stream.closed:
            self._open[stream.key] = stream
        if len(stream.waiting) > MOST_WAITING:
            self._answer_joined(stream)
        elif stream.waiting:
            self._answer(stream, *stream.waiting.popleft())

    def _watch(self) -> None:
        """A few checks between two sends: all of them at once would hold tokens back."""
        if not self._unasked and time.monotonic() >= self._next_round:
            self._next_round = time.monotonic() + ROUND_SECONDS
            self._unasked = list(self._open.values())
            self._tick()
        for _ in range(min(_CHECKS_BETWEEN_SENDS, len(self._unasked))):
            stream = self._unasked.pop()
            if stream.closed:
                continue
            if stream.reply.is_cancelled():
                cancelled = RequestError("cancelled", "the client cancelled the request")
                self._end(stream, FinishReason.CANCELLED, cancelled)
            elif stream.is_late:
                self._end(stream, FinishReason.TIMEOUT, stream.late())

    def _answer_joined(self, stream: ResponseStream) -> None:
        """All that waits, one response for each sequence; errors come behind what was made."""
        taken = [stream.waiting.popleft() for _ in range(len(stream.waiting))]
        errors = [place for place, (_, delta) in enumerate(taken) if delta.error is not None]
        made = taken[: errors[0]] if errors else taken
        last = {index: place for place, (index, _) in enumerate(made)}
        for place, (index, delta) in enumerate(taken):
            self._answer(stream, index, delta, more=place < last.get(index, 0))

    def _answer(
        self, stream: ResponseStream, index: int, delta: Delta, *, more: bool = False
    ) -> None:
        """`more`: the next delta of this sequence is at hand and shall be sent with this one."""
        if stream.closed:
            return
        try:
            if delta.error is not None:
                self._end(stream, FinishReason.ERROR, delta.error)
            else:
                self._send(stream, stream.sequences[index], delta, more=more)
        except RequestError as error:
            self._end(stream, FinishReason.ERROR, error)
        except Exception as problem:
            logger.exception("response_failed", extra=fields(request_id=stream.request_id))
            failed = RequestError("internal", f"expected to send the answer, but {problem}")
            with contextlib.suppress(Exception):  # it may be the line that is broken
                self._end(stream, FinishReason.ERROR, failed)

    def _send(
        self, stream: ResponseStream, sequence: AnswerSequence, delta: Delta, *, more: bool
    ) -> None:
        """A stop string ends the sequence here. The core, which knows no text, is told of every
        end, so that it counts what the client saw, also where the string came with the last token
        or a later step has failed meanwhile."""
        if sequence.ended:
            return
        delta, outputs = sequence.take(delta, more=more)
        final = all(each.ended for each in stream.sequences)
        if final:
            self._close(stream, delta.finish_reason)
        if delta.finish_reason is not None:
            self._cancel(sequence.key, delta.finish_reason)
        if stream.begin_others is not None and len(delta.output_ids):
            begin, stream.begin_others = stream.begin_others, None
            begin()
        if outputs is not None:
            stream.reply.send(outputs, final=final)

    def _end(self, stream: ResponseStream, reason: FinishReason, error: RequestError) -> None:
        """All sequences, with an error that is the final response. What the core does not know, or
        no more, it ignores."""
        if not stream.closed:
            self._close(stream, reason, error)
        for sequence in stream.sequences:
            self._cancel(sequence.key, reason)
        stream.reply.fail(error)

    def _close(
        self,
        stream: ResponseStream,
        reason: FinishReason | None,
        error: RequestError | None = None,
    ) -> None:
        """Before the final response, so that the watcher can never ask after it."""
        stream.closed = True
        stream.begin_others = None  # they lead back to the stream
        del self._open[stream.key]
        now = time.monotonic()
        sequences = stream.sequences
        begun = [each.first_token_at for each in sequences if each.first_token_at is not None]
        logger.info(
            "request_finished",
            extra=fields(
                request_id=stream.request_id,
                key=stream.key,
                session_id=stream.session_id or None,
                finish_reason=reason,
                error=str(error) if reason == FinishReason.ERROR else None,
                num_sequences=len(sequences),
                num_input_tokens=sequences[0].num_input_tokens,
                cached_tokens=sequences[0].cached_tokens,
                num_output_tokens=sum(each.num_output_tokens for each in sequences),
                first_token_seconds=round(min(begun) - stream.opened_at, 4) if begun else None,
                seconds=round(now - stream.opened_at, 4),
            ),
        )
