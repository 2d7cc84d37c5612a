"""What a step's forward and its draft pass read from the host, each as one upload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import DraftBatch, Int32Array, Int64Array, RaggedBatch, RowArrays, StepShape
from engine.paged_cache import StepTables
from engine.upload import Array, upload
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan

Integer = TypeVar("Integer", bound=np.integer[Any])


class StepInputs(NamedTuple):
    """On the device."""

    batch: RaggedBatch
    tables: StepTables


@dataclass(frozen=True)
class HostStep:
    """On the host: the rows, and the tables' columns that they can reach, since a table may be
    sized for a million tokens."""

    rows: RowArrays
    slots: Int64Array  # [R]
    global_pages: Int32Array  # [R, global columns]
    window_pages: Int32Array  # [R, window columns]
    global_page_tokens: int

    @staticmethod
    def of(plan: StepPlan) -> HostStep:
        judged = [piece.rows for piece in plan.prompt_pieces]
        rows = plan.arrays.to_rows(
            num_drafts=plan.num_drafts, more_logit_rows=np.concatenate(judged) if judged else None
        )
        tables = plan.tables
        columns = -(-rows.max_context // tables.global_page_tokens)
        return HostStep(
            rows=rows,
            slots=plan.slots.astype(np.int64),
            global_pages=tables.global_pages[plan.slots, :columns],
            window_pages=tables.window_pages[plan.slots],
            global_page_tokens=tables.global_page_tokens,
        )

    @staticmethod
    def nothing(limits: CoreLimits) -> HostStep:
        """No request, with the widths that the core's steps have."""
        none = np.empty(0, dtype=np.int64)
        rows = RowArrays(
            tokens=none,
            positions=none,
            request=none,
            query_start=np.zeros(1, dtype=np.int64),
            encoder_floor=none,
            decoder_floor=none,
            write_floor=none,
            history=np.empty((0, limits.history_width), dtype=np.int64),
            decoder_rows=none,
            logit_rows=none,
            max_context=0,
        )
        return HostStep(
            rows=rows,
            slots=none,
            global_pages=np.empty((0, 0), dtype=np.int32),
            window_pages=np.empty((0, limits.window_columns), dtype=np.int32),
            global_page_tokens=limits.global_page_tokens,
        )

    @property
    def shape(self) -> StepShape:
        return self.rows.shape

    def for_encoder(self) -> HostStep:
        return replace(self, rows=self.rows.for_encoder())

    def for_decoder(self) -> HostStep:
        rows = self.rows.for_decoder()
        columns = -(-rows.max_context // self.global_page_tokens)
        return replace(self, rows=rows, global_pages=self.global_pages[:, :columns])

    def padded(self, shape: StepShape) -> HostStep:
        """Padding requests have no page, not even the slot's tail, since no row is theirs."""
        requests, columns = shape.requests, -(-shape.max_context // self.global_page_tokens)
        return replace(
            self,
            rows=self.rows.padded(shape),
            slots=_within(self.slots, (requests,)),
            global_pages=_within(self.global_pages, (requests, columns)),
            window_pages=_within(self.window_pages, (requests, self.window_pages.shape[1])),
        )

    def arrays(self) -> tuple[Array, ...]:
        return (*self.rows.arrays(), self.slots, self.global_pages, self.window_pages)

    def bind(self, tensors: Sequence[torch.Tensor]) -> StepInputs:
        """The inputs whose tensors hold `arrays()`."""
        *rows, slots, global_pages, window_pages = tensors
        tables = StepTables(slots, global_pages, window_pages)
        return StepInputs(self.rows.to_torch(rows), tables)

    def upload(self, device: torch.device | str) -> StepInputs:
        return self.bind(upload(self.arrays(), device))


class DraftShape(NamedTuple):
    """Sizes that a draft pass is padded to."""

    requests: int
    rows: int
    anchors: int


class DraftInputs(NamedTuple):
    """On the device: final rows (index into the step's decoder rows, request and position, −1 for
    one that is not stored), anchors, and the step's tables without global pages."""

    rows: torch.Tensor  # [n]
    request: torch.Tensor  # [n]
    positions: torch.Tensor  # [n]
    anchors: DraftBatch
    tables: StepTables


@dataclass(frozen=True)
class HostDraft:
    """On the host."""

    rows: Int64Array  # [n]
    request: Int64Array  # [n]
    positions: Int64Array  # [n]
    anchors: Int64Array  # [4, A] token, position, request, floor
    slots: Int64Array  # [R]
    window_pages: Int32Array  # [R, window columns]

    @staticmethod
    def of(
        plan: StepPlan, step: HostStep, tokens: Int32Array, num_accepted: Int64Array
    ) -> HostDraft:
        """The context of the rows that stay, of those who want drafts; an anchor for those of them
        who have a new token."""
        arrays, rows = plan.arrays, step.rows
        rejected = plan.num_drafts - num_accepted
        ends = arrays.first_position + np.diff(arrays.query_start) - rejected
        request, positions = rows.request[rows.decoder_rows], rows.positions[rows.decoder_rows]
        kept = np.flatnonzero(positions < np.where(plan.wants_drafts, ends, 0)[request])
        who = np.flatnonzero(plan.wants_drafts & arrays.wants_logits)
        return HostDraft(
            rows=kept,
            request=request[kept],
            positions=positions[kept],
            anchors=np.stack([tokens[who], ends[who], who, arrays.decoder_floor[who]]),
            slots=step.slots,
            window_pages=step.window_pages,
        )

    @staticmethod
    def nothing(limits: CoreLimits) -> HostDraft:
        """No request, with the widths that the core's steps have."""
        none = np.empty(0, dtype=np.int64)
        return HostDraft(
            rows=none,
            request=none,
            positions=none,
            anchors=np.empty((4, 0), dtype=np.int64),
            slots=none,
            window_pages=np.empty((0, limits.window_columns), dtype=np.int32),
        )

    @property
    def shape(self) -> DraftShape:
        return DraftShape(len(self.slots), len(self.rows), self.anchors.shape[1])

    def padded(self, shape: DraftShape) -> HostDraft:
        """Padding rows are stored nowhere, padding anchors at position −1 see nothing."""
        requests, rows, anchors = shape
        return HostDraft(
            rows=_within(self.rows, (rows,)),
            request=_within(self.request, (rows,)),
            positions=_within(self.positions, (rows,), -1),
            anchors=_within(self.anchors, (4, anchors), [[0], [-1], [0], [0]]),
            slots=_within(self.slots, (requests,)),
            window_pages=_within(self.window_pages, (requests, self.window_pages.shape[1])),
        )

    def arrays(self) -> tuple[Array, ...]:
        return (
            self.rows,
            self.request,
            self.positions,
            self.anchors,
            self.slots,
            self.window_pages,
        )

    def bind(self, tensors: Sequence[torch.Tensor]) -> DraftInputs:
        """The inputs whose tensors hold `arrays()`."""
        rows, request, positions, anchors, slots, window_pages = tensors
        tables = StepTables(slots, window_pages[:, :0], window_pages)
        return DraftInputs(rows, request, positions, DraftBatch(*anchors.unbind()), tables)

    def upload(self, device: torch.device | str) -> DraftInputs:
        return self.bind(upload(self.arrays(), device))


def _within(
    array: npt.NDArray[Integer], shape: tuple[int, ...], value: npt.ArrayLike = 0
) -> npt.NDArray[Integer]:
    """`array` at the start of one of `shape`, of `value` elsewhere; np.pad takes ten times as
    long for what a step has, and a device waits for it."""
    larger = np.empty(shape, dtype=array.dtype)
    larger[...] = value
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger
