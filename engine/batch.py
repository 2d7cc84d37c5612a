"""The ragged batch descriptor: one step's rows of several requests, laid end to end.

`StepArrays` is what a scheduler fills, plain numpy and per request. `RowArrays` are the same facts
per row, and `RaggedBatch` is those as tensors: what the network reads. Rows of a request are
consecutive positions.
See docs/adr/0001-ragged-batch-and-step-plan.md.

Three floors, all absolute positions, all per request and constant over the request's life:

* `encoder_floor`: no layer below the decoder reads a window row below it (the replay start);
* `decoder_floor`: the same for decoder layers, and the first position that runs through them at
  all: max(encoder_floor, num_prompt_tokens − replay length), the absolute-tail rule;
* `write_floor`: a global entry is written iff its closing position is at or above it (the prefix
  hit length); below it the entry is shared and must not be touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class StepArrays:
    """One step, per request. R requests, T rows.

    Contract: `query_start` is non-decreasing from 0 to T and every request has at least one row.
    `history[r]` holds the token ids before the request's first row, nearest last, −1 where the
    position would be negative; its width is engram_max_ngram_size − 1.
    """

    tokens: Int32Array  # [T] input ids
    query_start: Int32Array  # [R + 1] row range of request r: query_start[r] … query_start[r+1]
    first_position: Int64Array  # [R] absolute position of the request's first row
    encoder_floor: Int64Array  # [R]
    decoder_floor: Int64Array  # [R]
    write_floor: Int64Array  # [R]
    history: Int32Array  # [R, N − 1]
    wants_logits: BoolArray  # [R] the last row's logits are needed

    @property
    def num_requests(self) -> int:
        return len(self.first_position)

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def to_rows(
        self,
        *,
        all_logits: bool = False,
        num_drafts: Int64Array | None = None,
        more_logit_rows: Int64Array | None = None,
    ) -> RowArrays:
        """Expand to one entry per row.

        `all_logits` asks for every decoder row's logits. `num_drafts` [R] counts the drafts at the
        end of each request's rows: who wants logits wants those of the row before them, too.
        `more_logit_rows`: rows of the step, in the decoder, whose logits come behind all these.
        """
        rows = np.diff(self.query_start)
        request = np.repeat(np.arange(self.num_requests, dtype=np.int64), rows)
        offset = np.arange(self.num_rows, dtype=np.int64) - self.query_start[:-1][request]
        positions = self.first_position[request] + offset
        decoder_rows = np.flatnonzero(positions >= self.decoder_floor[request])
        if all_logits:
            logit_rows = np.arange(len(decoder_rows), dtype=np.int64)
        else:
            wanted = self._logit_rows(num_drafts)
            if more_logit_rows is not None:
                wanted = np.concatenate([wanted, more_logit_rows])
            logit_rows = np.searchsorted(decoder_rows, wanted)
        return RowArrays(
            tokens=self.tokens.astype(np.int64),
            positions=positions,
            request=request,
            query_start=self.query_start.astype(np.int64),
            encoder_floor=self.encoder_floor,
            decoder_floor=self.decoder_floor,
            write_floor=self.write_floor,
            history=self.history.astype(np.int64),
            decoder_rows=decoder_rows,
            logit_rows=logit_rows.astype(np.int64),
            max_context=int(positions.max(initial=-1)) + 1,
        )

    def to_torch(
        self,
        device: str = "cpu",
        *,
        all_logits: bool = False,
        num_drafts: Int64Array | None = None,
    ) -> RaggedBatch:
        """`to_rows` as tensors."""
        from engine.upload import upload

        rows = self.to_rows(all_logits=all_logits, num_drafts=num_drafts)
        return rows.to_torch(upload(rows.arrays(), device))

    def _logit_rows(self, num_drafts: Int64Array | None) -> Int64Array:
        last: Int64Array = self.query_start[1:][self.wants_logits].astype(np.int64) - 1
        if num_drafts is None:
            return last
        before = num_drafts[self.wants_logits]
        counts = before + 1
        behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: Int64Array = np.repeat(last - before, counts) + behind
        return rows


class StepShape(NamedTuple):
    """Sizes that a step is padded to."""

    requests: int
    rows: int
    logit_rows: int
    max_context: int


@dataclass(frozen=True)
class RowArrays:
    """A `RaggedBatch` on the host: the same fields, int64 arrays."""

    tokens: Int64Array
    positions: Int64Array
    request: Int64Array
    query_start: Int64Array
    encoder_floor: Int64Array
    decoder_floor: Int64Array
    write_floor: Int64Array
    history: Int64Array
    decoder_rows: Int64Array
    logit_rows: Int64Array
    max_context: int

    def arrays(self) -> tuple[Int64Array, ...]:
        """All fields but max_context, in their order."""
        return tuple(getattr(self, field.name) for field in fields(self)[:-1])

    def to_torch(self, tensors: Sequence[torch.Tensor]) -> RaggedBatch:
        """The batch whose tensors hold `arrays()`."""
        names = (field.name for field in fields(self))
        return RaggedBatch(**dict(zip(names, tensors, strict=False)), max_context=self.max_context)

    @property
    def shape(self) -> StepShape:
        return StepShape(
            len(self.encoder_floor), len(self.tokens), len(self.logit_rows), self.max_context
        )

    @property
    def is_whole(self) -> bool:
        """Every row runs through the decoder."""
        return len(self.decoder_rows) == len(self.tokens)

    def for_encoder(self) -> RowArrays:
        """The step for the encoder segment alone, which then returns every row."""
        none = np.empty(0, dtype=np.int64)
        return replace(self, decoder_rows=np.arange(len(self.tokens)), logit_rows=none)

    def for_decoder(self) -> RowArrays:
        """The decoder's rows for the decoder segment alone. Requests stay, some without a row."""
        kept = self.decoder_rows
        return replace(
            self,
            tokens=self.tokens[kept],
            positions=self.positions[kept],
            request=self.request[kept],
            query_start=np.searchsorted(kept, self.query_start),
            decoder_rows=np.arange(len(kept)),
            max_context=int(self.positions[kept].max(initial=-1)) + 1,
        )

    def padded(self, shape: StepShape) -> RowArrays:
        """A whole step in a larger shape, with the same results in its own rows.

        Padding rows stand behind those of the last request, at position −1, where there is no slot
        to read or write; padding requests have no row, but begin at a padding row; padding logit
        rows are row 0.
        """
        assert self.is_whole, "a row that skips the decoder cannot be padded to one that does not"
        mine = self.shape
        rows, requests = shape.rows - mine.rows, shape.requests - mine.requests
        assert rows or not requests, "a padding request needs a padding row"
        return RowArrays(
            tokens=_extended(self.tokens, rows, 0),
            positions=_extended(self.positions, rows, -1),
            request=_extended(self.request, rows, 0),
            query_start=_extended(self.query_start, requests, mine.rows),
            encoder_floor=_extended(self.encoder_floor, requests, 0),
            decoder_floor=_extended(self.decoder_floor, requests, 0),
            write_floor=_extended(self.write_floor, requests, 0),
            history=_extended(self.history, requests, -1),
            decoder_rows=np.arange(shape.rows),
            logit_rows=_extended(self.logit_rows, shape.logit_rows - mine.logit_rows, 0),
            max_context=shape.max_context,
        )


