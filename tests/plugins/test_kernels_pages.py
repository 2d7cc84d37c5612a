"""The look-up of rows in pages, against a loop over tables."""

from __future__ import annotations

import pytest
import torch
from kernel_oracle import DEVICE

pages = pytest.importorskip("plugins.device.pages")
if DEVICE == "cpu" and not pytest.importorskip("triton").knobs.runtime.interpret:
    pytest.skip("the kernels are not interpreted (TRITON_INTERPRET=1)", allow_module_level=True)


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("shape", [(1,), (3,), (3, 700), (0, 4)], ids=str)
def test_slots_of_rows(shape: tuple[int, ...], rows: int, ring: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    columns = 4
    table = torch.randint(0, 9, (2, columns + 3), generator=draw, dtype=torch.int32)[:, :columns]
    request = torch.randint(0, 2, shape[:1], generator=draw)
    position = torch.randint(-2, 8 * rows, shape, generator=draw)
    ours = pages.page_slots(
        table.to(DEVICE), request.to(DEVICE), position.to(DEVICE), rows, ring=ring
    )
    assert (ours.shape, ours.dtype) == (shape, torch.int64)
    flat, owner = position.flatten().tolist(), request.view(-1, *[1] * (len(shape) - 1))
    for found, at, r in zip(
        ours.flatten().tolist(), flat, owner.expand(shape).flatten().tolist(), strict=True
    ):
        column = at // rows % columns if ring else at // rows
        page = int(table[r, column]) if at >= 0 and column < columns else 0
        assert found == (page * rows + at % rows if page else -1)


def test_first_slots_of_pages() -> None:
    table = torch.tensor([[3, 0, 1, 9], [0, 2, 5, 9]], dtype=torch.int32)[:, :3]
    ours = pages.first_slots(table.to(DEVICE), 4, 5)
    assert ours.tolist() == [[12, -1, 4, -1, -1], [-1, 8, 20, -1, -1]]


def test_tail_slots_are_a_ring_of_the_slot() -> None:
    slots, request = torch.tensor([2, 0]), torch.tensor([0, 1, 1, 0])
    position = torch.tensor([0, 9, -1, 7])
    ours = pages.tail_slots(slots.to(DEVICE), request.to(DEVICE), position.to(DEVICE), 4)
    assert ours.tolist() == [8, 1, -1, 11]
