"""Sequences by request id over a network and caches of its own.

An executor that is not ours (TensorRT-LLM's) says which tokens of which requests come next and
where they stand; it does not say when a request ends. So a request keeps a slot until another one
needs it, least recently used first: with as many slots as requests run at once, only finished
requests lose theirs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import StepArrays
from engine.network import Network
from engine.paged_cache import CachePools, PagedCache, StepTables

_LOG = logging.getLogger(__name__)
# Rows of one request in one pass: a longer prompt takes several.
_CHUNK_ROWS = 512
_WINDOW_PAGE_ROWS = 64
_GLOBAL_PAGE_TOKENS = 128

Int32Array = npt.NDArray[np.int32]


@dataclass
class _Sequence:
    slot: int
    start: int  # its first position: 0, except for sequences without a beginning
    length: int  # positions that the caches hold
    decoder_floor: int
    history: Int32Array  # [N − 1] the newest token ids, nearest last, −1 where there are none


@dataclass(frozen=True)
class _Piece:
    """Rows of one sequence in one pass."""

    index: int  # of the sequence in the step
    sequence: _Sequence
    tokens: Int32Array
    is_last: bool


class SequenceNetwork:
    """Caches for `num_slots` requests of `max_seq_len` tokens, on the device of the weights."""

    def __init__(self, network: Network, *, num_slots: int, max_seq_len: int) -> None:
        config = network.config
        device = network.weights.embed.device
        self._network = network
        self._max_seq_len = max_seq_len
        # A pass writes its rows before it reads the windows of the first one.
        ring = -(-(config.sliding_window + _CHUNK_ROWS) // _WINDOW_PAGE_ROWS) + 1
        columns = -(-max_seq_len // _GLOBAL_PAGE_TOKENS)
        self._pools = CachePools(
            config,
            num_global_pages=1 + num_slots * columns,
            num_window_pages=1 + num_slots * ring,
            num_slots=num_slots,
            global_page_tokens=_GLOBAL_PAGE_TOKENS,
            window_page_rows=_WINDOW_PAGE_ROWS,
            dtype=network.dtype,
            quantize=True,
            device=device,
        )
        # Every slot owns its pages for good. Page 0 is the null page.
        self._global_pages = _owned(num_slots, columns, device)
        self._window_pages = _owned(num_slots, ring, device)
        self._free = list(range(num_slots))
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()

    @torch.inference_mode()
    def step(
        self,
        request_ids: Sequence[int],
        lengths: Sequence[int],
        cached: Sequence[int],
        tokens: Int32Array,
    ) -> torch.Tensor:
        """Logits [R, vocab] of each request's last row, at least float32.

        tokens [T]: lengths[r] rows of request r, laid end to end, the first one at position
        cached[r]. A request starts at position 0, and all of its prompt comes in that step. Raises
        ValueError for rows that do not continue their request.
        """
        ends = np.cumsum(lengths)
        if len(request_ids) != len(set(request_ids)) or ends[-1] != len(tokens):
            raise ValueError(
                f"expected distinct requests and {ends[-1]} tokens, got {list(request_ids)} and "
                f"{len(tokens)}"
            )
        rows = np.split(tokens.astype(np.int32), ends[:-1])
        sequences = [
            self._sequence(request, position, len(own))
            for request, position, own in zip(request_ids, cached, rows, strict=True)
        ]
        logits: list[torch.Tensor | None] = [None] * len(rows)
        for first in range(0, max(lengths), _CHUNK_ROWS):
            stop = first + _CHUNK_ROWS
            pieces = [
                _Piece(index, sequence, own[first:stop], stop >= len(own))
                for index, (sequence, own) in enumerate(zip(sequences, rows, strict=True))
                if first < len(own)
            ]
            last = [piece.index for piece in pieces if piece.is_last]
            for index, row in zip(last, self._run(pieces), strict=True):
                logits[index] = row
        return torch.stack([row for row in logits if row is not None])

    def _sequence(self, request: int, position: int, rows: int) -> _Sequence:
        """The request's sequence, new where it starts here."""
        if position + rows > self._max_seq_len:
            raise ValueError(
                f"request {request}: expected at most {self._max_seq_len} tokens, got "
                f"{position + rows}; build the engine with a larger --max_seq_len"
            )
        known = self._sequences.get(request)
        if known is not None and position == known.length:
            self._sequences.move_to_end(request)
            return known
        if known is not None and position:
            raise ValueError(
                f"request {request}: expected its rows from position {known.length} on, got "
                f"{position}; turn overlap scheduling, drafting and chunked prefill off"
            )
        if position:
            _LOG.warning(
                "request %d starts at position %d without its beginning, as warm-up steps do: its "
                "output means nothing; a real request needs enable_block_reuse false",
                request,
                position,
            )
        config = self._network.config
        sequence = _Sequence(
            slot=self._slot(request),
            start=position,
            length=position,
            decoder_floor=max(position, position + rows - config.sliding_window),
            history=np.full(config.engram_max_ngram_size - 1, -1, dtype=np.int32),
        )
        self._sequences[request] = sequence
        return sequence

    def _slot(self, request: int) -> int:
        known = self._sequences.pop(request, None)
        if known is not None:
            return known.slot
        if self._free:
            return self._free.pop()
        return self._sequences.popitem(last=False)[1].slot

    def _run(self, pieces: Sequence[_Piece]) -> torch.Tensor:
        """One pass; logits of the pieces that are last."""
        arrays = _arrays(pieces)
        device = self._global_pages.device
        slots = torch.tensor([piece.sequence.slot for piece in pieces], device=device)
        reach = max(piece.sequence.length + len(piece.tokens) for piece in pieces)
        columns = -(-reach // _GLOBAL_PAGE_TOKENS)
        tables = StepTables(
            slots=slots,
            global_pages=self._global_pages[slots, :columns],
            window_pages=self._window_pages[slots],
        )
        batch = arrays.to_torch(str(device))
        output = self._network.forward(batch, PagedCache(self._pools, tables))
        for piece in pieces:
            sequence = piece.sequence
            sequence.length += len(piece.tokens)
            newest = np.concatenate([sequence.history, piece.tokens])
            sequence.history = newest[len(newest) - len(sequence.history) :]
        return output.logits


def _arrays(pieces: Sequence[_Piece]) -> StepArrays:
    sequences = [piece.sequence for piece in pieces]
    sizes = [len(piece.tokens) for piece in pieces]
    starts = np.array([sequence.start for sequence in sequences], dtype=np.int64)
    return StepArrays(
        tokens=np.concatenate([piece.tokens for piece in pieces]),
        query_start=np.cumsum([0, *sizes], dtype=np.int32),
        first_position=np.array([sequence.length for sequence in sequences], dtype=np.int64),
        encoder_floor=starts,
        decoder_floor=np.array([s.decoder_floor for s in sequences], dtype=np.int64),
        write_floor=starts,
        history=np.stack([sequence.history for sequence in sequences]),
        wants_logits=np.array([piece.is_last for piece in pieces]),
    )


def _owned(num_slots: int, columns: int, device: torch.device) -> torch.Tensor:
    return 1 + torch.arange(num_slots * columns, device=device).view(num_slots, columns)
