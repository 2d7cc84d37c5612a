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

import numpy as np
import numpy.typing as npt
import torch

from engine.network import Network
from engine.network.decoder import DecoderOutput
from engine.network.draft import DraftOutput
from engine.paged_cache import CachePools, PagedCache
from engine.upload import upload
from python_backend.drafting.verification import verify
from python_backend.executor.inputs import DraftInputs, HostDraft, HostStep
from python_backend.generation.log_probs import log_probs_of
from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Choice, Sampler
from python_backend.kv.groups import ragged_columns
from python_backend.request import LogProbs
from python_backend.step_plan import DraftBlocks, PromptPiece, StepPlan, StepResult


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
        step = HostStep.of(plan)
        started = time.monotonic()
        output = self._forward(step)
        seconds = {"forward": time.monotonic() - started, **self._parts_of_forward()}
        tokens = np.full(arrays.num_requests, -1, dtype=np.int32)
        num_accepted = np.zeros(arrays.num_requests, dtype=np.int64)
        wanted = np.flatnonzero(arrays.wants_logits)
        logprobs: Mapping[int, LogProbs] = {}
        failures: Mapping[int, str] = {}
        num_choices = int((num_drafts[wanted] + 1).sum())
        if len(wanted):
            rows = LogitRows.of_step(
                plan.slots[wanted].astype(np.int64),
                plan.sampling.output_index[wanted],
                _drafts_of(plan),
                num_drafts[wanted],
            )
            started = time.monotonic()
            choices, logprobs, failed = self._choose(output.logits[:num_choices], rows)
            slots = plan.slots[wanted].tolist() if failed else ()
            failures = {i: failed[slot] for i, slot in enumerate(slots) if slot in failed}
            verified = verify(choices, _drafts_of(plan), num_drafts[wanted])
            tokens[wanted], num_accepted[wanted] = verified.tokens, verified.num_accepted
            self._sampler.append(rows, verified.num_accepted, verified.tokens)
            seconds["sample"] = time.monotonic() - started
        drafts = None
        if plan.wants_drafts.any():
            started = time.monotonic()
            drafts = self._propose(plan, step, output, tokens, num_accepted)
            seconds["draft"] = time.monotonic() - started
        judgements = self._judge(plan.prompt_pieces, output.logits[num_choices:])
        return StepResult(tokens, num_accepted, drafts, logprobs, judgements, seconds, failures)

    @abstractmethod
    def _forward(self, step: HostStep) -> DecoderOutput:
        """Logits of the step's logit rows and the decoder rows' draft features; writes the step's
        rows to the pools."""

    def _parts_of_forward(self) -> Mapping[str, float]:
        """Seconds of the last forward's parts that can be told apart."""
        return {}

    @abstractmethod
    def _draft(self, draft: HostDraft, features: torch.Tensor) -> DraftOutput | None:
        """Store the context, made of the step's draft features, then draft behind the anchors;
        None without any."""

    def _propose(
        self,
        plan: StepPlan,
        step: HostStep,
        output: DecoderOutput,
        tokens: npt.NDArray[np.int32],
        num_accepted: npt.NDArray[np.int64],
    ) -> DraftBlocks | None:
        """Drafts behind each request's newest token."""
        draft = HostDraft.of(plan, step, tokens, num_accepted)
        made = self._draft(draft, output.draft_features)
        if made is None:
            return None
        shape = (plan.arrays.num_requests, made.tokens.shape[1])
        blocks = DraftBlocks(
            np.zeros(shape, dtype=np.int32), np.full(shape, np.nan, dtype=np.float32)
        )
        who = draft.anchors[2]
        blocks.tokens[who] = made.tokens.cpu().numpy()
        blocks.confidence[who] = made.confidence.float().cpu().numpy()
        return blocks

    def _choose(self, logits: torch.Tensor, rows: LogitRows) -> Choice:
        """One token per row of logits [Tl, vocab], which are those of `rows`."""
        return self._sampler.choose(logits, rows)

    def _judge(self, pieces: Sequence[PromptPiece], logits: torch.Tensor) -> list[LogProbs]:
        """Of prompt tokens, by the logits [P, vocab] of the rows before them, piece by piece."""
        judgements, start = [], 0
        for piece in pieces:
            (targets,) = upload([piece.targets.astype(np.int64)], self._device)
            mine = logits[start : start + len(targets)]
            made = log_probs_of(np.arange(len(targets)), mine, targets, piece.num_top)
            judgements.append(LogProbs(*made))
            start += len(targets)
        return judgements


class TorchExecutor(PagedExecutor):
    """Runs the network, in Python."""

    def __init__(self, network: Network, pools: CachePools, *, device: str = "cpu") -> None:
        super().__init__(pools, device=device)
        self._network = network

    def _forward(self, step: HostStep) -> DecoderOutput:
        batch, tables = step.upload(self._device)
        return self._network.forward(batch, PagedCache(self._pools, tables))

    def _parts_of_forward(self) -> Mapping[str, float]:
        waited = self._network.engram_seconds
        return {} if waited is None else {"engram": waited}

    def _draft(self, draft: HostDraft, features: torch.Tensor) -> DraftOutput | None:
        return self._draft_behind(draft.upload(self._device), features)

    def _draft_behind(self, given: DraftInputs, features: torch.Tensor) -> DraftOutput | None:
        cache = PagedCache(self._pools, given.tables)
        kept = features.index_select(0, given.rows)
        self._network.store_draft_context(kept, given.request, given.positions, cache)
        return self._network.draft(given.anchors, cache) if len(given.anchors.anchors) else None


def _drafts_of(plan: StepPlan) -> npt.NDArray[np.int32]:
    """The step's drafts, laid end to end."""
    arrays = plan.arrays
    ends, counts = arrays.query_start[1:], plan.num_drafts
    return arrays.tokens[ragged_columns(ends - counts, counts)]
