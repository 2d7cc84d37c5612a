"""The numbers of a step's rows, against loops over rows; both ways of making them."""

from __future__ import annotations

import importlib
import types

import pytest
import torch
from kernel_oracle import DEVICE

import plugins.row_numbers


@pytest.fixture(params=["pieces", "kernel"])
def numbers(request: pytest.FixtureRequest) -> types.ModuleType:
    if request.param == "pieces":
        return plugins.row_numbers
    triton = pytest.importorskip("triton")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("the kernels are not interpreted (TRITON_INTERPRET=1)")
    return importlib.import_module("plugins.device.row_numbers")


@pytest.mark.parametrize("ratios", [(), (2,), (1, 2)], ids=str)
def test_window_numbers(numbers: types.ModuleType, ratios: tuple[int, ...]) -> None:
    positions, floors = [0, 1, 2, 11, 12, 13, 130, -1], [0, 0, 1, 0, 0, 4, 129, 0]
    tokens = [7, 3, 7, 7, 0, 3, 4, 7]
    made = numbers.window_numbers(
        torch.tensor(positions, device=DEVICE),
        torch.tensor(floors, device=DEVICE),
        12,
        ratios=ratios,
        tokens=torch.tensor(tokens, device=DEVICE),
        token=7,
    )
    expected = [
        [key if key >= floor else -1 for key in range(position - 11, position + 1)]
        for position, floor in zip(positions, floors, strict=True)
    ]
    assert made.keys.tolist() == expected
    assert list(made.visible) == list(ratios)
    for ratio in ratios:
        assert made.visible[ratio].tolist() == [(p + 1) // ratio for p in positions]
    assert made.is_token is not None
    assert made.is_token.tolist() == [token == 7 for token in tokens]
    plain = numbers.window_numbers(
        made.keys[0, :0], made.keys[0, :0], 12, ratios=(), tokens=None, token=None
    )
    assert plain.keys.shape == (0, 12)
    assert plain.is_token is None


@pytest.mark.parametrize("capacity", [1, 3])
@pytest.mark.parametrize("ratios", [(2,), (1, 2)], ids=str)
def test_entry_numbers(numbers: types.ModuleType, ratios: tuple[int, ...], capacity: int) -> None:
    """Requests of 5, 1 and 2 rows, one without rows, and two padding rows behind the third's."""
    owners = [0, 0, 0, 0, 0, 1, 2, 2, 0, 0]
    positions = [6, 7, 8, 9, 10, 0, 4, 5, -1, -1]
    query_start, write_floor = [0, 5, 6, 8, 8], [8, 0, 6, 0]
    made = numbers.entry_numbers(
        *(torch.tensor(x, device=DEVICE) for x in (positions, owners, query_start, write_floor)),
        ratios=ratios,
        capacity=capacity,
    )
    for ratio in ratios:
        expected = [
            p // ratio if p >= write_floor[r] and (p + 1) % ratio == 0 else -1
            for p, r in zip(positions, owners, strict=True)
        ]
        assert made.entries[ratio].tolist() == expected
    assert made.is_first.tolist() == [True] + [False] * 4 + [True, True] + [False] * 3
    newest = [
        p if row >= query_start[r + 1] - capacity else -1
        for row, (p, r) in enumerate(zip(positions, owners, strict=True))
    ]
    assert made.newest.tolist() == newest
    assert made.before.tolist() == [5, -1, 3, -2]
