"""The sizes that steps are padded to on a device, so that few CUDA graphs fit all of them.

Nothing of a step's result depends on its padding. Graphs on or off, a step is padded alike, so
that the same kernels run on the same sizes and give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.batch import StepShape
from python_backend.executor.inputs import DraftShape
from python_backend.settings import CoreLimits

# Beyond these a segment keeps a device busy longer than its launches take.
MOST_ENCODER_ROWS = 2048
MOST_DECODER_ROWS = 2048
# The shortest context that sizes are made for; each is four times the one before it.
_LEAST_CONTEXT = 4096
# Pages between contexts of steps without a graph: numbers of entries and of columns of page tables
# are multiples of 16 then, which kernels know.
_LONG_PAGES = 16
# Scores of one index source that a graph made at start-up may hold, 256 MiB in float32.
_MOST_SCORES = 1 << 26


@dataclass(frozen=True)
class GraphSizes:
    """Sizes in ascending order. `verify_rows`: rows of a request that verifies as many drafts as
    it may, 1 without drafts. Prefill has two sets, because the decoder runs on its last rows only:
    `encoder_rows` and `decoder_rows`. What has more rows keeps their number and has one of the
    `long_contexts`, which kernels would else have to be compiled for one by one."""

    requests: tuple[int, ...]
    contexts: tuple[int, ...]
    long_contexts: tuple[int, ...]
    verify_rows: int
    encoder_rows: tuple[int, ...]
    decoder_rows: tuple[int, ...]

    @staticmethod
    def of(limits: CoreLimits) -> GraphSizes:
        tail = limits.replay.decoder_tail or limits.max_num_tokens
        most = min(MOST_DECODER_ROWS, limits.max_batch_size * tail)
        return GraphSizes(
            requests=_request_sizes(limits.max_batch_size),
            contexts=_contexts(limits.max_seq_len, limits.global_page_tokens),
            long_contexts=_long_contexts(limits.max_seq_len, limits.global_page_tokens),
            verify_rows=1 + limits.most_drafts,
            encoder_rows=_row_sizes(limits.window, min(MOST_ENCODER_ROWS, limits.max_num_tokens)),
            decoder_rows=_row_sizes(limits.window, min(most, limits.max_num_tokens)),
        )

    @property
    def most_decode_rows(self) -> int:
        return self.requests[-1] * self.verify_rows

    def decode(self, step: StepShape) -> StepShape | None:
        """For a step whose rows all run through the decoder and may all have logits: one row a
        request, or as many as verification takes. None where no size holds it."""
        for requests in self.requests:
            for each in sorted({1, self.verify_rows}):
                rows = requests * each
                if _holds(requests, rows, step) and step.logit_rows <= rows:
                    return self._shape(requests, rows, rows, step)
        return None

    def encoder(self, step: StepShape) -> StepShape | None:
        """For the encoder segment of a step; None where no size holds it."""
        return self._prefill(self.encoder_rows, step, (0,))

    def decoder(self, step: StepShape) -> StepShape | None:
        """For the decoder's rows of a step; None where no size holds them."""
        return self._prefill(self.decoder_rows, step, (1, self.verify_rows))

    def draft(self, draft: DraftShape) -> DraftShape:
        """For a draft pass behind a step that is not of a decode size; every request may be an
        anchor."""
        requests = next(size for size in self.requests if size >= draft.requests)
        return DraftShape(requests, draft.rows, requests)

    def long(self, step: StepShape) -> StepShape:
        """For a segment that no size holds."""
        context = next(c for c in self.long_contexts if c >= step.max_context)
        return step._replace(max_context=context)

    def at_start(self) -> Iterator[StepShape]:
        """The decode sizes whose graphs are made before the first request, the largest first: the
        memory that they share is then taken once."""
        for context in reversed(self.contexts):
            for requests in reversed(self.requests):
                for each in sorted({1, self.verify_rows}, reverse=True):
                    rows = requests * each
                    if rows * context <= _MOST_SCORES or requests == 1:
                        yield StepShape(requests, rows, rows, context)

    def _prefill(
        self, sizes: tuple[int, ...], step: StepShape, logits_each: tuple[int, ...]
    ) -> StepShape | None:
        for requests in self.requests:
            for rows in sizes:
                for each in logits_each:
                    if _holds(requests, rows, step) and step.logit_rows <= requests * each:
                        return self._shape(requests, rows, requests * each, step)
        return None

    def _shape(self, requests: int, rows: int, logits: int, step: StepShape) -> StepShape | None:
        context = next((c for c in self.contexts if c >= step.max_context), None)
        return None if context is None else StepShape(requests, rows, logits, context)


def _holds(requests: int, rows: int, step: StepShape) -> bool:
    """A padding request needs a padding row."""
    fits = step.requests <= requests and step.rows <= rows
    return fits and (step.requests == requests or step.rows < rows)


def _request_sizes(most: int) -> tuple[int, ...]:
    """Powers of two, from 32 on with the size between two of them, and the most that there are."""
    sizes, size = set[int](), 1
    while size < most:
        sizes.add(size)
        if size >= 32 and size * 3 // 2 < most:
            sizes.add(size * 3 // 2)
        size *= 2
    return tuple(sorted(sizes | {most}))


def _contexts(longest: int, page_tokens: int) -> tuple[int, ...]:
    """Whole pages."""
    sizes = [longest]
    while sizes[-1] > _LEAST_CONTEXT:
        sizes.append(-(-sizes[-1] // 4))
    return tuple(-(-size // page_tokens) * page_tokens for size in reversed(sizes))


def _long_contexts(longest: int, page_tokens: int) -> tuple[int, ...]:
    """Whole pages; from the 8th on no more than an eighth longer than the one before it."""
    most, step = -(-longest // page_tokens) * page_tokens, _LONG_PAGES * page_tokens
    sizes = [min(step, most)]
    while sizes[-1] < most:
        sizes.append(min(sizes[-1] + step, most))
        if sizes[-1] == 16 * step:
            step *= 2
    return tuple(sizes)


def _row_sizes(window: int, most: int) -> tuple[int, ...]:
    """Multiples of a window, or of 128 rows where that is more."""
    unit = max(window, 128)
    return tuple(range(unit, most + 1, unit)) or (most,)
