"""The cache-write and compressor kernels: every byte of the reference's records and no other."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_oracle import DEVICE, load_kernel, moved
from small_float_oracle import E4M3, mx_group

from plugins.compressor.cases import CASES as POOL_CASES
from plugins.compressor.cases import PREVIOUS_CASES, PoolCase, PreviousCase
from plugins.formats.records import (
    RecordLayout,
    index_fallback_record,
    index_record,
    main_record,
    window_record,
)
from plugins.formats.rows import PackedRows, ValueRows
from plugins.kv_write.cases import CASES, KvWriteCase

compressor = load_kernel("compressor")
kernel = load_kernel("kv_write")
rms_norm = load_kernel("norm").rms_norm
apply_rope = load_kernel("rope").apply_rope

RECORDS = {"main": main_record, "window": window_record, "index": index_record}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_named_slots_are_written_and_no_other_byte(case: KvWriteCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    layout, values = operands["rows"].layout, operands["values"]
    data = operands["rows"].data.to(DEVICE)
    kernel.kv_write(values.to(DEVICE), PackedRows(data, layout), operands["slots"].to(DEVICE))
    written = {slot: i for i, slot in enumerate(case.slots) if slot >= 0}
    for slot, row in enumerate(data.cpu()):
        if slot in written:
            assert torch.equal(row, layout.pack(values[written[slot]])), slot
        else:
            assert (row == 0xA5).all()


def hostile(width: int) -> torch.Tensor:
    """Ties, zeros of both signs, subnormals, saturation, and groups that hold NaN or infinity."""
    draw = torch.Generator().manual_seed(width)
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    ties = torch.cat([(grid[1:] + grid[:-1]) / 2, grid, -grid])
    rows = [
        torch.zeros(width),
        -torch.zeros(width),
        ties.repeat(-(-width // len(ties)))[:width],
        torch.randn(width, generator=draw) * 1e-30,
        torch.full((width,), 1e-42),
        torch.randn(width, generator=draw) * 1e30,
        (2.0 ** torch.randint(-140, 120, (width,), generator=draw).double()).float(),
        torch.arange(width) / 17.0 - width / 40,
        torch.linspace(-460, 460, width),
    ]
    rows += [torch.randn(width, generator=draw) * 10.0**e for e in range(-6, 7)]
    for bad in (math.nan, math.inf, -math.inf):
        row = torch.randn(width, generator=draw)
        row[5] = bad
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("width", [32, 96, 512])
@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hostile_rows_have_the_bytes_of_the_reference(
    width: int, name: str, dtype: torch.dtype
) -> None:
    layout: RecordLayout = RECORDS[name](width)
    values = hostile(width).to(dtype)
    count = len(values)
    data = torch.full((count, layout.bytes_per_row), 0xA5, dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(count - 1, -1, -1)
    kernel.kv_write(values.to(DEVICE), PackedRows(data, layout), slots.to(DEVICE))
    ours, expected = data.cpu()[slots], layout.pack(values)
    scales = slice(layout.data_bytes, None)
    assert torch.equal(ours[:, scales], expected[:, scales])
    # The codes of a group whose scale is NaN are arbitrary.
    of_ours, of_expected = (layout.unpack(x, torch.float64) for x in (ours, expected))
    torch.testing.assert_close(of_ours, of_expected, rtol=0, atol=0, equal_nan=True)
    finite = values.isfinite().all(-1)
    assert torch.equal(ours[finite], expected[finite])


def test_stored_bytes_are_the_record() -> None:
    """Against the byte oracle of the formats' tests, not against the reference."""
    data = torch.zeros(2, 66, dtype=torch.uint8, device=DEVICE)
    values = torch.linspace(-3, 3, 64)
    slot = torch.tensor([1], device=DEVICE)
    kernel.kv_write(values[None].to(DEVICE), PackedRows(data, window_record(64)), slot)
    codes0, scale0 = mx_group(values[:32].tolist(), 1e-4, E4M3)
    codes1, scale1 = mx_group(values[32:].tolist(), 1e-4, E4M3)
    assert data[1].tolist() == [*codes0, *codes1, scale0, scale1]
    assert data[0].tolist() == [0] * 66


