"""From what was asked to the core: prompts become tokens, options become rules, and several
sequences of one prompt become requests of the core.

Sequence i of a request is the answer of a request with the seed seed + i. The first computes the
prompt; the others are given to the core when it has its first token, and find the prompt's whole
pages in the prefix cache (a hit as any other: floor((N − 1) / B)·B tokens, one window of them run
again). Where a hit would be dropped, all are given at once and each computes the prompt.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from python_backend import wire
from python_backend.arrivals import check_sequences
from python_backend.generation.answer import AnswerText
from python_backend.grammar.guide import Guide
from python_backend.logs import fields
from python_backend.replay import longest_hit
from python_backend.request import Delta, FinishReason, Request, RequestError
from python_backend.responses import Reply, Responder, ResponseStream
from python_backend.sequence import AnswerSequence
from python_backend.service import ServedModel
from python_backend.text.chat_input import ChatError
from python_backend.text.tokenizer import TextTokenizer, TokenizerError

if TYPE_CHECKING:
    from python_backend.grammar.grammar import Grammar

logger = logging.getLogger(__name__)

_NUM_SEEDS = 1 << 64


class Intake:
    """Hands requests to one served model; their answers go through the responder."""

    def __init__(
        self, model: ServedModel, responder: Responder, on_refused: Callable[[RequestError], None]
    ) -> None:
        self._model = model
        self._on_refused = on_refused  # by the core, whose word goes through the responder
        self._responder = responder
        self._keys = itertools.count(1)

    def take(
        self, asked: wire.WireRequest, request_id: str, reply: Reply, arrived_at: float
    ) -> None:
        """Raises RequestError for what cannot be served; after that the reply is the responder's.
        The buffers of `asked` are copied before this returns. `arrived_at`, of the monotonic
        clock, begins the request's time."""
        options, shown = asked.options, asked.shown
        input_ids = self._input_ids(asked)
        if options.num_sequences > 1 or shown.prompt_log_probs:
            input_ids = input_ids.copy()  # read again after this call
        sampling = options.resolve(self._encode)
        if options.stop_strings or shown.prompt or shown.token_bytes:
            self._tokenizer()
        # Clients choose equal names; the core's are unique.
        key = f"{next(self._keys)}"
        prompt_text = self._spelled(input_ids) if shown.prompt else ""
        many = options.num_sequences > 1
        prompt_only = shown.prompt and asked.max_tokens == 0
        sequences = [
            AnswerSequence(
                key=f"{key}.{i}" if i else key,
                num_input_tokens=len(input_ids),
                streamed=asked.stream,
                text=self._answer_text(asked),
                shown=shown,
                prompt_text=prompt_text,
                prompt_only=prompt_only,
                bytes_of=self._tokenizer().bytes_of if shown.token_bytes else None,
                prompt_ids=input_ids if shown.prompt_log_probs and not i else None,
                index=i if many else None,
            )
            for i in range(options.num_sequences)
        ]
        stream = ResponseStream(
            request_id or key,
            reply,
            sequences,
            session_id=asked.session_id,
            seconds=asked.timeout,
            opened_at=arrived_at,
        )
        if stream.is_late:  # it waited for its text to be read
            raise stream.late()
        own = self._model.end_ids if asked.end_ids is None else asked.end_ids
        most = 1 if prompt_only else asked.max_tokens  # the core's steps end with a token
        max_tokens = self._max_tokens(most, len(input_ids))
        check_sequences(self._model.limits, len(sequences), len(input_ids) + max_tokens)
        sampling, end_ids = options.end_of_guide(
            sampling, options.end_ids(own), self._model.end_ids, max_tokens
        )
        first, *others = self._requests(
            Request(
                request_id=key,
                input_ids=input_ids,
                max_tokens=max_tokens,
                sampling=sampling,
                end_ids=end_ids,
                on_delta=partial(self._responder.deliver, stream, 0),
                cache_salt=asked.cache_salt,
                speculative=asked.speculative,
                priority=asked.priority,
                grammar=self._grammar(options.guide),
                receiver_tells_end=True,
            ),
            stream,
            options.guide,
        )
        if others and not prompt_only and self._can_hit(len(input_ids)):
            stream.begin_others = partial(self._add, others)
            others = []
        self._responder.open(stream)
        try:
            self._add([first, *others])
        except Exception as error:  # the responder has the stream now, so it alone may end it
            refusal = error if isinstance(error, RequestError) else unexpected(error)
            if refusal is not error:
                logger.exception("add_request_failed", extra=fields(request_id=stream.request_id))
            self._on_refused(refusal)
            self._responder.forget(stream, refusal)

    def reset_prefix_cache(self, request_id: str, reply: Reply) -> None:
        """The one response, without text, comes when it is done. Raises RequestError."""
        key = f"{next(self._keys)}"
        done = Delta(np.empty(0, np.int32), 0, FinishReason.STOP)
        sequences = [AnswerSequence(key, 0, False, None)]
        stream = ResponseStream(request_id or key, reply, sequences)
        deliver = partial(self._responder.deliver, stream, 0, done)
        self._responder.open(stream)
        try:
            self._model.core.reset_prefix_cache(deliver)
        except RequestError as error:
            self._responder.forget(stream, error)

    def _requests(
        self, first: Request, stream: ResponseStream, guide: Guide | None
    ) -> Iterator[Request]:
        """One for each sequence. The prompt is judged once."""
        yield first
        for i, sequence in enumerate(stream.sequences[1:], start=1):
            seed = (first.sampling.seed + i) % _NUM_SEEDS
            yield replace(
                first,
                request_id=sequence.key,
                sampling=replace(first.sampling, seed=seed, prompt_logprobs=None),
                on_delta=partial(self._responder.deliver, stream, i),
                grammar=self._grammar(guide),
            )

    def _grammar(self, guide: Guide | None) -> Future[Grammar] | None:
        return None if guide is None else self._model.grammars.compile(guide)

    def _add(self, requests: list[Request]) -> None:
        for request in requests:
            self._model.core.add_request(request)

    def _can_hit(self, num_tokens: int) -> bool:
        limits = self._model.limits
        longest = longest_hit(num_tokens, limits.global_page_tokens)
        return limits.prefix_cache and longest > limits.replay.replay_length

    def _answer_text(self, asked: wire.WireRequest) -> AnswerText | None:
        if self._model.text is None:
            return None
        options = asked.options
        least = options.sampling.min_tokens
        return AnswerText(self._model.text.detokenizer(), options.watch(), least)

    def _max_tokens(self, asked: int, num_input_tokens: int) -> int:
        """A prompt that leaves no room asks for one token, which the core refuses by its length."""
        if asked != wire.AS_MANY_AS_FIT:
            return asked
        fits = max(1, self._model.limits.longest_answer(num_input_tokens))
        return min(fits, self._model.defaults.max_tokens or fits)

    def _input_ids(self, asked: wire.WireRequest) -> wire.Int32Array:
        if asked.chat is not None:
            try:
                tokenizer = self._tokenizer()
                return tokenizer.encode_rendered(asked.chat.render(tokenizer.sections))
            except (ChatError, TokenizerError) as error:
                raise RequestError(wire.INVALID_ARGUMENT, str(error)) from None
        if asked.text is not None:
            return self._tokenizer().encode(asked.text)
        assert asked.input_ids is not None
        return asked.input_ids

    def _encode(self, word: str) -> list[int]:
        return self._tokenizer().encode_word(word)

    def _spelled(self, input_ids: wire.Int32Array) -> str:
        return self._tokenizer().detokenizer().feed(input_ids, last=True)

    def _tokenizer(self) -> TextTokenizer:
        if self._model.text is None:
            raise RequestError(
                wire.INVALID_ARGUMENT,
                "expected input_ids, got text: this engine has no tokenizer.json; send ids "
                "or build the engine from a checkpoint that has one",
            )
        return self._model.text


def unexpected(error: Exception) -> RequestError:
    """For what no rule foresaw."""
    return RequestError(
        wire.INTERNAL, f"expected to take the request, but {type(error).__name__}: {error}"
    )
