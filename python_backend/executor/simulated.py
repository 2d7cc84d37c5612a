"""An executor that computes nothing and believes nothing: for tests and benchmarks of the core.

It keeps a shadow of every page (which position of which request life stands in which row) and
does with it what a real executor does with bytes: writes the rows that the floors allow, reads
the windows, pairs and global history that the network reads. Whatever is missing, foreign, shared
or stale raises PlanError. The sampled token is a hash of the token history as found through the
page tables, so a wrong table that slips through still gives wrong tokens.

With drafting it proposes the right tokens, one in three replaced by a wrong one, and checks that
the drafter's context is that of final rows. Rejected rows stay in the shadow as they would in
memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from python_backend.request import LogProbs
from python_backend.settings import CoreLimits
from python_backend.step_plan import DraftBlocks, PromptPiece, StepPlan, StepResult

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

TAIL_CAPACITY = 8


class PlanError(AssertionError):
    """A step that a real executor could not run correctly."""


def next_token(history: Int32Array, vocab_size: int, seed: int, output_index: int) -> int:
    """The token after `history`: any fixed function of everything that may matter."""
    digest = xxhash.xxh3_64(np.ascontiguousarray(history).data, seed=seed)
    digest.update(output_index.to_bytes(8, "little"))
    return digest.intdigest() % vocab_size


def guesses(
    history: Int32Array, vocab_size: int, seed: int, output_index: int, count: int
) -> tuple[list[int], list[float]]:
    """`count` drafts after `history`, and P(accepted) of each, which knows nothing of the truth."""
    drafts, confidence = list[int](), list[float]()
    for k in range(count):
        token = next_token(history, vocab_size, seed, output_index + k)
        luck = xxhash.xxh3_64_intdigest(history.tobytes() + b"luck")
        drafts.append(token if luck % 3 else (token + 1) % vocab_size)
        confidence.append((luck >> 8) % 101 / 100)
        history = np.append(history, np.int32(token))
    return drafts, confidence


class SimulatedExecutor:
    """Checks every plan against a shadow of the memory that `limits` describes."""

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        num_slots = limits.max_batch_size
        global_rows = (limits.num_global_pages, limits.global_page_tokens)
        window_rows = (limits.num_window_pages, limits.window_page_tokens)
        self._global_position = np.full(global_rows, -1, dtype=np.int64)
        self._global_token = np.full(global_rows, -1, dtype=np.int32)
        self._window_position = np.full(window_rows, -1, dtype=np.int64)
        self._window_life = np.zeros(window_rows, dtype=np.int64)
        self._window_is_decoder = np.zeros(window_rows, dtype=bool)
        self._context_position = np.full(window_rows, -1, dtype=np.int64)
        self._context_life = np.zeros(window_rows, dtype=np.int64)
        self._tail_position = np.full((num_slots, TAIL_CAPACITY), -1, dtype=np.int64)
        self._life = np.zeros(num_slots, dtype=np.int64)
        self._next_position = np.zeros(num_slots, dtype=np.int64)
        self._floors = np.zeros((num_slots, 3), dtype=np.int64)
        self._num_lives = 0

    def run(self, plan: StepPlan) -> StepResult:
        arrays = plan.arrays
        counts = np.diff(arrays.query_start)
        _expect(len(np.unique(plan.slots)) == len(plan.slots), "a slot stands in the step twice")
        _expect(arrays.query_start[0] == 0 and bool((counts > 0).all()), "a request has no row")
        _expect(arrays.query_start[-1] == arrays.num_rows, "rows and row ranges differ")
        _expect(arrays.num_rows <= self._limits.max_num_tokens, "the token budget is exceeded")
        owned = plan.tables.window_pages[plan.tables.window_pages != 0]
        _expect(len(np.unique(owned)) == len(owned), "a window page belongs to two")
        owners = np.bincount(
            plan.tables.global_pages.ravel(), minlength=self._limits.num_global_pages
        )
        tokens = np.full(arrays.num_requests, -1, dtype=np.int32)
        num_accepted = np.zeros(arrays.num_requests, dtype=np.int64)
        blocks = DraftBlocks(
            np.zeros((arrays.num_requests, self._limits.most_drafts), dtype=np.int32),
            np.full((arrays.num_requests, self._limits.most_drafts), np.nan, dtype=np.float32),
        )
        for r in range(arrays.num_requests):
            positions = np.arange(counts[r], dtype=np.int64) + arrays.first_position[r]
            self._begin(plan, r)
            self._write_window(plan, r, positions)
            self._write_global(plan, r, positions, owners)
            self._pair_up(plan, r, positions)
            self._read_window(plan, r)
            history = self._read_global(plan, r, positions)
            if arrays.wants_logits[r]:
                tokens[r], num_accepted[r] = self._choose(plan, r, history)
            final = positions[: len(positions) - plan.num_drafts[r] + num_accepted[r]]
            self._next_position[plan.slots[r]] = final[-1] + 1
            if plan.wants_drafts[r]:
                self._keep_context(plan, r, final)
                if arrays.wants_logits[r]:
                    known = np.append(history[: final[-1] + 1], tokens[r])
                    self._draft(plan, r, known, int(num_accepted[r]) + 1, blocks)
        drafts = blocks if self._limits.draft else None
        judgements = [self._judge(plan, piece) for piece in plan.prompt_pieces]
        return StepResult(tokens, num_accepted, drafts, prompt_logprobs=judgements)

    def _judge(self, plan: StepPlan, piece: PromptPiece) -> LogProbs:
        """Each target's own number, negative, in the place of its log probability."""
        arrays, r = plan.arrays, piece.request
        rows = piece.rows - arrays.query_start[r]
        positions = arrays.first_position[r] + rows
        _expect(bool((rows >= 0).all()), "a prompt row belongs to another request")
        _expect(bool((piece.rows < arrays.query_start[r + 1]).all()), "as above, behind it")
        _expect(bool((positions >= arrays.decoder_floor[r]).all()), "a judging row was trimmed")
        within = arrays.tokens[piece.rows[1:]]
        _expect(bool((piece.targets[:-1] == within).all()), "a target is not the next token")
        alternatives = np.broadcast_to(piece.targets[:, None], (len(rows), piece.num_top))
        chosen = -piece.targets.astype(np.float32)
        return LogProbs(chosen, alternatives, -alternatives.astype(np.float32))

    def _choose(self, plan: StepPlan, r: int, history: Int32Array) -> tuple[int, int]:
        """The token after the last draft that stays, and how many do."""
        num_drafts = int(plan.num_drafts[r])
        end, seed = len(history) - num_drafts, int(plan.sampling.seed[r])
        _expect(end > plan.arrays.first_position[r], f"slot {plan.slots[r]} has no row but drafts")
        for k in range(num_drafts + 1):
            index = int(plan.sampling.output_index[r]) + k
            token = next_token(history[: end + k], self._limits.vocab_size, seed, index)
            if k == num_drafts or token != history[end + k]:
                break
        return token, k

    def _keep_context(self, plan: StepPlan, r: int, final: Int64Array) -> None:
        kept = final[final >= plan.arrays.decoder_floor[r]]
        pages, rows = self._window_cells(plan, r, kept)
        self._context_position[pages, rows] = kept
        self._context_life[pages, rows] = self._life[plan.slots[r]]

    def _draft(
        self, plan: StepPlan, r: int, known: Int32Array, num_new: int, blocks: DraftBlocks
    ) -> None:
        """Behind the last of `known`, from the context of the window below it."""
        last = len(known) - 1
        floor = max(int(plan.arrays.decoder_floor[r]), last - self._limits.window)
        positions = np.arange(floor, last, dtype=np.int64)
        pages, rows = self._window_cells(plan, r, positions)
        found = (self._context_position[pages, rows] == positions) & (pages > 0)
        found &= self._context_life[pages, rows] == self._life[plan.slots[r]]
        _expect(bool(found.all()), f"slot {plan.slots[r]} drafts from a row that is not final")
        blocks.tokens[r], blocks.confidence[r] = guesses(
            known,
            self._limits.vocab_size,
            int(plan.sampling.seed[r]),
            int(plan.sampling.output_index[r]) + num_new,
            blocks.tokens.shape[1],
        )

    def _begin(self, plan: StepPlan, r: int) -> None:
        """A life starts at its replay start and goes on without gaps under the same floors."""
        slot, arrays = plan.slots[r], plan.arrays
        first = arrays.first_position[r]
        floors = [arrays.encoder_floor[r], arrays.decoder_floor[r], arrays.write_floor[r]]
        if plan.fresh[r]:
            self._num_lives += 1
            self._life[slot] = self._num_lives
            self._floors[slot] = floors
            self._tail_position[slot] = -1
            _expect(first == floors[0], f"slot {slot} starts at {first}, not at its replay start")
        else:
            expected = self._next_position[slot]
            _expect(first == expected, f"slot {slot} runs {first} where {expected} comes next")
            _expect(bool((self._floors[slot] == floors).all()), f"slot {slot} changed its floors")

    def _write_window(self, plan: StepPlan, r: int, positions: Int64Array) -> None:
        pages, rows = self._window_cells(plan, r, positions)
        _expect(bool((pages > 0).all()), f"slot {plan.slots[r]} has no window page for a new row")
        cells = np.unique(pages.astype(np.int64) * self._limits.window_page_tokens + rows)
        _expect(len(cells) == len(positions), "two rows of a step share a window row")
        self._window_position[pages, rows] = positions
        self._window_life[pages, rows] = self._life[plan.slots[r]]
        self._window_is_decoder[pages, rows] = positions >= plan.arrays.decoder_floor[r]

    def _write_global(
        self, plan: StepPlan, r: int, positions: Int64Array, owners: npt.NDArray[np.intp]
    ) -> None:
        arrays = plan.arrays
        tokens = arrays.tokens[arrays.query_start[r] : arrays.query_start[r + 1]]
        new = positions >= arrays.write_floor[r]
        pages, rows = self._global_cells(plan, r, positions)
        _expect(bool((pages > 0).all()), f"slot {plan.slots[r]} has no global page for a row")
        _expect(bool((owners[pages[new]] == 1).all()), "a shared global page is written")
        self._global_position[pages[new], rows[new]] = positions[new]
        self._global_token[pages[new], rows[new]] = tokens[new]
        stored = self._global_token[pages, rows]
        _expect(bool((stored == tokens).all()), "a replayed row has another token than its page")

    def _pair_up(self, plan: StepPlan, r: int, positions: Int64Array) -> None:
        """An odd row above the write floor closes a pair and needs the row before it."""
        slot, first = plan.slots[r], int(positions[0])
        if first % 2 and first >= plan.arrays.write_floor[r]:
            before = self._tail_position[slot, (first - 1) % TAIL_CAPACITY]
            _expect(before == first - 1, f"slot {slot} lost the open pair before {first}")
        newest = positions[-TAIL_CAPACITY:]
        self._tail_position[slot, newest % TAIL_CAPACITY] = newest

    def _read_window(self, plan: StepPlan, r: int) -> None:
        """The rows before the step's first that its first row attends to, in both segments."""
        arrays, first = plan.arrays, int(plan.arrays.first_position[r])
        window_start = first - self._limits.window + 1
        for floor, decoder in ((arrays.encoder_floor[r], False), (arrays.decoder_floor[r], True)):
            positions = np.arange(max(int(floor), window_start), first, dtype=np.int64)
            pages, rows = self._window_cells(plan, r, positions)
            found = (self._window_position[pages, rows] == positions) & (pages > 0)
            found &= self._window_life[pages, rows] == self._life[plan.slots[r]]
            if decoder:
                found &= self._window_is_decoder[pages, rows]
            _expect(bool(found.all()), f"slot {plan.slots[r]} reads a window row that is not its")

    def _read_global(self, plan: StepPlan, r: int, positions: Int64Array) -> Int32Array:
        """All tokens up to the last row, as the global pages hold them."""
        arrays, first = plan.arrays, int(positions[0])
        everything = np.arange(positions[-1] + 1, dtype=np.int64)
        pages, rows = self._global_cells(plan, r, everything)
        found = (self._global_position[pages, rows] == everything) & (pages > 0)
        _expect(bool(found.all()), f"slot {plan.slots[r]} reads a global row that is not its")
        tokens: Int32Array = self._global_token[pages, rows]
        width = arrays.history.shape[1]
        before = np.concatenate([np.full(width, -1, dtype=np.int32), tokens[:first]])
        _expect(
            bool((arrays.history[r] == before[len(before) - width :]).all()),
            f"slot {plan.slots[r]} has another n-gram history than its tokens",
        )
        return tokens

    def _window_cells(
        self, plan: StepPlan, r: int, positions: Int64Array
    ) -> tuple[Int32Array, Int64Array]:
        table, rows = plan.tables.window_pages, plan.tables.window_page_tokens
        columns = (positions // rows) % table.shape[1]
        return table[plan.slots[r], columns], positions % rows

    def _global_cells(
        self, plan: StepPlan, r: int, positions: Int64Array
    ) -> tuple[Int32Array, Int64Array]:
        rows = plan.tables.global_page_tokens
        return plan.tables.global_pages[plan.slots[r], positions // rows], positions % rows


def _expect(holds: bool | np.bool_, otherwise: str) -> None:
    if not holds:
        raise PlanError(otherwise)
