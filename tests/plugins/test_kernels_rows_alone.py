"""A row's bits come of its own operands: alone, in another order and beside many others, within
the classes of launches that a kernel's page names. Attention, index scores, the gate, experts,
hyper-connections and few rows of linear layers have such tests of their own.

The interpreter adds the terms of a product in an order that depends on where a row lies in its
tile; there products have few bits, so that their sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_oracle import DEVICE, load_kernel, moved

from plugins.compressor.cases import PoolCase, PreviousCase
from plugins.engram.cases import InjectCase
from plugins.formats.records import index_record
from plugins.linear import PackedFormat
from plugins.linear.cases import PackedCase
from plugins.norm.cases import NormCase
from plugins.rope.cases import RopeCase
from plugins.wo_a.cases import WoACase

ON_GPU = DEVICE == "cuda"
COUNT = 700 if ON_GPU else 9
DTYPES = (torch.float32, torch.bfloat16)
Run = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def each_alone(run: Run, count: int, counts: tuple[int, ...]) -> None:
    """Some rows have the bits that they have among all `count`; `run` takes numbers of rows."""
    draw = torch.Generator().manual_seed(count)
    whole = run(torch.arange(count, device=DEVICE))
    for some in counts:
        rows = torch.randperm(count, generator=draw)[:some].to(DEVICE)
        for one, of_all in zip(run(rows), whole, strict=True):
            assert torch.equal(one, of_all[rows]), some


def norm(dtype: torch.dtype, width: int) -> Run:
    given = moved(NormCase("", (COUNT, width)).operands(dtype))
    run = load_kernel("norm").rms_norm
    return lambda rows: (run(**{**given, "x": given["x"][rows]}),)


def rope(dtype: torch.dtype, width: int) -> Run:
    given = moved(RopeCase("", COUNT, width, width // 4, (3,), 500).operands(dtype))
    run = load_kernel("rope").apply_rope
    return lambda rows: (run(**given | {n: given[n][rows] for n in ("x", "positions")}),)


def engram_gate(dtype: torch.dtype, width: int) -> Run:
    given = moved(InjectCase("", COUNT, 4 if ON_GPU else 2, width, dead=0.3).operands(dtype))
    run = load_kernel("engram").engram_gate
    names = ("streams", "keys", "value", "alive")
    return lambda rows: (run(**given | {n: given[n][rows] for n in names}),)


def pool_pairs(dtype: torch.dtype, width: int) -> Run:
    given = moved(PoolCase("", COUNT, width).operands(dtype))
    run = load_kernel("compressor").pool_pairs
    return lambda rows: (run(given["a"][rows], given["b"][rows]),)


def pooled_rows(dtype: torch.dtype, width: int) -> Run:
    """Rows of requests of their own, each behind one in the tail."""
    case = PreviousCase("", (1,) * COUNT, (5,) * COUNT, 2 * width)
    given = moved(case.operands(torch.float32))
    norm = torch.linspace(-1, 2, width).to(DEVICE, dtype)
    run = load_kernel("compressor").pooled_rows
    names = ("current", "request", "is_first", "write_slots")
    return lambda rows: (run(norm, **given | {n: given[n][rows] for n in names}, eps=1e-6),)


def index_queries(dtype: torch.dtype, width: int) -> Run:
    draw = torch.Generator().manual_seed(width)
    queries = torch.randn(COUNT, 8, width, generator=draw).to(DEVICE, dtype)
    weights = torch.randn(COUNT, 8, generator=draw).to(DEVICE, dtype)
    positions = torch.arange(COUNT, device=DEVICE) * 1499
    inv_freq = 10_000.0 ** -torch.linspace(0, 1, width // 4, dtype=torch.float64).to(DEVICE)
    run, record = load_kernel("indexer").index_queries, index_record(width)
    return lambda rows: run(
        queries[rows], weights[rows], positions[rows], inv_freq, record, scale=0.1
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("make", "widths"),
    [
        (norm, (64, 1280, 5120)),
        (rope, (64, 512)),
        (engram_gate, (128, 5120)),
        (pool_pairs, (64, 512)),
        (pooled_rows, (64, 512)),
        (index_queries, (32, 128)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_rows_of_elements_and_sums(
    make: Callable[[torch.dtype, int], Run], widths: tuple[int, ...], dtype: torch.dtype
) -> None:
    for width in widths if ON_GPU else widths[:1]:
        each_alone(make(dtype, width), COUNT, (1, 3, 100) if ON_GPU else (1, 3))


def few_bits(x: torch.Tensor) -> torch.Tensor:
    return x if ON_GPU else (2 * x).round().clamp(-8, 8) / 2


Class = tuple[int, int]


def classes_of(dtype: torch.dtype, few: Class) -> list[Class]:
    """The fewest and most rows of each, as docs/kernels/linear.md says; `few`: bfloat16's first."""
    if dtype == torch.float32:
        return [(1, 16), (17, 32), (33, 64), (65, 511)]
    return [few, (9, 16), (17, 64), (65, 511)]


def in_classes(run: Run, dtype: torch.dtype, few: Class) -> None:
    for fewest, most in classes_of(dtype, few) if ON_GPU else [(17, 18)]:
        each_alone(run, most, (fewest, (fewest + most) // 2))


FP8 = PackedFormat.FP8_BLOCKS
PRODUCTS = [(stored, dtype, False) for stored in PackedFormat for dtype in DTYPES]
PRODUCTS.append((FP8, torch.bfloat16, True))
PRODUCTS = PRODUCTS if ON_GPU else [(PackedFormat.FP4_ROWS, torch.bfloat16, False)]  # takes long
products = pytest.mark.parametrize(("stored", "dtype", "long"), PRODUCTS, ids=str)


@products
def test_rows_of_a_linear_layer(stored: PackedFormat, dtype: torch.dtype, long: bool) -> None:
    sizes = (8192, 5120) if long else (1280, 640) if ON_GPU else (256, 24)
    operands = PackedCase("", 511, *sizes, stored, spread=2).operands(dtype)
    given = moved(operands | {"x": few_bits(operands["x"])})
    run = load_kernel("linear").linear
    few = (2, 8) if stored in (PackedFormat.FP4_ROWS, PackedFormat.NVFP4) else (1, 8)
    few = (2, 16) if long else few
    in_classes(lambda rows: (run(given["x"][rows], given["weight"]),), dtype, few)


@products
def test_rows_of_the_grouped_output(stored: PackedFormat, dtype: torch.dtype, long: bool) -> None:
    sizes = (64, 512, 8, 1024) if long else (16, 512, 2, 256) if ON_GPU else (4, 128, 2, 16)
    operands = WoACase("", 511, *sizes, stored=stored).operands(dtype)
    given = moved(operands | {"o": few_bits(operands["o"])})
    run = load_kernel("wo_a").wo_a
    in_classes(
        lambda rows: (run(given["o"][rows], given["weight"], given["groups"]),),
        dtype,
        (2, 16) if long else (1, 8),
    )
