"""What changes logits before a token is chosen: penalties, bias, bad words, length, grammar.

State is kept per slot: which tokens a request has, and its lists. It is a function of the request's
own tokens, never of the batch. Definitions follow vLLM's: penalties as in
`SamplingParams`, bad words are matched against outputs only. Order: penalties, bias, then what
forbids tokens. A grammar goes before the others that forbid: where they leave none of the tokens
that it allows, all of those stay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.upload import upload
from python_backend.generation.checks import MAX_BAD_WORD_TOKENS
from python_backend.generation.grammar_rule import GrammarRule
from python_backend.generation.rows import LogitRows
from python_backend.generation.slot_lists import SlotLists
from python_backend.generation.tiles import tiles
from python_backend.request import Request

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


_ANYTHING = -1
_OUTPUT = 2  # a token's tally is 2 · (its number in the output) + (1 if it is in the prompt)


class LogitRules:
    """The rules of every slot."""

    def __init__(self, num_slots: int, vocab_size: int, *, device: str = "cpu") -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._active: BoolArray = np.zeros(num_slots, dtype=bool)
        self._penalised: BoolArray = np.zeros(num_slots, dtype=bool)
        self._has_bad_words: BoolArray = np.zeros(num_slots, dtype=bool)
        self._min_tokens = np.zeros(num_slots, dtype=np.int64)
        # Repetition, presence and frequency penalty.
        self._penalties = torch.zeros(3, num_slots, dtype=torch.float64, device=device)
        self._tally: torch.Tensor | None = None  # [num_slots, V], made for the first who needs it
        self._recent = np.full((num_slots, MAX_BAD_WORD_TOKENS - 1), -1, dtype=np.int32)
        ids, values = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
        self._bias = SlotLists(num_slots, (ids, values))
        self._end_ids = SlotLists(num_slots, (ids,))
        beginnings = np.empty((0, MAX_BAD_WORD_TOKENS - 1), dtype=np.int32)
        self._bad_words = SlotLists(num_slots, (ids, beginnings))
        self.grammar = GrammarRule(num_slots, vocab_size, device=device)

    def begin(self, slot: int, request: Request, tokens: Int32Array) -> None:
        """A request enters the slot with `tokens`, its prompt and what it has put out before."""
        sampling = request.sampling
        outputs = tokens[len(request.input_ids) :]
        penalties = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self._penalised[slot] = penalties != (1.0, 0.0, 0.0)
        self._has_bad_words[slot] = bool(sampling.bad_words)
        self._min_tokens[slot] = sampling.min_tokens if request.end_ids else 0
        self._active[slot] = bool(
            self._penalised[slot]
            or sampling.bad_words
            or sampling.logit_bias
            or self._min_tokens[slot]
            or request.grammar is not None
        )
        ids = [id for id, _ in sampling.logit_bias]
        values = [value for _, value in sampling.logit_bias]
        self._bias.set(slot, (np.array(ids, dtype=np.int64), np.array(values, dtype=np.float64)))
        ends = list(request.end_ids) if self._min_tokens[slot] else []
        self._end_ids.set(slot, (np.array(ends, dtype=np.int64),))
        self._bad_words.set(slot, _words(sampling.bad_words))
        if self._penalised[slot]:
            self._penalties[:, slot] = torch.tensor(penalties, dtype=torch.float64)
            self._start_tally(slot, request.input_ids, outputs)
        if sampling.bad_words:
            self._recent[slot] = _last(outputs, self._recent.shape[1])
        self.grammar.begin(slot, request, outputs)

    def active(self, slots: Int64Array) -> BoolArray:
        """Whose logits would change, or might."""
        active: BoolArray = self._active[slots]
        return active

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """Change logits [L, V] of `rows` in place."""
        penalised = np.flatnonzero(self._penalised[rows.slots])
        for part in tiles(penalised, logits):
            self._penalise(logits, part, rows.take(part))
        at, (ids, values) = self._bias.gather(rows.slots)
        if len(at):
            added = self._tensor(values).to(logits.dtype)
            logits.index_put_((self._tensor(at), self._tensor(ids)), added, accumulate=True)
        at, (ids,) = self._end_ids.gather(rows.slots)
        early = rows.output_index[at] < self._min_tokens[rows.slots[at]]
        at, forbidden = at[early], ids[early].astype(np.int64)
        worded = np.flatnonzero(self._has_bad_words[rows.slots])
        if len(worded):
            more, words = self._completions(rows.take(worded))
            at = np.concatenate([at, worded[more]])
            forbidden = np.concatenate([forbidden, words])
        ruled = self.grammar.active(rows.slots)
        if ruled.any():
            self.grammar.apply(logits, rows, at, forbidden)
            at, forbidden = at[~ruled[at]], forbidden[~ruled[at]]
        self._forbid(logits, at, forbidden)

    def append(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """counts[i] new outputs of slots[i], the first of tokens [n, most]; −1 behind them."""
        self.grammar.append(slots, tokens, counts)
        penalised, worded = self._penalised[slots], self._has_bad_words[slots]
        if penalised.any():
            assert self._tally is not None
            mine = np.arange(tokens.shape[1]) < np.where(penalised, counts, 0)[:, None]
            at = np.broadcast_to(slots[:, None], tokens.shape)[mine]
            self._count(self._tally, at, tokens[mine], _OUTPUT)
        if worded.any():
            who, new = slots[worded], counts[worded]
            whole = np.concatenate([self._recent[who], tokens[worded]], axis=1)
            columns = new[:, None] + np.arange(self._recent.shape[1])
            self._recent[who] = np.take_along_axis(whole, columns, axis=1)

    # -- penalties -------------------------------------------------------------------------------

    def _start_tally(self, slot: int, prompt: Int32Array, outputs: Int32Array) -> None:
        if self._tally is None:
            self._tally = torch.zeros(
                self._num_slots, self._vocab_size, dtype=torch.int32, device=self._device
            )
        tally = self._tally[slot].zero_()
        tally[self._tensor(prompt.astype(np.int64))] = 1
        self._count(self._tally, np.full(len(outputs), slot), outputs, _OUTPUT)

    def _count(self, tally: torch.Tensor, at: Int64Array, tokens: Int32Array, by: int) -> None:
        added = torch.full((len(at),), by, dtype=tally.dtype, device=tally.device)
        index = (self._tensor(at), self._tensor(tokens.astype(np.int64)))
        tally.index_put_(index, added, accumulate=True)

    def _penalise(self, logits: torch.Tensor, index: Int64Array, rows: LogitRows) -> None:
        assert self._tally is not None
        slots = self._tensor(rows.slots)
        tally = self._tally.index_select(0, slots)
        if rows.drafts.shape[1]:
            before = rows.before
            row, column = np.nonzero(before >= 0)
            self._count(tally, row, before[row, column], _OUTPUT)
        at = self._tensor(index)
        repetition, presence, frequency = self._penalties[:, slots, None].to(logits.dtype)
        number = (tally >> 1).to(logits.dtype)
        # 1 for tokens that the request does not have, so that nothing of theirs changes.
        divisor = tally.clamp_(max=1).to(logits.dtype).mul_(repetition - 1).add_(1)
        negative = logits.index_select(0, at)
        positive = negative.clamp(min=0).div_(divisor)
        new = negative.clamp_(max=0).mul_(divisor).add_(positive)
        new.sub_(number.clamp(max=1).mul_(presence)).sub_(number.mul_(frequency))
        logits.index_copy_(0, at, new)

    # -- what is forbidden -----------------------------------------------------------------------

    def _completions(self, rows: LogitRows) -> tuple[Int64Array, Int64Array]:
        """Rows, and the tokens there that would complete a bad word."""
        width = self._recent.shape[1]
        whole = np.concatenate([self._recent[rows.slots], rows.drafts], axis=1)
        tails = np.take_along_axis(whole, rows.behind[:, None] + np.arange(width), axis=1)
        at, (ids, beginnings) = self._bad_words.gather(rows.slots)
        anything = beginnings == _ANYTHING
        matches = ((beginnings == tails[at]) | anything).all(axis=1)
        found: Int64Array = ids[matches].astype(np.int64)
        return at[matches], found

    def _forbid(self, logits: torch.Tensor, at: Int64Array, ids: npt.NDArray[np.generic]) -> None:
        if len(at):
            logits[self._tensor(at), self._tensor(ids)] = float("-inf")

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return upload([array], self._device)[0]


def _words(words: tuple[tuple[int, ...], ...]) -> tuple[Int64Array, Int32Array]:
    """Last tokens [W], and what comes before them, nearest last, −1 where it does not matter."""
    last = np.array([word[-1] for word in words], dtype=np.int64)
    beginnings = [_last(np.array(w[:-1], dtype=np.int32), MAX_BAD_WORD_TOKENS - 1) for w in words]
    shape = (len(words), MAX_BAD_WORD_TOKENS - 1)
    return last, np.array(beginnings, dtype=np.int32).reshape(shape)


def _last(tokens: Int32Array, width: int) -> Int32Array:
    """The last `width` tokens, −1 before the first."""
    padded = np.full(width, -1, dtype=np.int32)
    if len(tokens):
        kept = tokens[-width:]
        padded[width - len(kept) :] = kept
    return padded
