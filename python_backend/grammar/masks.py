"""Which tokens the running answers may have next: one bit for each row and token.

State is kept per slot and is that of the answer's own tokens; drafts are walked through and taken
back by the library within one call. An answer's text may end where its grammar says that it is
complete: there, and only there, the end tokens are allowed.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from python_backend.generation.rows import LogitRows
from python_backend.grammar.bitmask import Words, everything
from python_backend.grammar.grammar import Grammar

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class GrammarMasks:
    """Matchers of the slots whose answers follow a grammar. The grammar is its request's: when that
    is gone the matcher is, too, though nobody else enters the slot."""

    def __init__(self, vocab_size: int, end_id: int, num_threads: int) -> None:
        self.end_id = end_id
        self._grammars: WeakValueDictionary[int, Grammar] = WeakValueDictionary()
        self._matchers: WeakKeyDictionary[Grammar, LLMatcher] = WeakKeyDictionary()
        self._vocab_size = vocab_size
        self._executor = LLExecutor(num_threads)

    def begin(self, slot: int, grammar: Grammar, outputs: Int32Array) -> None:
        """An answer enters the slot, of which `outputs` are there already."""
        self._grammars[slot] = grammar
        matcher = self._matchers[grammar] = grammar.matcher()
        matcher.consume_tokens(outputs.tolist())

    def masks(self, rows: LogitRows) -> Words:
        """What rows of slots that follow grammars may have. The grammars' own end token stands for
        a complete text. Behind a draft that is not allowed everything is: nothing that is chosen
        there is kept."""
        masks = everything(len(rows.slots), self._vocab_size)
        plain, drafting = [], []
        first = np.flatnonzero(rows.behind == 0)
        counts = np.diff(first, append=len(rows.slots)) - 1
        for row, slot, count in zip(
            first.tolist(), rows.slots[first].tolist(), counts.tolist(), strict=True
        ):
            if count:
                drafting.append((self._matcher(slot), row, rows.drafts[row, :count].tolist()))
            else:
                plain.append((self._matcher(slot), row))
        shared = masks.view(np.int32)
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, shared)
        if drafting:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafting, shared)
        return masks

    def failures(self, slots: Int64Array) -> dict[int, str]:
        """By slot, why an answer cannot go on."""
        matchers = {slot: self._matcher(slot) for slot in slots.tolist()}
        return {
            slot: matcher.get_error().split("\n")[0]
            for slot, matcher in matchers.items()
            if matcher.is_error()
        }

    def append(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """counts[i] new outputs of slots[i], the first of tokens [n, most]. Tokens behind an end
        token are refused by a matcher that no step asks any more."""
        for slot, new, count in zip(slots.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            self._matcher(slot).consume_tokens(new[:count])

    def _matcher(self, slot: int) -> LLMatcher:
        return self._matchers[self._grammars[slot]]
