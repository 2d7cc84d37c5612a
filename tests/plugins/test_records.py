"""Cache-row layouts: sizes, byte order, and the published bytes per token."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_float_oracle import E2M1, E4M3, mx_group, nibbles, nvfp4_group

from plugins.formats import sizes
from plugins.formats.records import (
    RecordLayout,
    engram_record,
    global_bytes_per_token,
    index_fallback_record,
    index_record,
    main_record,
    window_fallback_record,
    window_record,
)
from plugins.formats.rows import PackedRows

TINY = Path(__file__).parents[1] / "vectors" / "tiny"
RELEASED = {
    "main": (main_record(512), 256, 32, 288),
    "window": (window_record(512), 512, 16, 528),
    "index": (index_record(128), 64, 4, 68),
    "engram": (engram_record(256), 256, 8, 264),
    "window_fallback": (window_fallback_record(512, 64), 576, 8, 584),
    "index_fallback": (index_fallback_record(128), 128, 4, 132),
}
LAYOUTS = [layout for layout, *_ in RELEASED.values()]


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes(name: str) -> None:
    layout, data, scale, total = RELEASED[name]
    assert layout.name == name
    assert (layout.data_bytes, layout.scale_bytes, layout.bytes_per_row) == (data, scale, total)
    packed = layout.pack(torch.ones(3, layout.width))
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, total)


def test_published_bytes_per_token() -> None:
    ratios = [2, 2, 2, 1]
    fp4, fp8, fallback = main_record(512), window_record(512), window_fallback_record(512, 64)
    index, index_fp8 = index_record(128), index_fallback_record(128)
    assert global_bytes_per_token(ratios, fp4, index) == 890
    assert global_bytes_per_token(ratios, fp8, index) == 1490
    assert global_bytes_per_token(ratios, fp4, index_fp8) == 1050
    assert global_bytes_per_token(ratios, fallback, index_fp8) == 1790
    assert global_bytes_per_token([2], main_record(64), index_record(32)) == Fraction(53, 2)


@pytest.mark.parametrize("dim", [32, 64, 128, 512])
def test_sizes_without_torch_are_the_same_formulas(dim: int) -> None:
    assert sizes.main_row_bytes(dim) == main_record(dim).bytes_per_row
    assert sizes.window_row_bytes(dim) == window_record(dim).bytes_per_row
    assert sizes.index_row_bytes(dim) == index_record(dim).bytes_per_row


def test_a_row_is_its_data_bytes_then_its_scale_bytes() -> None:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(512, generator=draw)
    row = main_record(512).pack(x).tolist()
    for g in range(32):
        codes, scale = nvfp4_group(x[16 * g : 16 * g + 16].tolist())
        assert row[8 * g : 8 * g + 8] == nibbles(codes)
        assert row[256 + g] == scale
    row = window_record(512).pack(x).tolist()
    for g in range(16):
        codes, scale = mx_group(x[32 * g : 32 * g + 32].tolist(), 1e-4, E4M3)
        assert row[32 * g : 32 * g + 32] == codes
        assert row[512 + g] == scale
    row = index_record(128).pack(x[:128]).tolist()
    for g in range(4):
        codes, scale = mx_group(x[32 * g : 32 * g + 32].tolist(), 6 * 2.0**-126, E2M1)
        for w in range(4):
            eight = codes[8 * w : 8 * w + 8]
            word = sum((code & 7) << 4 * i for i, code in enumerate(eight))
            word |= sum((code >> 3) << 8 * i + 7 for i, code in enumerate(eight[:4]))
            word |= sum((code >> 3) << 8 * i + 3 for i, code in enumerate(eight[4:]))
            assert row[16 * g + 4 * w : 16 * g + 4 * w + 4] == [*word.to_bytes(4, "little")]
        assert row[64 + g] == scale


def test_a_page_of_index_keys_has_its_scales_behind_all_codes() -> None:
    """Three rows of 64 and 4 bytes in a page, which is part of a larger one."""
    layout = index_record(128)
    values = layout.round(torch.randn(6, 128, generator=torch.Generator().manual_seed(9)))
    memory = torch.full((2, 20 + 3 * 68), 0xA5, dtype=torch.uint8)
    store = PackedRows(memory[:, 20:].unflatten(1, (3, 68)), layout)
    slots = torch.tensor([4, 0, 2, -1])
    store.write(slots, values[:4])
    for i, (page, row) in enumerate([(1, 1), (0, 0), (0, 2)]):
        packed = layout.pack(values[i])
        assert torch.equal(memory[page, 20 + 64 * row :][:64], packed[:64])
        assert torch.equal(memory[page, 20 + 192 + 4 * row :][:4], packed[64:])
    assert (memory == 0xA5).sum() >= 2 * 20 + 3 * 68
    assert torch.equal(store.read(slots, torch.float32)[:3], values[:3])
    page = layout.pages(layout.pack(values[:3])).flatten()
    assert torch.equal(page[:192], layout.pack(values[:3])[:, :64].flatten())
    with pytest.raises(ValueError, match="expected pages of index rows without gaps, got rows 70"):
        PackedRows(torch.zeros(2, 3, 70, dtype=torch.uint8)[..., :68], layout)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_packed_round_trip_is_bit_exact(layout: RecordLayout, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(6)
    magnitude = 10.0 ** torch.randint(-6, 4, (2, 9, 1), generator=draw)
    x = torch.randn(2, 9, layout.width, generator=draw, dtype=torch.float64) * magnitude
    x[0, 0], x[0, 1] = 0.0, -0.0
    x = x.to(dtype)
    rounded = layout.round(x)
    # A page is wider than its row: the row is a strided slice of it.
    page = torch.full((2, 9, layout.bytes_per_row + 5), 0xA5, dtype=torch.uint8)
    page[..., : layout.bytes_per_row] = layout.pack(x)
    back = layout.unpack(page[..., : layout.bytes_per_row], dtype)
    assert torch.equal(back, rounded)
    assert torch.equal(back.signbit(), rounded.signbit())
    assert rounded.dtype == dtype
    assert rounded.shape == x.shape
    assert not torch.equal(rounded, x)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_no_rows(layout: RecordLayout) -> None:
    packed = layout.pack(torch.zeros(0, layout.width))
    assert packed.shape == (0, layout.bytes_per_row)
    assert layout.unpack(packed, torch.bfloat16).shape == (0, layout.width)


def test_packing_needs_no_gradient_and_rounding_passes_it() -> None:
    x = torch.linspace(-3, 3, 64, requires_grad=True)
    assert not main_record(64).pack(x).requires_grad
    main_record(64).round(x).sum().backward()
    assert x.grad.tolist() == [1.0] * 64


def test_golden_cache_rows_are_fixed_points() -> None:
    """Rows that an independent implementation quantised, in float64."""
    golden = load_file(TINY / "golden_quant.safetensors")
    main, window, index = main_record(64), window_record(64), index_record(32)
    seen = 0
    for name, values in golden.items():
        kind = name.split(".")[0]
        layout = {"main_kv": main, "index_k": index, "swa_last": window}.get(kind)
        if layout is not None:
            assert torch.equal(layout.unpack(layout.pack(values), torch.float64), values), name
            seen += 1
    assert seen == 3 + 3 + 4


def test_wrong_widths_are_named() -> None:
    with pytest.raises(ValueError, match="expected rows of 512 values for window, got"):
        window_record(512).pack(torch.zeros(2, 256))
    with pytest.raises(ValueError, match="expected rows of 528 bytes for window, got"):
        window_record(512).unpack(torch.zeros(2, 512, dtype=torch.uint8), torch.float32)
    with pytest.raises(ValueError, match="main row width that is a positive multiple of 16"):
        main_record(40)
    with pytest.raises(ValueError, match="positive multiple of 64 or below it, got 200 − 64"):
        window_fallback_record(200, 64)
