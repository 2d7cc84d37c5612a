"""Index queries in one launch: the rotation of one kernel and the rounding of the keys' record."""

from __future__ import annotations

import pytest
import torch
from kernel_oracle import DEVICE, load_kernel

from plugins.formats.records import index_fallback_record, index_record
from plugins.registry import OPERATORS

apply_rope = load_kernel("rope").apply_rope
kernel = load_kernel("indexer")

SCALE = 0.123


RECORDS = {"index": index_record, "none": None}


def given(heads: int, width: int, rotated: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries of all magnitudes in a strided tensor, head weights, positions, frequencies."""
    draw = torch.Generator().manual_seed(width)
    size = 10.0 ** torch.randint(-4, 3, (5, heads, 1), generator=draw)
    queries = (torch.randn(5, heads, width + 7, generator=draw) * size).to(dtype)[..., :width]
    queries[0, 0, :32] = 0
    weights = torch.randn(5, heads, generator=draw).to(dtype)
    positions = torch.tensor([0, 3, 70_000, 1_048_575, -1])
    inv_freq = 10_000.0 ** -torch.linspace(0, 1, rotated // 2, dtype=torch.float64)
    return [x.to(DEVICE) for x in (queries, weights, positions, inv_freq)]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(("heads", "width", "rotated"), [(8, 64, 16), (3, 96, 96), (32, 128, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_are_rotated_and_rounded(
    name: str, heads: int, width: int, rotated: int, dtype: torch.dtype
) -> None:
    queries, weights, positions, inv_freq = given(heads, width, rotated, dtype)
    make = RECORDS[name]
    record = None if make is None else make(width)
    ours, scaled = kernel.index_queries(queries, weights, positions, inv_freq, record, scale=SCALE)
    turned = apply_rope(queries, positions, inv_freq)
    assert (ours.shape, ours.dtype) == (queries.shape, dtype)
    assert torch.equal(ours, turned if record is None else record.round(turned))
    rtol = 2.0 ** (-7 if dtype == torch.bfloat16 else -22)  # the interpreter cuts to bfloat16
    torch.testing.assert_close(scaled.double(), weights.double() * SCALE, rtol=rtol, atol=0)


def test_no_rows() -> None:
    queries, weights, positions, inv_freq = given(8, 64, 16, torch.bfloat16)
    rows = queries[:0], weights[:0], positions[:0]
    ours, scaled = kernel.index_queries(*rows, inv_freq, index_record(64), scale=SCALE)
    assert ours.shape == (0, 8, 64)
    assert scaled.shape == (0, 8)


def test_an_unknown_record_is_rounded_by_itself() -> None:
    operands = given(8, 64, 16, torch.bfloat16)
    record = index_fallback_record(64)
    ours = kernel.index_queries(*operands, record, scale=SCALE)
    pieces = OPERATORS["index_queries"].reference(*operands, record, scale=SCALE)
    for made, expected in zip(ours, pieces, strict=True):
        assert torch.equal(made, expected)
