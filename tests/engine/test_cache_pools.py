"""Slots and pages: maps against hand-computed numbers, bytes against the published sizes."""

from __future__ import annotations

import pytest
import torch

from builder.presets import FULL
from engine.cache_sizes import (
    global_page_bytes,
    tail_bytes,
    tail_capacity,
    window_page_bytes,
)
from engine.config import ModelConfig
from engine.contiguous_cache import ContiguousCache
from engine.paged_cache import CachePools, PagedCache, StepTables
from plugins.formats.records import index_record, main_record, window_record
from plugins.formats.sizes import index_row_bytes, main_row_bytes, window_row_bytes


def make_pools(
    config: ModelConfig, *, quantize: bool = True, dtype: torch.dtype = torch.float32
) -> CachePools:
    return CachePools(
        config,
        num_global_pages=5,
        num_window_pages=7,
        num_slots=3,
        global_page_tokens=4,
        window_page_rows=2,
        dtype=dtype,
        quantize=quantize,
    )


@pytest.fixture
def view(tiny_config: ModelConfig) -> PagedCache:
    """Requests in slots 2 and 0; global pages of 4 tokens, window rings of 3 pages of 2 rows."""
    tables = StepTables(
        slots=torch.tensor([2, 0]),
        global_pages=torch.tensor([[3, 1, 0], [4, 0, 0]], dtype=torch.int32),
        window_pages=torch.tensor([[5, 0, 6], [1, 2, 3]], dtype=torch.int32),
    )
    return PagedCache(make_pools(tiny_config), tables)


def test_released_sizes() -> None:
    """890 bytes a token, 675,840 a window page of 32 rows over 40 layers, 98,304 of tails."""
    assert global_page_bytes(FULL, 256) == 227_840 == 890 * 256
    assert window_page_bytes(FULL, 32) == 675_840 + 3 * 32 * 528
    assert tail_capacity(FULL) == 8
    assert tail_bytes(FULL) == 98_304
    assert (main_row_bytes(512), index_row_bytes(128), window_row_bytes(512)) == (288, 68, 528)


@pytest.mark.parametrize(("block", "capacity"), [(3, 8), (5, 8), (6, 8), (7, 16), (14, 16)])
def test_tail_holds_a_verify_step_and_the_row_before(block: int, capacity: int) -> None:
    assert tail_capacity(FULL.with_changes(dspark_block_size=block)) == capacity


@pytest.mark.parametrize("width", [32, 64, 128, 512])
def test_torch_free_sizes_are_those_of_the_records(width: int) -> None:
    assert main_row_bytes(width) == main_record(width).bytes_per_row
    assert window_row_bytes(width) == window_record(width).bytes_per_row
    assert index_row_bytes(width) == index_record(width).bytes_per_row


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", [True, False])
def test_pools_take_the_bytes_that_sizing_counts(
    tiny_config: ModelConfig, dtype: torch.dtype, quantize: bool
) -> None:
    pools = make_pools(tiny_config, quantize=quantize, dtype=dtype)
    value_bytes = None if quantize else dtype.itemsize
    tail_itemsize = 8 if dtype == torch.float64 else 4
    assert pools.num_bytes == (
        5 * global_page_bytes(tiny_config, 4, value_bytes=value_bytes)
        + 7 * window_page_bytes(tiny_config, 2, value_bytes=value_bytes)
        + 3 * tail_bytes(tiny_config, value_bytes=tail_itemsize)
    )


@pytest.mark.parametrize(("page_tokens", "rows"), [(3, 1), (0, 1), (4, 0)])
def test_page_sizes_that_cannot_work_are_refused(
    tiny_config: ModelConfig, page_tokens: int, rows: int
) -> None:
    with pytest.raises(ValueError, match=r"expected a (global|window) page of"):
        CachePools(
            tiny_config,
            num_global_pages=2,
            num_window_pages=2,
            num_slots=1,
            global_page_tokens=page_tokens,
            window_page_rows=rows,
            dtype=torch.float32,
            quantize=True,
        )


