"""Grammars as a rule on logits: tokens that are not allowed get −∞, in all rows at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.upload import upload
from python_backend.generation.rows import LogitRows
from python_backend.generation.slot_lists import SlotLists
from python_backend.generation.tiles import tiles
from python_backend.grammar.bitmask import Words, allow, forbid, holds
from python_backend.request import Request

if TYPE_CHECKING:  # the library behind it is optional
    from python_backend.grammar.masks import GrammarMasks

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class GrammarRule:
    """The grammars of every slot."""

    def __init__(self, num_slots: int, vocab_size: int, *, device: str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._active: BoolArray = np.zeros(num_slots, dtype=bool)
        self._end_ids = SlotLists(num_slots, (np.empty(0, dtype=np.int64),))
        self._masks: GrammarMasks | None = None  # made for the first who needs it
        self._sums: torch.Tensor | None = None

    def begin(self, slot: int, request: Request, outputs: Int32Array) -> None:
        """A request enters the slot, which has put out `outputs` before."""
        self._active[slot] = request.grammar is not None
        ends = sorted(request.end_ids) if self._active[slot] else []
        self._end_ids.set(slot, (np.array(ends, dtype=np.int64),))
        if request.grammar is None:
            return
        grammar = request.grammar.result()
        if self._masks is None:
            from python_backend.grammar.masks import GrammarMasks

            self._masks = GrammarMasks(self._vocab_size, grammar.end_id, torch.get_num_threads())
        self._masks.begin(slot, grammar, outputs)

    def active(self, slots: Int64Array) -> BoolArray:
        active: BoolArray = self._active[slots]
        return active

    def apply(
        self, logits: torch.Tensor, rows: LogitRows, at: Int64Array, forbidden: Int64Array
    ) -> None:
        """Change the rows [L, V] of active slots. Row at[i] shall not have the token forbidden[i]
        either, unless then it had none."""
        ruled = np.flatnonzero(self._active[rows.slots])
        masks = self._allowed(rows.take(ruled), *_within(ruled, at, forbidden))
        sums = self._sums_of(logits.dtype)
        for part in tiles(np.arange(len(ruled)), logits):
            octets = self._tensor(masks[part].view(np.uint8).ravel())
            added = sums.index_select(0, octets.int())
            added = added.view(len(part), -1)[:, : logits.shape[1]]
            logits.index_add_(0, self._tensor(ruled[part]), added)

    def append(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """counts[i] new outputs of slots[i], the first of tokens [n, most]; −1 behind them."""
        ruled = np.flatnonzero(self._active[slots])
        if len(ruled):
            assert self._masks is not None
            self._masks.append(slots[ruled], tokens[ruled], counts[ruled])

    def failures(self, slots: Int64Array) -> dict[int, str]:
        """By slot, why an answer has no next token."""
        ruled = slots[self._active[slots]]
        if not len(ruled):
            return {}
        assert self._masks is not None
        return self._masks.failures(ruled)

    def _allowed(self, rows: LogitRows, at: Int64Array, forbidden: Int64Array) -> Words:
        """The grammars' end token says only where a text is complete: what ends an answer there is
        the request's to say."""
        assert self._masks is not None
        masks = self._masks.masks(rows)
        complete = holds(masks, self._masks.end_id)
        ended = np.flatnonzero(complete)
        forbid(masks, ended, np.full(len(ended), self._masks.end_id))
        at_end, (ends,) = self._end_ids.gather(rows.slots)
        ending = complete[at_end]
        allow(masks, at_end[ending], ends[ending].astype(np.int64))
        if len(at):
            touched = np.unique(at)
            kept = masks[touched]
            forbid(masks, at, forbidden)
            empty = ~masks[touched].any(axis=1)
            masks[touched[empty]] = kept[empty]
        return masks

    def _sums_of(self, dtype: torch.dtype) -> torch.Tensor:
        """What each octet of a mask adds to the logits of its eight tokens, [256, 8]: 0 or −∞. A
        look-up and a sum take a tenth of the time of a masked fill."""
        if self._sums is None or self._sums.dtype != dtype:
            bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            sums = np.where(bits, 0.0, -np.inf)
            self._sums = self._tensor(sums).to(dtype)
        return self._sums

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return upload([array], self._device)[0]


def _within(rows: Int64Array, at: Int64Array, tokens: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The entries whose row is one of `rows`, ascending, and their places among them."""
    place = np.searchsorted(rows, at)
    mine = rows[np.minimum(place, len(rows) - 1)] == at
    return place[mine], tokens[mine]
