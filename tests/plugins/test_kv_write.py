"""The cache write: which bytes change, and to what."""

import pytest
import torch
from small_float_oracle import E4M3, mx_group

from plugins.formats.records import main_record, window_record
from plugins.formats.rows import PackedRows, ValueRows
from plugins.kv_write import kv_write
from plugins.kv_write.cases import CASES, KvWriteCase


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_named_slots_are_written_and_no_other_byte(case: KvWriteCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    store, values = operands["rows"], operands["values"]
    kv_write(**operands)
    written = {slot: i for i, slot in enumerate(case.slots) if slot >= 0}
    for slot in range(case.num_slots):
        row = store.data[slot]
        if slot in written:
            assert torch.equal(row, store.layout.pack(values[written[slot]]))
        else:
            assert (row == 0xA5).all()


def test_stored_bytes_are_the_record() -> None:
    data = torch.zeros(2, 66, dtype=torch.uint8)
    values = torch.linspace(-3, 3, 64)
    kv_write(values[None], PackedRows(data, window_record(64)), torch.tensor([1]))
    codes0, scale0 = mx_group(values[:32].tolist(), 1e-4, E4M3)
    codes1, scale1 = mx_group(values[32:].tolist(), 1e-4, E4M3)
    assert data[1].tolist() == [*codes0, *codes1, scale0, scale1]
    assert data[0].tolist() == [0] * 66


def test_packed_and_value_stores_read_back_the_same_numbers() -> None:
    layout = main_record(64)
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    packed = PackedRows(torch.zeros(4, layout.bytes_per_row, dtype=torch.uint8), layout)
    plain = ValueRows(torch.zeros(4, 64, dtype=torch.float64), layout)
    slots = torch.tensor([2, -1, 0])
    for store in (packed, plain):
        kv_write(values, store, slots)
    asked = torch.tensor([[0, 1], [2, -1]])
    read = packed.read(asked, torch.float64)
    assert torch.equal(read, plain.read(asked, torch.float64))
    assert (read[0, 0] - values[2]).abs().max() < 0.6
    assert torch.equal(read[1, 1], torch.zeros(64, dtype=torch.float64))