@pytest.mark.parametrize("name", [*RECORDS, "none"])
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_value_stores_round_on_the_way_in(name: str, stored: torch.dtype) -> None:
    layout = RECORDS[name](64) if name in RECORDS else None
    values = hostile(64)
    if name == "none":
        values = torch.randn(25, 64, generator=torch.Generator().manual_seed(1))
    slots = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    slots[3] = -1
    ours = ValueRows(torch.full((len(values), 64), 7.0, dtype=stored, device=DEVICE), layout)
    expected = ValueRows(torch.full((len(values), 64), 7.0, dtype=stored), layout)
    kernel.kv_write(values.to(DEVICE), ours, slots.to(DEVICE))
    expected.write(slots, values)
    # The interpreter cuts float32 down to bfloat16; rounded rows are exact in both.
    rtol = 2**-7 if name == "none" and DEVICE == "cpu" else 0
    torch.testing.assert_close(
        ours.values.cpu(), expected.values, rtol=rtol, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", RECORDS)
def test_pages_of_a_pool_are_written_in_place(name: str) -> None:
    """A page also holds other stores' rows, whose bytes stay; values and rows are strided."""
    layout = RECORDS[name](64)
    row = layout.bytes_per_row
    pages = torch.full((4, 11 + 3 * row + 5), 0xA5, dtype=torch.uint8, device=DEVICE)
    store = PackedRows(pages[:, 11 : 11 + 3 * row].unflatten(1, (3, row)), layout)
    values = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))[:, ::2]
    slots = torch.tensor([10, 0, -1, 4, 8])
    kernel.kv_write(values.to(DEVICE), store, slots.to(DEVICE))
    expected = torch.full((*pages.shape[:1], 3, row), 0xA5, dtype=torch.uint8)
    for slot, packed in zip(slots.tolist(), layout.pack(values), strict=True):
        if slot >= 0:
            expected[slot // 3, slot % 3] = packed
    assert torch.equal(pages.cpu()[:, 11:-5], layout.pages(expected).flatten(1))
    assert (pages[:, :11] == 0xA5).all()
    assert (pages[:, -5:] == 0xA5).all()


def test_fallback_records_and_gradients_run_the_reference() -> None:
    layout = index_fallback_record(32)
    data = torch.zeros(2, layout.bytes_per_row, dtype=torch.uint8, device=DEVICE)
    values = torch.randn(1, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    kernel.kv_write(values, PackedRows(data, layout), torch.tensor([1], device=DEVICE))
    assert torch.equal(data[1], layout.pack(values[0]))
    store = ValueRows(torch.zeros(2, 32, device=DEVICE))
    values.requires_grad_()
    kernel.kv_write(values, store, torch.tensor([1], device=DEVICE))
    store.values.sum().backward()
    assert torch.equal(values.grad, torch.ones(1, 32, device=DEVICE))


@pytest.mark.parametrize("case", POOL_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pooling_matches_the_logistic_of_the_difference(case: PoolCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    ours = compressor.pool_pairs(**moved(operands))
    assert ours.dtype == torch.float32
    a, b = operands["a"].double(), operands["b"].double()
    weight = torch.sigmoid(b[:, 0] - b[:, 1])
    expected = weight * a[:, 0] + (1 - weight) * a[:, 1]
    torch.testing.assert_close(ours.cpu().double(), expected, rtol=1e-6, atol=1e-6)


def test_pooling_follows_the_strides_of_a_stacked_pair() -> None:
    """As the network hands them over: a and b are halves of one tensor."""
    stacked = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    a, b = stacked.chunk(2, dim=-1)
    ours = compressor.pool_pairs(a, b)
    assert torch.equal(ours, compressor.pool_pairs(a.clone(), b.clone()))


@pytest.mark.parametrize("case", PREVIOUS_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_row_before_and_the_tail(case: PreviousCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    tail, current = operands["tail"].values.clone(), operands["current"]
    on_device = moved(operands)
    ours = compressor.previous_rows(**on_device)
    for t, first in enumerate(operands["is_first"].tolist()):
        slot = int(operands["read_slots"][operands["request"][t]])
        stored = tail[slot] if slot >= 0 else torch.zeros(case.width, dtype=dtype)
        assert torch.equal(ours[t].cpu(), stored if first else current[t - 1])
    expected = tail.clone()
    for t, slot in enumerate(operands["write_slots"].tolist()):
        if slot >= 0:
            expected[slot] = current[t]
    assert torch.equal(on_device["tail"].values.cpu(), expected)


@pytest.mark.parametrize("case", PREVIOUS_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pooled_rows_are_the_norm_of_pooled_pairs(case: PreviousCase, dtype: torch.dtype) -> None:
    """And the tail is that of previous_rows. Rows are wide, as in the network, latents `dtype`."""
    operands = moved(case.operands(torch.float32))
    norm = torch.linspace(-1, 2, case.width // 2).to(dtype).to(DEVICE)
    tail = ValueRows(operands["tail"].values.clone())
    ours = compressor.pooled_rows(norm, **{**operands, "tail": tail}, eps=1e-6)
    previous = compressor.previous_rows(**operands)
    a, b = torch.stack([previous, operands["current"]], dim=1).chunk(2, dim=-1)
    expected = rms_norm(compressor.pool_pairs(a, b).to(dtype), norm, 1e-6)
    assert ours.dtype == dtype
    # The interpreter cuts off, and that twice.
    limit = 2e-7 if dtype == torch.float32 else 2.0**-7 if DEVICE == "cuda" else 2.0**-6
    torch.testing.assert_close(ours, expected, rtol=limit, atol=0)
    assert torch.equal(tail.values, operands["tail"].values)


@pytest.mark.parametrize("name", [*RECORDS, "none"])
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_has_the_bytes_of_three(name: str, normed: bool, dtype: torch.dtype) -> None:
    width, count = 96, 9
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(count, 2 * width, generator=draw).to(dtype)[:, :width].to(DEVICE)
    norm = torch.rand(width, generator=draw).to(dtype).to(DEVICE) if normed else None
    positions = torch.tensor([0, 1, 2, 7, 128, 4095, 65_536, 999_999, 1_048_575]).to(DEVICE)
    inv_freq = (10_000.0 ** -(torch.arange(16) / 16.0).double()).to(DEVICE)
    slots = torch.tensor([5, -1, 0, 7, -1, 2, 9, 11, 3]).to(DEVICE)
    stores = []
    for run in (kernel.rotated_write, rotated_pieces_in_kernels):
        if name == "none":
            store = ValueRows(torch.full((12, width), 3.0, dtype=dtype, device=DEVICE))
            stores.append(store.values)
        else:
            layout: RecordLayout = RECORDS[name](width)
            data = torch.full((12, layout.bytes_per_row), 0xA5, dtype=torch.uint8, device=DEVICE)
            store = PackedRows(data, layout)
            stores.append(data)
        run(x, norm, positions, inv_freq, store, slots, eps=1e-6)
    assert torch.equal(*stores)
    assert not torch.equal(stores[0][5], stores[0][1])


@pytest.mark.parametrize("latent_width", [64, 1280])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_beside_the_write_changes_neither(latent_width: int, dtype: torch.dtype) -> None:
    width, count = 96, 4
    draw = torch.Generator().manual_seed(3)
    latent = torch.randn(count, latent_width + 8, generator=draw).to(dtype)[:, :latent_width]
    x = torch.randn(count, width, generator=draw).to(dtype).to(DEVICE)
    norms = [torch.rand(n, generator=draw).to(dtype).to(DEVICE) for n in (latent_width, width)]
    positions = torch.tensor([0, 7, 65_536, 1_048_575]).to(DEVICE)
    inv_freq = (10_000.0 ** -(torch.arange(16) / 16.0).double()).to(DEVICE)
    slots = torch.tensor([2, -1, 0, 4]).to(DEVICE)
    layout = window_record(width)
    ours, alone = (
        PackedRows(
            torch.full((5, layout.bytes_per_row), 0xA5, dtype=torch.uint8).to(DEVICE), layout
        )
        for _ in range(2)
    )
    normed = kernel.norm_and_write(
        latent.to(DEVICE), norms[0], x, norms[1], positions, inv_freq, ours, slots, eps=1e-6
    )
    kernel.rotated_write(x, norms[1], positions, inv_freq, alone, slots, eps=1e-6)
    assert torch.equal(ours.data, alone.data)
    wide = latent.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norms[0].cpu().double()
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-6  # the interpreter cuts to bfloat16
    torch.testing.assert_close(normed.cpu().double(), expected, rtol=rtol, atol=1e-6)


def test_no_rows_write_nothing() -> None:
    layout = window_record(96)
    store = PackedRows(
        torch.full((5, layout.bytes_per_row), 0xA5, dtype=torch.uint8, device=DEVICE), layout
    )
    latent, x = (torch.empty(0, n, device=DEVICE) for n in (64, 96))
    norms = [torch.ones(n, device=DEVICE) for n in (64, 96)]
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    inv_freq = torch.ones(16, dtype=torch.float64, device=DEVICE)
    normed = kernel.norm_and_write(
        latent, norms[0], x, norms[1], none, inv_freq, store, none, eps=1e-6
    )
    assert normed.shape == (0, 64)
    assert (store.data == 0xA5).all()


def rotated_pieces_in_kernels(x, norm, positions, inv_freq, store, slots, *, eps) -> None:
    if norm is not None:
        x = rms_norm(x, norm, eps)
    kernel.kv_write(apply_rope(x, positions, inv_freq), store, slots)
