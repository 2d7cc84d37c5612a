"""One sequence of a request: from its deltas to the tensors of its responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from python_backend.generation.answer import AnswerText
from python_backend.generation.options import Shown
from python_backend.request import Delta, FinishReason, LogProbs

Outputs = dict[str, npt.NDArray[Any]]


@dataclass(eq=False)
class AnswerSequence:
    """`key` names it in the core. Without `streamed` the whole answer is one response. With
    `prompt_only` it is no token long, the one that the core makes is dropped.

    `index` is its number among several, None for the only one.
    """

    key: str
    num_input_tokens: int
    streamed: bool
    text: AnswerText | None
    shown: Shown = field(default_factory=Shown)
    prompt_text: str = ""  # shown before the answer
    prompt_only: bool = False
    bytes_of: Callable[[npt.NDArray[np.int32]], list[bytes]] | None = None  # None: not asked for
    prompt_ids: npt.NDArray[np.int32] | None = None  # shown with their log probabilities
    index: int | None = None
    first_token_at: float | None = None
    cached_tokens: int = 0
    num_output_tokens: int = 0
    num_accepted_drafts: int = 0
    ended: bool = False
    _num_made: int = 0
    _stop: str | None = None
    _cumulative: float = 0.0
    _text: list[str] = field(default_factory=list)
    _deltas: list[Delta] = field(default_factory=list)

    def take(self, delta: Delta, *, more: bool = False) -> tuple[Delta, Outputs | None]:
        """The delta that is sent, its end if a stop string ends it, and the response that it makes
        due, None when it is kept for a later one: always where there is `more` to come with it."""
        self.cached_tokens = delta.cached_tokens
        if self.prompt_only and delta.finish_reason is not None:
            delta = _cut(delta, 0)._replace(finish_reason=FinishReason.LENGTH)
        if len(delta.output_ids) and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        if self.text is not None:
            last = delta.finish_reason is not None
            by_token = delta.finish_reason == FinishReason.STOP
            said = self.text.feed(delta.output_ids, last=last, ends_with_end_id=by_token)
            self._text.append(said.text)
            if said.stop is not None:
                self._stop = said.stop
                delta = _cut(delta, said.num_ids)
        self.num_output_tokens += len(delta.output_ids)
        self.num_accepted_drafts += min(delta.num_drafts, len(delta.output_ids))
        if delta.logprobs is not None:
            self._cumulative += float(delta.logprobs.chosen.sum(dtype=np.float64))
        self._deltas.append(delta)
        self.ended = delta.finish_reason is not None
        is_due = self.streamed and not more and any(len(d.output_ids) for d in self._deltas)
        if not self.ended and not is_due:
            return delta, None
        outputs = self._outputs(delta)
        self._text.clear()
        self._deltas.clear()
        self._num_made += 1
        return delta, outputs

    def _outputs(self, delta: Delta) -> Outputs:
        """One response of what came since the last, `delta` being its end."""
        text = "".join(self._text)
        if self._num_made == 0:
            text = self.prompt_text + text
        outputs = {
            "text_output": _text(text),
            "output_ids": np.concatenate([d.output_ids for d in self._deltas])[None],
        }
        if self.index is not None:
            outputs["sequence_index"] = _number(self.index)
        if self._num_made == 0:
            outputs["cached_tokens"] = _number(delta.cached_tokens)
            if self.prompt_ids is not None:
                outputs["prompt_ids"] = self.prompt_ids[None]
            pieces = [d.prompt_logprobs for d in self._deltas if d.prompt_logprobs is not None]
            outputs |= _log_probs(pieces, "prompt_log_probs", "top_prompt_log_prob")
        if self.shown.log_probs:
            pieces = [d.logprobs for d in self._deltas if d.logprobs is not None]
            outputs |= _log_probs(pieces, "output_log_probs", "top_log_prob")
        if self.bytes_of is not None:
            for ids, spelled in _SPELLED:
                if ids in outputs:
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
            outputs["stop_reason"] = _text(self._stop or "")
        if shown.num_input_tokens:
            outputs["num_input_tokens"] = _number(self.num_input_tokens)
        if shown.num_output_tokens:
            outputs["num_output_tokens"] = _number(self.num_output_tokens)
            outputs["num_accepted_drafts"] = _number(self.num_accepted_drafts)
        if shown.log_probs:
            outputs["cum_log_probs"] = np.array([[self._cumulative]], dtype=np.float32)
        if shown.cumulative_logprob:
            outputs["cumulative_logprob"] = np.array([[self._cumulative]], dtype=np.float32)
        return outputs


_SPELLED = (
    ("output_ids", "output_token_bytes"),
    ("top_log_prob_ids", "top_token_bytes"),
    ("prompt_ids", "prompt_token_bytes"),
    ("top_prompt_log_prob_ids", "top_prompt_token_bytes"),
)


def _cut(delta: Delta, count: int) -> Delta:
    """The delta as the last one, of `count` tokens."""
    return delta._replace(
        output_ids=delta.output_ids[:count],
        finish_reason=FinishReason.STOP,
        logprobs=None if delta.logprobs is None else delta.logprobs.first(count),
    )


def _log_probs(pieces: Sequence[LogProbs], chosen: str, top: str) -> Outputs:
    """The tokens' under the name `chosen`; alternatives, token by token, under names in `top`."""
    if not pieces:
        return {}
    outputs = {chosen: np.concatenate([p.chosen for p in pieces])[None]}
    if pieces[0].top.shape[1]:
        outputs[f"{top}_ids"] = np.concatenate([p.top_ids.ravel() for p in pieces])[None]
        outputs[f"{top}s"] = np.concatenate([p.top.ravel() for p in pieces])[None]
    return outputs


def _text(text: str) -> npt.NDArray[Any]:
    return np.array([[text.encode("utf-8")]], dtype=np.object_)


def _hex(pieces: list[bytes]) -> npt.NDArray[Any]:
    """Hexadecimal, because a piece of a character is no text and JSON holds nothing else."""
    return np.array([[piece.hex().encode("ascii") for piece in pieces]], dtype=np.object_)


def _number(number: int) -> npt.NDArray[Any]:
    return np.array([[number]], dtype=np.int32)
