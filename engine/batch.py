"""The ragged batch descriptor: one step's rows of several requests, laid end to end.

`StepArrays` is what a scheduler fills, plain numpy and per request. `RaggedBatch` is what the
network reads: the same facts per row, as tensors. Rows of a request are consecutive positions.
See docs/adr/0001-ragged-batch-and-step-plan.md.

Three floors, all absolute positions, all per request and constant over the request's life:

* `encoder_floor`: no layer below the decoder reads a window row below it (the replay start);
* `decoder_floor`: the same for decoder layers, and the first position that runs through them at
  all: max(encoder_floor, num_prompt_tokens − replay length), the absolute-tail rule;
* `write_floor`: a global entry is written iff its closing position is at or above it (the prefix
  hit length); below it the entry is shared and must not be touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    def to_torch(
        self,
        device: str = "cpu",
        *,
        all_logits: bool = False,
        num_drafts: Int64Array | None = None,
        more_logit_rows: Int64Array | None = None,
    ) -> RaggedBatch:
        """Expand to per-row tensors.

        `all_logits` asks for every decoder row's logits. `num_drafts` [R] counts the drafts at the
        end of each request's rows: who wants logits wants those of the row before them, too.
        `more_logit_rows`: rows of the step, in the decoder, whose logits come behind all these.
        """
        import torch

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

        def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return RaggedBatch(
            tokens=tensor(self.tokens.astype(np.int64)),
            positions=tensor(positions),
            request=tensor(request),
            query_start=tensor(self.query_start.astype(np.int64)),
            encoder_floor=tensor(self.encoder_floor),
            decoder_floor=tensor(self.decoder_floor),
            write_floor=tensor(self.write_floor),
            history=tensor(self.history.astype(np.int64)),
            decoder_rows=tensor(decoder_rows),
            logit_rows=tensor(logit_rows.astype(np.int64)),
            max_context=int(positions.max(initial=-1)) + 1,
        )

    def _logit_rows(self, num_drafts: Int64Array | None) -> Int64Array:
        last: Int64Array = self.query_start[1:][self.wants_logits].astype(np.int64) - 1
        if num_drafts is None:
            return last
        before = num_drafts[self.wants_logits]
        counts = before + 1
        behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: Int64Array = np.repeat(last - before, counts) + behind
        return rows


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