def _extended(array: Int64Array, count: int, value: int) -> Int64Array:
    """`array` with `count` more entries of `value`."""
    more = np.full((count, *array.shape[1:]), value, dtype=np.int64)
    return np.concatenate([array, more])


@dataclass(frozen=True)
class RaggedBatch:
    """One step, per row, as int64 tensors on one device. T rows, R requests."""

    tokens: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    request: torch.Tensor  # [T] index of the row's request in the step
    query_start: torch.Tensor  # [R + 1]
    encoder_floor: torch.Tensor  # [R]
    decoder_floor: torch.Tensor  # [R]
    write_floor: torch.Tensor  # [R]
    history: torch.Tensor  # [R, N − 1]
    decoder_rows: torch.Tensor  # [Td] rows that run through the decoder segment, ascending
    logit_rows: torch.Tensor  # [Tl] indices INTO decoder_rows whose logits are wanted
    max_context: int  # highest position + 1, a host number that sizes key ranges

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_requests(self) -> int:
        return self.encoder_floor.shape[0]


@dataclass(frozen=True)
class DraftBatch:
    """One draft pass over R requests of a step, as int64 tensors on one device."""

    anchors: torch.Tensor  # [R] the token that the target just produced
    positions: torch.Tensor  # [R] its position; the context ends one below it
    request: torch.Tensor  # [R] index of the request in the cache view
    floor: torch.Tensor  # [R] decoder_floor: no context row below it was stored
