"""From deltas to responses: one thread that turns tokens to text, sends, and watches for clients
that went away.

The core's thread only queues deltas, so neither detokenising nor sending delays a step. A slow
reader stalls nobody: the server buffers what it has not read yet. All sending and watching of a
request happens on this one thread, which is why a sender is never asked about cancellation after
its final response: the server's objects behind it are gone then, and asking crashes the server.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from python_backend.generation.answer import AnswerText
from python_backend.generation.options import Shown
from python_backend.logs import fields
from python_backend.request import Delta, FinishReason, LogProbs, RequestError

logger = logging.getLogger(__name__)

Outputs = dict[str, npt.NDArray[Any]]

# Every request is asked for cancellation, and `tick` called, this often. Asking costs about 40 µs.
ROUND_SECONDS = 0.1
_CHECKS_BETWEEN_SENDS = 4


class Reply(Protocol):
    """The way back to one client. The last call is a `send` that is final, or `fail`."""

    def send(self, outputs: Outputs, *, final: bool) -> None: ...

    def fail(self, error: RequestError) -> None: ...

    def is_cancelled(self) -> bool: ...


@dataclass(eq=False)
class ResponseStream:
    """One request's way back. `key` names it in the core, `request_id` is the client's name.

    Without `streamed` the whole answer is one response. A stop string ends the answer here: the
    core, which knows no text, is then told to cancel.
    """

    key: str
    request_id: str
    reply: Reply
    num_input_tokens: int
    streamed: bool
    text: AnswerText | None
    shown: Shown = field(default_factory=Shown)
    prompt_text: str = ""  # shown before the answer
    bytes_of: Callable[[npt.NDArray[np.int32]], list[bytes]] | None = None  # None: not asked for
    opened_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    num_output_tokens: int = 0
    num_sent: int = 0
    cancelling: bool = False
    closed: bool = False
    stop: str | None = None
    cumulative: float = 0.0
    _text: list[str] = field(default_factory=list)
    _deltas: list[Delta] = field(default_factory=list)

    def take(self, delta: Delta) -> tuple[Delta, Outputs | None]:
        """The delta that is sent, its end if a stop string ends it, and the response that it makes
        due, None when it is kept for the only one."""
        if len(delta.output_ids) and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        if self.text is not None:
            ended = delta.finish_reason is not None
            by_token = delta.finish_reason == FinishReason.STOP
            said = self.text.feed(delta.output_ids, last=ended, ends_with_end_id=by_token)
            self._text.append(said.text)
            if said.stop is not None:
                self.stop = said.stop
                delta = _cut(delta, said.num_ids)
        self.num_output_tokens += len(delta.output_ids)
        if delta.logprobs is not None:
            self.cumulative += float(delta.logprobs.chosen.sum(dtype=np.float64))
        self._deltas.append(delta)
        if not (self.streamed or delta.finish_reason is not None):
            return delta, None
        outputs = self._outputs(delta)
        self._text.clear()
        self._deltas.clear()
        self.num_sent += 1
        return delta, outputs

    def _outputs(self, delta: Delta) -> Outputs:
        """One response of what came since the last, `delta` being its end."""
        text = "".join(self._text)
        if self.num_sent == 0 and self.shown.prompt:
            text = self.prompt_text + text
        outputs = {
            "text_output": _text(text),
            "output_ids": np.concatenate([d.output_ids for d in self._deltas])[None],
        }
        if self.num_sent == 0:
            outputs["cached_tokens"] = _number(delta.cached_tokens)
        if self.shown.log_probs:
            outputs |= _log_probs([d.logprobs for d in self._deltas if d.logprobs is not None])
        for ids, spelled in (
            ("output_ids", "output_token_bytes"),
            ("top_log_prob_ids", "top_token_bytes"),
        ):
            if self.bytes_of is not None and ids in outputs:
                outputs[spelled] = _hex(self.bytes_of(outputs[ids][0]))
        if delta.finish_reason is not None:
            outputs |= self._last_outputs(delta.finish_reason)
        return outputs

    def _last_outputs(self, reason: FinishReason) -> Outputs:
        shown = self.shown
        outputs: Outputs = {}
        if shown.finish_reason:
            outputs["finish_reason"] = _text(reason)
        if shown.stop_reason:
            outputs["stop_reason"] = _text(self.stop or "")
        if shown.num_input_tokens:
            outputs["num_input_tokens"] = _number(self.num_input_tokens)
        if shown.num_output_tokens:
            outputs["num_output_tokens"] = _number(self.num_output_tokens)
        if shown.log_probs:
            outputs["cum_log_probs"] = np.array([[self.cumulative]], dtype=np.float32)
        if shown.cumulative_logprob:
            outputs["cumulative_logprob"] = np.array([[self.cumulative]], dtype=np.float32)
        return outputs


class Responder:
    """`cancel` takes a stream's key and why; `tick` is called once a round, on this thread."""

    def __init__(
        self, cancel: Callable[[str, FinishReason], None], tick: Callable[[], None]
    ) -> None:
        self._cancel = cancel
        self._tick = tick
        # (stream, None) opens a stream, (stream, delta) is for its client, None ends the thread.
        self._queue: queue.SimpleQueue[tuple[ResponseStream, Delta | None] | None] = (
            queue.SimpleQueue()
        )
        self._open: dict[str, ResponseStream] = {}
        self._unasked: list[ResponseStream] = []
        self._next_round = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="responder")

    def start(self) -> None:
        self._thread.start()

    def open(self, stream: ResponseStream) -> None:
        """Watch a stream. Before its first delta; from any thread."""
        self._queue.put((stream, None))

    def deliver(self, stream: ResponseStream, delta: Delta) -> None:
        """Queue a delta; never blocks."""
        self._queue.put((stream, delta))

    def forget(self, stream: ResponseStream, error: RequestError) -> None:
        """End a stream that the core never took."""
        no_tokens = np.empty(0, np.int32)
        self._queue.put((stream, Delta(no_tokens, 0, FinishReason.ERROR, error)))

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
            message = self._queue.get(timeout=wait) if wait else self._queue.get_nowait()
        except queue.Empty:
            return
        if message is None:
            self._closing = True
        elif message[1] is None:
            self._open[message[0].key] = message[0]
        else:
            self._answer(message[0], message[1])

    def _watch(self) -> None:
        """A few checks between two sends: all of them at once would hold tokens back."""
        if not self._unasked and time.monotonic() >= self._next_round:
            self._next_round = time.monotonic() + ROUND_SECONDS
            self._unasked = list(self._open.values())
            self._tick()
        for _ in range(min(_CHECKS_BETWEEN_SENDS, len(self._unasked))):
            stream = self._unasked.pop()
            if not stream.closed and not stream.cancelling and stream.reply.is_cancelled():
                stream.cancelling = True
                self._cancel(stream.key, FinishReason.CANCELLED)

    def _answer(self, stream: ResponseStream, delta: Delta) -> None:
        if stream.closed:
            return
        final = delta.finish_reason is not None
        try:
            if delta.error is not None:
                self._close(stream, delta)
                stream.reply.fail(delta.error)
            elif delta.finish_reason == FinishReason.CANCELLED:
                self._close(stream, delta)
                stream.reply.fail(RequestError("cancelled", "the client cancelled the request"))
            else:
                ends_here = not final
                delta, outputs = stream.take(delta)
                final = delta.finish_reason is not None
                if final:
                    self._close(stream, delta)
                    if ends_here:
                        self._cancel(stream.key, FinishReason.STOP)
                if outputs is not None:
                    stream.reply.send(outputs, final=final)
        except Exception as problem:
            logger.exception("response_failed", extra=fields(request_id=stream.request_id))
            self._give_up(stream, delta, problem)

    def _give_up(self, stream: ResponseStream, delta: Delta, problem: Exception) -> None:
        """After a delta that was not sent. Behind the last one nothing else will end the stream."""
        if delta.finish_reason is None:
            stream.cancelling = True
            self._cancel(stream.key, FinishReason.CANCELLED)
            return
        if not stream.closed:
            self._close(stream, delta)
        with contextlib.suppress(Exception):  # it may be the line that is broken
            stream.reply.fail(
                RequestError("internal", f"expected to send the answer, but {problem}")
            )

    def _close(self, stream: ResponseStream, delta: Delta) -> None:
        """Before the final response, so that the watcher can never ask after it."""
        stream.closed = True
        del self._open[stream.key]
        now = time.monotonic()
        first = stream.first_token_at
        logger.info(
            "request_finished",
            extra=fields(
                request_id=stream.request_id,
                key=stream.key,
                finish_reason=delta.finish_reason,
                error=None if delta.error is None else str(delta.error),
                num_input_tokens=stream.num_input_tokens,
                cached_tokens=delta.cached_tokens,
                num_output_tokens=stream.num_output_tokens,
                first_token_seconds=None if first is None else round(first - stream.opened_at, 4),
                seconds=round(now - stream.opened_at, 4),
            ),
        )


