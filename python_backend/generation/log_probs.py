"""Log probabilities of tokens and of their most probable alternatives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from python_backend.generation.tiles import tiles
from python_backend.request import LogProbs

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class RowLogProbs(NamedTuple):
    """Of rows that belong to several requests, as many alternatives for each as any wants."""

    chosen: npt.NDArray[np.float32]  # [L]
    top_ids: Int32Array  # [L, K]
    top: npt.NDArray[np.float32]  # [L, K]

    def of(self, rows: slice, count: int) -> LogProbs:
        """One request's, with `count` alternatives."""
        return LogProbs(self.chosen[rows], self.top_ids[rows, :count], self.top[rows, :count])


def log_probs_of(
    rows: Int64Array, logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> RowLogProbs:
    """`log_probs` of some rows of logits [L, V] and tokens [L], at least one."""
    made = [
        log_probs(logits.index_select(0, at), tokens[at], count)
        for at in (torch.from_numpy(part).to(logits.device) for part in tiles(rows, logits))
    ]
    return RowLogProbs(*(np.concatenate(parts) for parts in zip(*made, strict=True)))


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> RowLogProbs:
    """Of `tokens` [L] by logits [L, V], with the `count` most probable of each row.

    Of equal alternatives any may come first.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    total = wide.logsumexp(-1, keepdim=True)
    chosen = wide.gather(-1, tokens[:, None]) - total
    top = wide.topk(min(count, wide.shape[-1]), dim=-1)

    def array(values: torch.Tensor) -> npt.NDArray[np.float32]:
        return values.to(torch.float32).cpu().numpy()

    return RowLogProbs(
        array(chosen.squeeze(-1)),
        top.indices.to(torch.int32).cpu().numpy(),
        array(top.values - total),
    )
