"""The numbers of plugins/row_numbers.py in the Triton language, one launch each."""

# Functions in the Triton language have no types that mypy could check.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from plugins.device.launch import padded
from plugins.row_numbers import EntryNumbers, WindowNumbers

_TILE = 128


@triton.jit(do_not_specialize=["token"])
def _window_numbers(
    positions, floor, tokens, keys, first_visible, second_visible, is_token, token,
    WINDOW: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    column = tl.arange(0, PADDED)
    key = position + column - (WINDOW - 1)
    key = tl.where(key >= tl.load(floor + row), key, -1)
    tl.store(keys + row * WINDOW + column, key, mask=column < WINDOW)
    # Position −1 sees nothing, and 0 // ratio is 0.
    if FIRST > 0:
        tl.store(first_visible + row, (position + 1) // FIRST)
    if SECOND > 0:
        tl.store(second_visible + row, (position + 1) // SECOND)
    if TOKENS:
        tl.store(is_token + row, (tl.load(tokens + row) == token).to(tl.uint8))


@triton.jit
def _closed(position, owned, RATIO: tl.constexpr):
    """The entry that a row closes and owns, or −1."""
    return tl.where(owned & ((position + 1) % RATIO == 0), position // RATIO, -1)


@triton.jit(do_not_specialize=["num_rows", "num_requests", "capacity"])
def _entry_numbers(
    positions, owners, query_start, write_floor, first_entries, second_entries, is_first, newest,
    before,
    num_rows, num_requests, capacity, FIRST: tl.constexpr, SECOND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = row < num_rows
    position = tl.load(positions + row, mask=there, other=-1)
    owner = tl.load(owners + row, mask=there, other=0)
    owned = position >= tl.load(write_floor + owner, mask=there, other=0)
    if FIRST > 0:
        tl.store(first_entries + row, _closed(position, owned, FIRST), mask=there)
    if SECOND > 0:
        tl.store(second_entries + row, _closed(position, owned, SECOND), mask=there)
    start = tl.load(query_start + owner, mask=there, other=0)
    tl.store(is_first + row, (row == start).to(tl.uint8), mask=there)
    end = tl.load(query_start + owner + 1, mask=there, other=0)
    tl.store(newest + row, tl.where(row >= end - capacity, position, -1), mask=there)
    # The same numbers name requests.
    is_request = row < num_requests
    start = tl.load(query_start + row, mask=is_request, other=0)
    first = tl.load(positions + start, mask=is_request & (start < num_rows), other=-1)
    tl.store(before + row, first - 1, mask=is_request)


def _made(
    ratios: Sequence[int], like: torch.Tensor
) -> tuple[dict[int, torch.Tensor], tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Memory for each of up to two ratios, and what a kernel is given of both: 0 is no ratio."""
    assert len(ratios) <= 2, "entries come in two ratios at most"
    made = {ratio: torch.empty_like(like) for ratio in ratios}
    absent = 2 - len(ratios)
    return made, (*made.values(), *[like] * absent), (*ratios, *[0] * absent)


def window_numbers(
    positions: torch.Tensor,
    floor: torch.Tensor,
    window: int,
    *,
    ratios: Sequence[int],
    tokens: torch.Tensor | None,
    token: int | None,
) -> WindowNumbers:
    rows = positions.shape[0]
    keys = positions.new_empty((rows, window))
    visible, places, given = _made(ratios, positions)
    is_token = None
    if tokens is not None and token is not None:
        is_token = torch.empty(rows, dtype=torch.bool, device=positions.device)
    if rows:
        _window_numbers[(rows,)](
            positions, floor, positions if tokens is None else tokens, keys, *places,
            keys if is_token is None else is_token.view(torch.uint8),
            -1 if token is None else token, window, padded(window), *given,
            is_token is not None, num_warps=1,
        )  # fmt: skip
    return WindowNumbers(keys, visible, is_token)


def entry_numbers(
    positions: torch.Tensor,
    owners: torch.Tensor,
    query_start: torch.Tensor,
    write_floor: torch.Tensor,
    *,
    ratios: Sequence[int],
    capacity: int,
) -> EntryNumbers:
    rows, requests = positions.shape[0], write_floor.shape[0]
    entries, places, given = _made(ratios, positions)
    is_first = torch.empty(rows, dtype=torch.bool, device=positions.device)
    newest, before = torch.empty_like(positions), torch.empty_like(write_floor)
    most = max(rows, requests)
    if most:
        _entry_numbers[(triton.cdiv(most, _TILE),)](
            positions, owners, query_start, write_floor, *places, is_first.view(torch.uint8),
            newest, before, rows, requests, capacity, *given, _TILE, num_warps=4,
        )  # fmt: skip
    return EntryNumbers(entries, is_first, newest, before)
