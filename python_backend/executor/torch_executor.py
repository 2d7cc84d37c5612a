"""Runs a step over paged pools: ragged prefill, replay and decode rows of all requests in one
forward, of the torch network or of whatever else computes its logits.

The executor owns the pools' memory, the scheduler owns the page tables; a step reads the rows of
the tables that its slots name. Guarantee on a CPU: a row's result depends on its own request only
(the operators work in fixed row tiles), so batch composition never changes a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import RaggedBatch
from engine.network import Network
from engine.paged_cache import CachePools, PagedCache, StepTables
from plugins.sample import sample
from python_backend.step_plan import SamplingArrays, StepPlan, StepResult


class PagedExecutor(ABC):
    """`run` is synchronous: when it returns, every cache row of the step is written."""

    def __init__(self, pools: CachePools, *, device: str = "cpu") -> None:
        self._pools = pools
        self._device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        batch = plan.arrays.to_torch(self._device)
        logits = self._logits(batch, self._step_tables(plan))
        tokens = np.full(plan.arrays.num_requests, -1, dtype=np.int32)
        wanted = plan.arrays.wants_logits
        if wanted.any():
            tokens[wanted] = self._sample(logits, plan.sampling, wanted)
        return StepResult(tokens)

    @abstractmethod
    def _logits(self, batch: RaggedBatch, tables: StepTables) -> torch.Tensor:
        """Logits [Tl, vocab] of `batch.logit_rows`; writes the step's rows to the pools."""

    def _step_tables(self, plan: StepPlan) -> StepTables:
        """Only the columns that the step can reach: a table may be sized for a million tokens."""
        last = plan.arrays.first_position + np.diff(plan.arrays.query_start) - 1
        columns = int(last.max()) // plan.tables.global_page_tokens + 1
        return StepTables(
            slots=self._tensor(plan.slots.astype(np.int64)),
            global_pages=self._tensor(plan.tables.global_pages[plan.slots, :columns]),
            window_pages=self._tensor(plan.tables.window_pages[plan.slots]),
        )

    def _sample(
        self, logits: torch.Tensor, arrays: SamplingArrays, wanted: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int32]:
        tokens = sample(
            logits,
            self._tensor(arrays.temperature[wanted]),
            self._tensor(arrays.top_k[wanted]),
            self._tensor(arrays.top_p[wanted]),
            self._tensor(arrays.seed[wanted].view(np.int64)),
            self._tensor(arrays.output_index[wanted]),
        )
        return tokens.to(torch.int32).cpu().numpy()

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class TorchExecutor(PagedExecutor):
    """Runs the network, in Python."""

    def __init__(self, network: Network, pools: CachePools, *, device: str = "cpu") -> None:
        super().__init__(pools, device=device)
        self._network = network

    def _logits(self, batch: RaggedBatch, tables: StepTables) -> torch.Tensor:
        return self._network.forward(batch, PagedCache(self._pools, tables)).logits