def _cut(delta: Delta, count: int) -> Delta:
    """The delta as the last one, of `count` tokens."""
    return delta._replace(
        output_ids=delta.output_ids[:count],
        finish_reason=FinishReason.STOP,
        logprobs=None if delta.logprobs is None else delta.logprobs.first(count),
    )


def _log_probs(pieces: list[LogProbs]) -> Outputs:
    """Of the response's tokens; alternatives token by token."""
    if not pieces:
        return {}
    outputs = {"output_log_probs": np.concatenate([p.chosen for p in pieces])[None]}
    if pieces[0].top.shape[1]:
        outputs["top_log_prob_ids"] = np.concatenate([p.top_ids.ravel() for p in pieces])[None]
        outputs["top_log_probs"] = np.concatenate([p.top.ravel() for p in pieces])[None]
    return outputs


def _text(text: str) -> npt.NDArray[Any]:
    return np.array([[text.encode("utf-8")]], dtype=np.object_)


def _hex(pieces: list[bytes]) -> npt.NDArray[Any]:
    """Hexadecimal, because a piece of a character is no text and JSON holds nothing else."""
    return np.array([[piece.hex().encode("ascii") for piece in pieces]], dtype=np.object_)


def _number(number: int) -> npt.NDArray[Any]:
    return np.array([[number]], dtype=np.int32)
