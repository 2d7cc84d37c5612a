"""Chooses the tokens of a step: greedy rows at once, the others in tiles through the rules.

    sampler.begin(slot, request, tokens)            a request enters a slot
    choice = sampler.choose(logits, rows)           one token per row, nothing remembered
    sampler.append(rows, num_accepted, tokens)      what of it became output

A row's choice depends on its own request only: on its options, its tokens and (seed, output index).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.upload import upload
from plugins.sample import sample
from python_backend.generation.log_probs import log_probs_of
from python_backend.generation.rows import LogitRows
from python_backend.generation.rules import LogitRules
from python_backend.request import LogProbs, Request

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NO_LOGPROBS = -1


class Choice(NamedTuple):
    """`tokens` [L] by row; `logprobs` by the number of a request among those of the rows;
    `failures` by slot, why its grammar has no next token."""

    tokens: Int32Array
    logprobs: dict[int, LogProbs]
    failures: dict[int, str]


class Sampler:
    """State of `num_slots` slots."""

    def __init__(self, num_slots: int, vocab_size: int, *, device: str = "cpu") -> None:
        self._device = device
        self._rules = LogitRules(num_slots, vocab_size, device=device)
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._scratch: torch.Tensor | None = None
        self._num_logprobs = np.full(num_slots, _NO_LOGPROBS, dtype=np.int64)

    def begin(self, slot: int, request: Request, tokens: Int32Array) -> None:
        """A request enters the slot with `tokens`, its prompt and what it has put out before."""
        sampling = request.sampling
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed
        self._num_logprobs[slot] = _NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        self._rules.begin(slot, request, tokens)

    def choose(self, logits: torch.Tensor, rows: LogitRows) -> Choice:
        """Logits [L, V] are left as they are."""
        ruled = self._rules.active(rows.slots)
        heat = self._temperature[rows.slots]
        plain = np.flatnonzero(~ruled & (heat == 0))
        tokens = torch.empty(len(rows.slots), dtype=torch.int64, device=self._device)
        if len(plain) == len(tokens):
            tokens = self.draw(logits, rows)
        elif len(plain):
            at = self._tensor(plain)
            tokens[at] = self.draw(logits.index_select(0, at), rows.take(plain))
        others = np.flatnonzero(ruled | (heat > 0))
        if len(others):
            at, mine = self._tensor(others), rows.take(others)
            changed = self._copied(logits, at)
            self._rules.apply(changed, mine)
            tokens[at] = self.draw(changed, mine)
        return Choice(
            tokens.to(torch.int32).cpu().numpy(),
            self._log_probs(logits, tokens, rows),
            self._rules.grammar.failures(rows.slots),
        )

    def append(self, rows: LogitRows, num_accepted: Int64Array, tokens: Int32Array) -> None:
        """The rows' requests [n] put out their first num_accepted drafts and then `tokens`."""
        first = np.flatnonzero(rows.behind == 0)
        ruled = np.flatnonzero(self._rules.active(rows.slots[first]))
        if len(ruled):
            count = num_accepted[ruled]
            new = np.full((len(ruled), rows.drafts.shape[1] + 1), -1, dtype=np.int32)
            new[:, :-1] = rows.drafts[first[ruled]]
            new[np.arange(new.shape[1]) >= count[:, None]] = -1
            new[np.arange(len(ruled)), count] = tokens[ruled]
            self._rules.append(rows.slots[first[ruled]], new, count + 1)

    def _copied(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The rows, in memory that is kept: new memory of this size costs more than the copy."""
        kept = self._scratch
        if kept is None or kept.dtype != logits.dtype or len(kept) < len(rows):
            kept = self._scratch = torch.empty_like(logits)
        return torch.index_select(logits, 0, rows, out=kept[: len(rows)])

    def draw(self, logits: torch.Tensor, rows: LogitRows) -> torch.Tensor:
        slots = rows.slots
        options = (
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            self._seed[slots].view(np.int64),
            rows.output_index,
        )
        return sample(logits, *upload(options, self._device))

    def _log_probs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: LogitRows
    ) -> dict[int, LogProbs]:
        numbers = self._num_logprobs[rows.slots]
        asked = np.flatnonzero(numbers >= 0)
        if not len(asked):
            return {}
        made = log_probs_of(asked, logits, tokens, int(numbers.max()))
        request = np.cumsum(rows.behind == 0) - 1
        begins = np.flatnonzero(rows.behind[asked] == 0)
        ends = [*begins[1:].tolist(), len(asked)]
        return {
            int(request[asked[begin]]): made.of(slice(begin, end), int(numbers[asked[begin]]))
            for begin, end in zip(begins.tolist(), ends, strict=True)
        }

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return upload([array], self._device)[0]