def test_window_slots_follow_a_ring_of_pages(view: PagedCache) -> None:
    positions = torch.tensor([-1, 0, 1, 2, 3, 4, 5, 6, 13])
    slots = view.window_slots(torch.tensor([[0], [1]]), positions)
    # Pages 5, none, 6 hold positions 0-1, 2-3, 4-5; position 6 is back in page 5, 13 in page 5.
    assert slots.tolist() == [
        [-1, 10, 11, -1, -1, 12, 13, 10, 11],
        [-1, 2, 3, 4, 5, 6, 7, 2, 3],
    ]


def test_entry_slots_follow_the_table_and_stop_at_its_end(view: PagedCache) -> None:
    request = torch.tensor([[0], [1]])
    entries = torch.tensor([-1, 0, 3, 4, 7, 8, 12, 400])
    assert view.entry_slots(1, request, entries).tolist() == [
        [-1, 12, 15, 4, 7, -1, -1, -1],
        [-1, 16, 19, -1, -1, -1, -1, -1],
    ]
    pairs = torch.tensor([0, 1, 2, 3, 4])
    assert view.entry_slots(2, request, pairs).tolist() == [
        [6, 7, 2, 3, -1],
        [8, 9, -1, -1, -1],
    ]


def test_tail_slots_are_a_ring_per_slot(view: PagedCache) -> None:
    positions = torch.tensor([-1, 0, 7, 8])
    slots = view.tail_slots(torch.tensor([[0], [1]]), positions)
    assert slots.tolist() == [[-1, 16, 23, 16], [-1, 0, 7, 0]]


def test_contiguous_slots_end_with_the_request(tiny_config: ModelConfig) -> None:
    cache = ContiguousCache(tiny_config, 2, 5, torch.float64, quantize=False)
    request = torch.tensor([[0], [1]])
    window = cache.window_slots(request, torch.tensor([-1, 0, 4, 5]))
    assert window.tolist() == [[-1, 0, 4, -1], [-1, 5, 9, -1]]
    pairs = cache.entry_slots(2, request, torch.tensor([-1, 0, 2, 3]))
    assert pairs.tolist() == [[-1, 0, 2, -1], [-1, 3, 5, -1]]


@pytest.mark.parametrize("quantize", [True, False])
def test_no_two_rows_share_a_byte_and_every_byte_belongs_to_a_row(
    tiny_config: ModelConfig, quantize: bool
) -> None:
    """Each row of each store is set by bytes; none disturbs another, together they fill pages."""
    pools = make_pools(tiny_config, quantize=quantize)
    stores = [
        (pools.window_pages, pools.window(layer), 7 * 2)
        for layer in range(tiny_config.num_layers_total)
    ]
    for source in tiny_config.kv_source_layer_ids:
        entries = 5 * 4 // tiny_config.ratio(source)
        stores.append((pools.global_pages, pools.main(source), entries))
        stores.append((pools.global_pages, pools.index(source), entries))
    for memory in (pools.window_pages, pools.global_pages):
        count = torch.zeros(memory.shape, dtype=torch.int64)
        for owner, store, rows in stores:
            if owner is not memory:
                continue
            for slot in range(rows):
                memory.zero_()
                # A row of 6s: no code and no scale of it is a zero byte.
                store.write(torch.tensor([slot]), torch.full((1, store.width), 6.0))
                count += memory != 0
        assert int(count.min()) == int(count.max()) == 1


def test_a_page_is_one_contiguous_region(tiny_config: ModelConfig) -> None:
    """Moving a page's bytes moves its rows of every layer and every source."""
    pools = make_pools(tiny_config)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 64, generator=generator)
    for layer in range(tiny_config.num_layers_total):
        pools.window(layer).write(torch.tensor([2, 3]), rows + layer)
    before = [pools.window(layer).read(torch.tensor([2, 3]), torch.float32) for layer in range(14)]
    assert pools.window_pages[1].is_contiguous()
    pools.window_pages[4] = pools.window_pages[1]
    for layer in range(14):
        moved = pools.window(layer).read(torch.tensor([8, 9]), torch.float32)
        assert torch.equal(moved, before[layer])
        assert (moved - rows - layer).abs().max() < 0.6, "E4M3 keeps three bits of the value"
