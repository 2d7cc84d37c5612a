"""The running requests as arrays indexed by slot, so that a decode step is a few vector operations.

The newest tokens of every slot stand in one ring `[num_slots, RING_TOKENS]`: the next input, the
n-gram history and appending need no request object. Drafts stand behind them, where they will be
if they stay. A request is visited in Python only to move a full ring, or a block to publish, into
its own buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.batch import StepArrays
from python_backend.drafting.rule import DraftRule
from python_backend.replay import ReplayPlan
from python_backend.scheduler.tracked import NO_SLOT, TrackedRequest
from python_backend.step_plan import DraftBlocks, SamplingArrays

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# A power of two above any history width, and more than a page of the released dims: publishing a
# block then empties the ring before it is full.
RING_TOKENS = 512
MAX_END_IDS = 32
NEVER = 1 << 62


class Appended(NamedTuple):
    """What was appended to n slots: row i of `tokens` [n, most], the first counts[i] of it; None
    is one for all. The first num_drafts[i] of these were drafts; None is none of all. `last` [n]
    is the last token of each."""

    tokens: Int32Array
    counts: Int64Array | None
    num_drafts: Int64Array | None
    last: Int32Array


class SlotTable:
    """State of `num_slots` slots. Counts are tokens.

    `num_computed` rows were given to a step, `num_processed` of them are done. They differ while
    a step runs; pages are retired by `num_processed`, because a running step still reads them.
    The `num_drafts` ≤ `most_drafts` tokens behind the known ones are proposed, nothing more;
    `survival` [num_slots, most_drafts] tells how likely each of them is accepted.
    """

    def __init__(self, num_slots: int, history_width: int, most_drafts: int) -> None:
        def zeros() -> Int64Array:
            return np.zeros(num_slots, dtype=np.int64)

        self.num_tokens = zeros()
        self.num_prompt_tokens = zeros()
        self.token_limit = zeros()
        self.num_computed = zeros()
        self.num_processed = zeros()
        self.num_drafts = zeros()
        self.survival = np.zeros((num_slots, most_drafts), dtype=np.float32)
        self.priority = zeros()
        self.speculates: BoolArray = np.zeros(num_slots, dtype=bool)
        self.next_publish = zeros()  # num_computed at which a further block can be published
        self.encoder_floor = zeros()
        self.decoder_floor = zeros()
        self.write_floor = zeros()
        self.fresh: BoolArray = np.zeros(num_slots, dtype=bool)
        self.last_token_at = np.full(num_slots, np.nan)  # seconds; NaN before the first token
        self.seed = np.zeros(num_slots, dtype=np.uint64)
        self.end_ids = np.full((1, num_slots), -1, dtype=np.int32)  # one row per end id
        self.requests: npt.NDArray[np.object_] = np.full(num_slots, None, dtype=object)
        self._ring = np.zeros((num_slots, RING_TOKENS), dtype=np.int32)
        self._num_synced = zeros()
        self._most_unsynced = RING_TOKENS - most_drafts  # there is always room for a step's drafts
        self._ring_start = np.arange(num_slots, dtype=np.int64) * RING_TOKENS
        self._input_offsets = np.arange(-history_width, 1, dtype=np.int64)

    def load(self, slot: int, tracked: TrackedRequest, replay: ReplayPlan) -> None:
        """Begin a life of the slot at `replay.replay_start`."""
        num_tokens = tracked.num_tokens
        self.num_tokens[slot] = self._num_synced[slot] = num_tokens
        self.num_prompt_tokens[slot] = tracked.num_prompt_tokens
        self.token_limit[slot] = tracked.token_limit
        self.num_computed[slot] = self.num_processed[slot] = replay.replay_start
        self.encoder_floor[slot] = replay.encoder_floor
        self.decoder_floor[slot] = replay.decoder_floor
        self.write_floor[slot] = replay.write_floor
        self.fresh[slot] = True
        self.num_drafts[slot] = 0
        self.priority[slot] = tracked.request.priority
        self.speculates[slot] = tracked.request.speculative
        self.last_token_at[slot] = tracked.moments.last_token
        self.seed[slot] = tracked.request.sampling.seed
        self._load_end_ids(slot, tracked.request.end_ids)
        positions = np.arange(max(0, num_tokens - RING_TOKENS), num_tokens)
        self._ring[slot, positions % RING_TOKENS] = tracked.tokens[positions]
        self.requests[slot] = tracked
        tracked.slot = slot

    def unload(self, slot: int) -> TrackedRequest:
        """End the slot's life; the request leaves with all its tokens."""
        self.sync(slot)
        tracked: TrackedRequest = self.requests[slot]
        tracked.slot = NO_SLOT
        tracked.moments.last_token = float(self.last_token_at[slot])
        self.requests[slot] = None
        return tracked

    def sync(self, slot: int) -> TrackedRequest:
        """Bring the request's own buffer up to date."""
        tracked: TrackedRequest = self.requests[slot]
        start, stop = int(self._num_synced[slot]), int(self.num_tokens[slot])
        positions = np.arange(start, stop)
        tracked.tokens[start:stop] = self._ring[slot, positions % RING_TOKENS]
        tracked.num_tokens = stop
        self._num_synced[slot] = stop
        return tracked

    def append(
        self, slots: Int64Array, num_accepted: Int64Array | None, tokens: Int32Array
    ) -> Appended:
        """Append the first num_accepted[i] drafts of each slot and tokens[i] behind them, all
        through the first end id. None: there were no drafts."""
        start = self.num_tokens[slots]
        if num_accepted is None or not num_accepted.any():
            self._ring[slots, start & (RING_TOKENS - 1)] = tokens
            self._set_num_tokens(slots, start + 1)
            return Appended(tokens[:, None], None, None, tokens)
        self._ring[slots, (start + num_accepted) & (RING_TOKENS - 1)] = tokens
        at = start[:, None] + np.arange(int(num_accepted.max()) + 1)
        appended = self._ring[slots[:, None], at & (RING_TOKENS - 1)]
        is_end = self.end_ids[:, slots, None] == appended
        counts = num_accepted + 1
        if is_end.any():
            is_end = is_end.any(axis=0)
            first_end = np.where(is_end.any(axis=1), is_end.argmax(axis=1), RING_TOKENS)
            counts = np.minimum(counts, first_end + 1)
        self._set_num_tokens(slots, start + counts)
        last = appended[np.arange(len(slots)), counts - 1]
        return Appended(appended, counts, np.minimum(num_accepted, counts), last)

    def propose(
        self, slots: Int64Array, rows: BoolArray, blocks: DraftBlocks | None, rule: DraftRule
    ) -> None:
        """Put what is worth verifying of the blocks [R, block] at `rows` behind the newest tokens
        of the slots."""
        if blocks is None:
            self.num_drafts[slots] = 0
            return
        drafts = blocks.tokens[rows]
        survival = rule.survival(blocks.confidence[rows])
        num_drafts = rule.lengths(survival, self.draft_room(slots))
        self.survival[slots] = survival
        at = self.num_tokens[slots][:, None] + np.arange(drafts.shape[1])
        cells = self._ring_start[slots][:, None] + (at & (RING_TOKENS - 1))
        proposed = np.arange(drafts.shape[1]) < num_drafts[:, None]
        self._ring.ravel()[cells[proposed]] = drafts[proposed]
        self.num_drafts[slots] = num_drafts

    def draft_room(self, slots: Int64Array) -> Int64Array:
        """Drafts that each slot can use: behind the last of them comes one token more."""
        room = self.token_limit[slots] - self.num_tokens[slots] - 1
        return np.maximum(room * self.speculates[slots], 0)

    def _set_num_tokens(self, slots: Int64Array, count: Int64Array) -> None:
        self.num_tokens[slots] = count
        for slot in slots[count - self._num_synced[slots] >= self._most_unsynced].tolist():
            self.sync(slot)

    def step_arrays(self, slots: Int64Array, counts: Int64Array, num_decodes: int) -> StepArrays:
        """The next counts[i] rows of each slot. The first `num_decodes` slots run their last
        known token and counts[i] − 1 drafts behind it, which the ring holds; the others are read
        from their requests."""
        first = self.num_computed[slots]
        query_start = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        tokens = np.empty(query_start[-1], dtype=np.int32)
        history = np.empty((len(slots), len(self._input_offsets) - 1), dtype=np.int32)

        width, decodes = history.shape[1], counts[:num_decodes]
        inputs = self._decode_inputs(slots[:num_decodes], first[:num_decodes], decodes)
        history[:num_decodes] = inputs[:, :width]
        if inputs.shape[1] == width + 1:
            tokens[:num_decodes] = inputs[:, width]
        else:
            runs = np.arange(inputs.shape[1] - width) < decodes[:, None]
            tokens[: query_start[num_decodes]] = inputs[:, width:][runs]
        for i in range(num_decodes, len(slots)):
            tracked: TrackedRequest = self.requests[slots[i]]
            start = int(first[i])
            row = slice(int(query_start[i]), int(query_start[i + 1]))
            tokens[row] = tracked.tokens[start : start + row.stop - row.start]
            history[i] = _last_tokens(tracked.tokens, start, width)
        return StepArrays(
            tokens=tokens,
            query_start=query_start,
            first_position=first,
            encoder_floor=self.encoder_floor[slots],
            decoder_floor=self.decoder_floor[slots],
            write_floor=self.write_floor[slots],
            history=history,
            wants_logits=first + counts >= self.num_tokens[slots],
        )

    def sampling_arrays(self, slots: Int64Array) -> SamplingArrays:
        return SamplingArrays(
            seed=self.seed[slots],
            output_index=self.num_tokens[slots] - self.num_prompt_tokens[slots],
        )

    def is_end(self, slots: Int64Array, tokens: Int32Array) -> BoolArray:
        """Which of the tokens end their slot's request."""
        ends: BoolArray = (self.end_ids[:, slots] == tokens).any(axis=0)
        return ends

    def _load_end_ids(self, slot: int, end_ids: frozenset[int]) -> None:
        missing = len(end_ids) - len(self.end_ids)
        if missing > 0:  # at most MAX_END_IDS rows ever
            self.end_ids = np.pad(self.end_ids, ((0, missing), (0, 0)), constant_values=-1)
        self.end_ids[:, slot] = -1
        self.end_ids[: len(end_ids), slot] = list(end_ids)

    def _decode_inputs(
        self, slots: Int64Array, positions: Int64Array, counts: Int64Array
    ) -> Int32Array:
        """History and tokens of the rows from `positions` on, −1 before 0: [n, history width +
        the most of `counts`], of which row i runs the first counts[i] behind its history."""
        offsets, most = self._input_offsets, int(counts.max(initial=1))
        if most > 1:
            offsets = np.concatenate([offsets, np.arange(1, most)])
        at = positions[:, None] + offsets
        cells = self._ring_start[slots][:, None] + (at & (RING_TOKENS - 1))
        inputs: Int32Array = self._ring.ravel().take(cells)
        if len(positions) and positions.min() < len(self._input_offsets) - 1:
            inputs[at < 0] = -1
        return inputs


def _last_tokens(tokens: Int32Array, stop: int, width: int) -> Int32Array:
    """The `width` tokens before `stop`, nearest last, −1 where there is none."""
    last = np.full(width, -1, dtype=np.int32)
    start = max(0, stop - width)
    last[width - (stop - start) :] = tokens[start:stop]
    return last
