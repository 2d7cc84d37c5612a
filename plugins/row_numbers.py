"""What depends on a step's rows and on no cache or layer: on a device in one launch each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from plugins.registry import runs_kernels


class WindowNumbers(NamedTuple):
    keys: torch.Tensor  # [T, W] positions of the row's window, oldest first, −1 below its floor
    visible: dict[int, torch.Tensor]  # ratio → [T] entries that the row sees
    is_token: torch.Tensor | None  # [T] bool: the row's token is `token`; None without one


class EntryNumbers(NamedTuple):
    entries: dict[int, torch.Tensor]  # ratio → [T] the entry that the row closes and owns, or −1
    is_first: torch.Tensor  # [T] bool: the row before it is not in the batch
    newest: torch.Tensor  # [T] position of one of its request's newest rows, −1 of the others
    before: torch.Tensor  # [R] the position before the request's first row


def window_numbers(
    positions: torch.Tensor,
    floor: torch.Tensor,
    window: int,
    *,
    ratios: Sequence[int] = (),
    tokens: torch.Tensor | None = None,
    token: int | None = None,
) -> WindowNumbers:
    """Of rows at int64 positions [T], none of which reads below its floor [T]. Tokens [T]."""
    if runs_kernels(positions):
        from plugins.device import row_numbers

        return row_numbers.window_numbers(
            positions, floor, window, ratios=ratios, tokens=tokens, token=token
        )
    behind = torch.arange(1 - window, 1, device=positions.device)
    keys = positions.unsqueeze(-1) + behind
    return WindowNumbers(
        torch.where(keys >= floor.unsqueeze(-1), keys, -1),
        {ratio: (positions + 1) // ratio for ratio in ratios},
        None if tokens is None or token is None else tokens == token,
    )


def entry_numbers(
    positions: torch.Tensor,
    owners: torch.Tensor,
    query_start: torch.Tensor,
    write_floor: torch.Tensor,
    *,
    ratios: Sequence[int],
    capacity: int,
) -> EntryNumbers:
    """Of rows at int64 positions [T] of requests `owners` [T], which begin at rows query_start
    [R + 1]. Who closes an entry at or above write_floor [R] owns it; a request has `capacity`
    newest rows."""
    if runs_kernels(positions):
        from plugins.device import row_numbers

        return row_numbers.entry_numbers(
            positions, owners, query_start, write_floor, ratios=ratios, capacity=capacity
        )
    row = torch.arange(positions.shape[0], device=positions.device)
    first_row, end_row = query_start[:-1], query_start[1:]
    owned = positions >= write_floor[owners]
    return EntryNumbers(
        {
            ratio: torch.where(owned & ((positions + 1) % ratio == 0), positions // ratio, -1)
            for ratio in ratios
        },
        row == first_row[owners],
        torch.where(row >= (end_row - capacity)[owners], positions, -1),
        positions[first_row] - 1,
    )
