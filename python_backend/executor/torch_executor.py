"""Runs a step over paged pools: ragged prefill, replay, decode and verify rows of all requests in
one forward, of the torch network or of whatever else computes its logits, then a draft pass.

The executor owns the pools' memory, the scheduler owns the page tables; a step reads the rows of
the tables that its slots name. Guarantee on a CPU: a row's result depends on its own request only
(the operators work in fixed row tiles), so batch composition never changes a token.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import DraftBatch, RaggedBatch
from engine.network import Network
from engine.network.decoder import DecoderOutput
from engine.network.draft import DraftOutput
from engine.paged_cache import CachePools, PagedCache, StepTables
from python_backend.drafting.verification import verify
from python_backend.generation.log_probs import log_probs_of
from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Choice, Sampler
from python_backend.kv.groups import ragged_columns
from python_backend.request import LogProbs
from python_backend.step_plan import DraftBlocks, PromptPiece, StepPlan, StepResult


class DraftContext(NamedTuple):
    """Rows that are final: draft features [n, targets·D], request [n] and position [n]."""

    features: torch.Tensor
    request: torch.Tensor
    positions: torch.Tensor


class PagedExecutor(ABC):
    """`run` is synchronous: when it returns, every cache row of the step is written."""

    def __init__(self, pools: CachePools, *, device: str = "cpu") -> None:
        self._pools = pools
        self._device = device
        self._sampler = Sampler(pools.tails.shape[0], pools.layout.config.vocab_size, device=device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        arrays, num_drafts = plan.arrays, plan.num_drafts
        for beginning in plan.beginnings:
            self._sampler.begin(*beginning)
        judged = [piece.rows for piece in plan.prompt_pieces]
        batch = arrays.to_torch(
            self._device,
            num_drafts=num_drafts,
            more_logit_rows=np.concatenate(judged) if judged else None,
        )
        tables = self._step_tables(plan)
        started = time.monotonic()
        output = self._forward(batch, tables)
        seconds = {"forward": time.monotonic() - started}
        tokens = np.full(arrays.num_requests, -1, dtype=np.int32)
        num_accepted = np.zeros(arrays.num_requests, dtype=np.int64)
        wanted = np.flatnonzero(arrays.wants_logits)
        logprobs: Mapping[int, LogProbs] = {}
        num_choices = int((num_drafts[wanted] + 1).sum())
        if len(wanted):
            rows = LogitRows.of_step(
                plan.slots[wanted].astype(np.int64),
                plan.sampling.output_index[wanted],
                _drafts_of(plan),
                num_drafts[wanted],
            )
            started = time.monotonic()
            choices, logprobs = self._choose(output.logits[:num_choices], rows)
            verified = verify(choices, _drafts_of(plan), num_drafts[wanted])
            tokens[wanted], num_accepted[wanted] = verified.tokens, verified.num_accepted
            self._sampler.append(rows, verified.num_accepted, verified.tokens)
            seconds["sample"] = time.monotonic() - started
        drafts = None
        if plan.wants_drafts.any():
            started = time.monotonic()
            drafts = self._propose(plan, batch, tables, output, tokens, num_accepted)
            seconds["draft"] = time.monotonic() - started
        judgements = self._judge(plan.prompt_pieces, output.logits[num_choices:])
        return StepResult(tokens, num_accepted, drafts, logprobs, judgements, seconds)

    @abstractmethod
    def _forward(self, batch: RaggedBatch, tables: StepTables) -> DecoderOutput:
        """Logits of `batch.logit_rows` and the decoder rows' draft features; writes the step's
        rows to the pools."""

    @abstractmethod
    def _draft(
        self, context: DraftContext, anchors: DraftBatch | None, tables: StepTables
    ) -> DraftOutput | None:
        """Store the context, then draft behind the anchors, None for none."""

    def _step_tables(self, plan: StepPlan) -> StepTables:
        """Only the columns that the step can reach: a table may be sized for a million tokens."""
        last = plan.arrays.first_position + np.diff(plan.arrays.query_start) - 1
        columns = int(last.max()) // plan.tables.global_page_tokens + 1
        return StepTables(
            slots=self._tensor(plan.slots.astype(np.int64)),
            global_pages=self._tensor(plan.tables.global_pages[plan.slots, :columns]),
            window_pages=self._tensor(plan.tables.window_pages[plan.slots]),
        )

    def _choose(self, logits: torch.Tensor, rows: LogitRows) -> Choice:
        """One token per row of logits [Tl, vocab], which are those of `rows`."""
        return self._sampler.choose(logits, rows)

    def _judge(self, pieces: Sequence[PromptPiece], logits: torch.Tensor) -> list[LogProbs]:
        """Of prompt tokens, by the logits [P, vocab] of the rows before them, piece by piece."""
        judgements, start = [], 0
        for piece in pieces:
            targets = self._tensor(piece.targets.astype(np.int64))
            mine = logits[start : start + len(targets)]
            made = log_probs_of(np.arange(len(targets)), mine, targets, piece.num_top)
            judgements.append(LogProbs(*made))
            start += len(targets)
        return judgements

    def _propose(
        self,
        plan: StepPlan,
        batch: RaggedBatch,
        tables: StepTables,
        output: DecoderOutput,
        tokens: npt.NDArray[np.int32],
        num_accepted: npt.NDArray[np.int64],
    ) -> DraftBlocks | None:
        """Store the context of the rows that stay, of those who want drafts; draft for those of
        them who have a new token."""
        arrays = plan.arrays
        rejected = plan.num_drafts - num_accepted
        ends = arrays.first_position + np.diff(arrays.query_start) - rejected
        rows = batch.decoder_rows
        request, positions = batch.request[rows], batch.positions[rows]
        stays = positions < self._tensor(np.where(plan.wants_drafts, ends, 0))[request]
        context = DraftContext(output.draft_features[stays], request[stays], positions[stays])
        drafting = np.flatnonzero(plan.wants_drafts & arrays.wants_logits)
        anchors = None
        if len(drafting):
            anchors = DraftBatch(
                anchors=self._tensor(tokens[drafting].astype(np.int64)),
                positions=self._tensor(ends[drafting]),
                request=self._tensor(drafting),
                floor=self._tensor(arrays.decoder_floor[drafting]),
            )
        made = self._draft(context, anchors, tables)
        if made is None:
            return None
        blocks = DraftBlocks(
            np.zeros((arrays.num_requests, made.tokens.shape[1]), dtype=np.int32),
            np.full((arrays.num_requests, made.tokens.shape[1]), np.nan, dtype=np.float32),
        )
        blocks.tokens[drafting] = made.tokens.cpu().numpy()
        blocks.confidence[drafting] = made.confidence.float().cpu().numpy()
        return blocks

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class TorchExecutor(PagedExecutor):
    """Runs the network, in Python."""

    def __init__(self, network: Network, pools: CachePools, *, device: str = "cpu") -> None:
        super().__init__(pools, device=device)
        self._network = network

    def _forward(self, batch: RaggedBatch, tables: StepTables) -> DecoderOutput:
        return self._network.forward(batch, PagedCache(self._pools, tables))

    def _draft(
        self, context: DraftContext, anchors: DraftBatch | None, tables: StepTables
    ) -> DraftOutput | None:
        cache = PagedCache(self._pools, tables)
        self._network.store_draft_context(*context, cache)
        return None if anchors is None else self._network.draft(anchors, cache)


def _drafts_of(plan: StepPlan) -> npt.NDArray[np.int32]:
    """The step's drafts, laid end to end."""
    arrays = plan.arrays
    ends, counts = arrays.query_start[1:], plan.num_drafts
    return arrays.tokens[ragged_columns(ends - counts, counts)]
