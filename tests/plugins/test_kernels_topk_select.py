"""The selection kernels against sorting in Python: exact, ties to the lower column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_oracle import DEVICE, load_kernel, moved

from plugins.topk_select import kernel_levels as levels
from plugins.topk_select.cases import CASES, SelectCase

kernel = load_kernel("topk_select")

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(
    autouse=True, scope="module", params=["bins", "lists"] if DEVICE == "cuda" else ["lists"]
)
def method(request: pytest.FixtureRequest) -> Iterator[None]:
    """On Hopper bins select from few rows, and lists, as everywhere, from many."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "lists":
            patch.setattr(kernel, "part_of_bins", lambda *sizes: None)
        yield


def best(scores: list[float], k: int) -> list[int]:
    """Ascending indices of the k best above −inf; NaN counts as −inf, ties go to the left."""
    readable = [i for i, s in enumerate(scores) if not math.isnan(s) and s > -math.inf]
    return sorted(sorted(readable, key=lambda i: (-scores[i], i))[:k])


def selected(scores: torch.Tensor, k: int) -> list[list[int]]:
    width = min(k, scores.shape[1])
    rows = [best(row, k) for row in scores.double().tolist()]
    return [row + [-1] * (width - len(row)) for row in rows]


def blocks_of(scores: torch.Tensor, visible: torch.Tensor, size: int, count: int) -> list:
    """The candidate blocks of each row, ascending, −1 at the end."""
    rows = []
    width = min(count, -(-scores.shape[1] // size))
    for row, seen in zip(scores.double().tolist(), visible.tolist(), strict=True):
        clean = [-math.inf if math.isnan(s) else s for s in row]
        top = [max(clean[i : i + size]) for i in range(0, len(row), size)]
        newest = (seen - 1) // size if seen else -1
        order = sorted(
            (b for b in range(len(top)) if top[b] > -math.inf or b == newest),
            key=lambda b: (b != newest, -top[b], b),
        )
        listed = sorted(order[:count])
        rows.append(listed + [-1] * (width - len(listed)))
    return rows


def operands_of(case: SelectCase, dtype: torch.dtype) -> dict:
    """At most 20 rows: each is a program of its own."""
    return {name: x[:20] for name, x in moved(case.operands(dtype)).items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_k_best(case: SelectCase, dtype: torch.dtype) -> None:
    operands = operands_of(case, dtype)
    ours = kernel.topk_select(operands["scores"], case.k)
    assert ours.dtype == torch.int64
    assert ours.tolist() == selected(operands["scores"], case.k)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_candidate_blocks(case: SelectCase, dtype: torch.dtype) -> None:
    operands = operands_of(case, dtype)
    sizes = {"block_size": case.block_size, "num_blocks": case.num_blocks}
    ours = kernel.candidate_blocks(**operands, **sizes)
    assert ours.dtype == torch.int64
    assert ours.tolist() == blocks_of(operands["scores"], operands["num_visible"], *sizes.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_k_best_of_blocks(case: SelectCase, dtype: torch.dtype) -> None:
    operands, size = operands_of(case, dtype), case.block_size
    scores = operands["scores"]
    listed = blocks_of(scores, operands["num_visible"], size, case.num_blocks)
    shape = len(scores), min(case.num_blocks, -(-case.columns // size))
    blocks = torch.tensor(listed, dtype=torch.int64, device=scores.device).reshape(shape)
    ours = kernel.topk_of_blocks(scores, blocks, k=case.k, block_size=size)
    assert ours.dtype == torch.int64
    inside = scores.clone()
    for row, of_row in zip(inside, listed, strict=True):
        row[[j for j in range(case.columns) if j // size not in of_row]] = -math.inf
    assert ours.tolist() == selected(inside, case.k)


@given(
    st.integers(1, 4),
    st.integers(1, 120),
    st.integers(1, 7),
    st.sampled_from(["distinct", "few values", "zeros", "infinities", "NaN"]),
    st.sampled_from([(16, 64, 8), (64, 16, 16), (32, 32, 8)]),
    st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=24)
def test_rounds_of_short_parts(
    rows: int, columns: int, k: int, values: str, sizes: tuple[int, int, int], seed: int
) -> None:
    """Parts held whole, parts of several groups, and lists that are too short for equal scores."""
    operands = moved(
        SelectCase("any", rows, columns, k, values=values).operands(torch.float32, seed)
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("_PART", "_GROUPS", "_LIST"), sizes, strict=True):
            patch.setattr(kernel, name, size)
        patch.setattr(kernel, "_TILE", 16)
        ours = kernel.topk_select(operands["scores"], k)
        blocks = kernel.candidate_blocks(**operands, block_size=2, num_blocks=k)
    assert ours.tolist() == selected(operands["scores"], k)
    expected = blocks_of(operands["scores"], operands["num_visible"], 2, k)
    assert blocks.tolist() == expected


def crowded(values: str) -> torch.Tensor:
    """Scores of which more reach the bound of the 300 best than a list holds."""
    scores = torch.randn(2, 9000, generator=torch.Generator().manual_seed(3))
    if values == "best in one group":
        # Every fifth column of a few groups, above all others.
        scores[:, 7::512] += 50.0
        scores[:, 8::2048] += 50.0
        scores = torch.where(scores > 40, scores, scores.clamp(max=-5.0))
    elif values == "rising":
        scores = scores.sort(dim=1).values
    else:
        scores = scores.clamp(-0.5, 0.5)
    return moved({"scores": scores})["scores"]


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "around ten": lambda x: x + 10,
    "negative": lambda x: -1 - x.abs(),
    "of one power of two": lambda x: 1 + 1e-4 * x,
    "many equal": lambda x: x.round(decimals=1),
    "a few and equal ones": lambda x: x.where(x > 2.5, 0.25),
    "bfloat16": lambda x: x.bfloat16(),
    "rising": lambda x: x.sort(1).values,
    "falling": lambda x: x.sort(1, descending=True).values,
    "all equal": lambda x: torch.full_like(x, -3.0),
    "zeros of either sign": lambda x: torch.zeros_like(x).copysign(x),
    "subnormal": lambda x: 1e-42 * x,
    "of all sizes": lambda x: x.sign() * 10 ** (12 * x),
    "one huge": lambda x: x.index_fill(1, torch.tensor(7), 1e30),
    "endless": lambda x: torch.full_like(x, math.inf),
    "some endless": lambda x: x.masked_fill(x > 2, math.inf).masked_fill(x < 1, -math.inf),
    "some NaN": lambda x: x.masked_fill(x.abs() > 1, math.nan),
    "few there": lambda x: x.masked_fill(x < 2.2, -math.inf),
    "none there": lambda x: torch.full_like(x, -math.inf),
}


# Long rows take the interpreter long.
SIZES = [(2500, 512), (700, 512), (5003, 37), (8192, 512), (16_384, 512), (20_000, 300)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "k"), SIZES if DEVICE == "cuda" else SIZES[:1])
def test_every_kind_of_scores(kind: str, columns: int, k: int) -> None:
    """Programs of either width, several parts, and columns that no vector divides."""
    scores = torch.randn(2, columns, generator=torch.Generator().manual_seed(columns))
    scores = KINDS[kind](scores)
    assert kernel.topk_select(moved({"s": scores})["s"], k).tolist() == selected(scores, k)


CROWDED = ("best in one group", "rising", "equal")


@pytest.mark.parametrize("values", CROWDED)
def test_more_reach_the_bound_than_the_list_holds(values: str) -> None:
    scores = crowded(values)
    assert kernel.topk_select(scores, 300).tolist() == selected(scores, 300)


@pytest.mark.parametrize("values", CROWDED)
def test_nothing_is_listed_behind_a_list(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint on a place made the compiler compare it with the end once for four of them."""
    scores, made, allocate = crowded(values), [], torch.empty

    def guarded(*shape: int, **kind: Any) -> torch.Tensor:
        if len(shape) > 1:
            return allocate(*shape, **kind)
        made.append(torch.full((shape[0] + 64,), -7, **kind))
        return made[-1][:-64]

    monkeypatch.setattr(kernel, "part_of_bins", lambda *sizes: None)
    monkeypatch.setattr(torch, "empty", guarded)
    kernel.topk_select(scores, 300)
    assert [len(scratch) for scratch in made] == [2 * 1024 + 64] * 2
    assert all((scratch[-64:] == -7).all() for scratch in made)


@pytest.mark.parametrize("values", ["distinct", "few values", "zeros", "infinities", "NaN"])
@pytest.mark.parametrize("sizes", [(3, 700, 5), (2, 4099, 60), (4, 90, 1)], ids=str)
def test_levels(values: Any, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are long and many on a smaller scale; some see fewer columns than are selected."""
    rows, columns, k = sizes
    monkeypatch.setattr(levels, "_LONG", 64)
    monkeypatch.setattr(levels, "_MANY", 128)
    case = SelectCase("any", rows, columns, k, values=values)
    scores = case.operands(torch.float32)["scores"]
    scores[-1, 2:] = -math.inf
    assert levels.takes_levels(rows, columns, k)
    assert kernel.topk_select(moved({"s": scores})["s"], k).tolist() == selected(scores, k)


@pytest.mark.parametrize("values", [*CROWDED, "finite beside endless"])
def test_crowded_levels(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_LONG", 64)
    monkeypatch.setattr(levels, "_MANY", 128)
    scores = crowded(values)
    if values == "finite beside endless":
        # The best finite scores lie in a block whose best is endless.
        scores[:, 800:803] = math.inf
        scores[:, 803:808] = torch.tensor([90.0, 80.0, 70.0, 60.0, 50.0]).to(scores.device)
    for k in (2, 100):
        assert kernel.topk_select(scores, k).tolist() == selected(scores, k)


def test_what_takes_levels() -> None:
    assert levels.takes_levels(64, 131_072, 512)
    assert levels.takes_levels(32, 1 << 20, 512)
    assert not levels.takes_levels(1, 1 << 20, 512)
    assert not levels.takes_levels(4096, 16_384, 512)
    assert not levels.takes_levels(64, 131_072, 2048)
    assert not levels.takes_levels(8, 1 << 22, 512)


def test_more_equal_blocks_than_the_list_holds() -> None:
    """At the released number of blocks: the leftmost, and the newest."""
    scores = torch.zeros(1, 16_384)
    scores[0, 9_000] = 1.0
    operands = moved({"scores": scores, "num_visible": torch.tensor([16_384])})
    ours = kernel.candidate_blocks(**operands, block_size=1, num_blocks=2048)
    assert ours.tolist() == [[*range(2046), 9_000, 16_383]]


def test_released_rows_of_several_parts() -> None:
    """Two rounds at 40,000 columns; equal scores straddle the border of two parts."""
    scores = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(0))
    scores[0, 16_000:17_000] = 9.0
    ours = kernel.topk_select(moved({"s": scores})["s"], 512)
    assert ours.tolist() == selected(scores, 512)
    assert ours[0].tolist() == list(range(16_000, 16_512))


def test_subnormal_and_extreme_scores_keep_their_order() -> None:
    tiny = torch.finfo(torch.float32).smallest_normal
    row = [tiny / 4, -tiny / 4, 0.0, -0.0, 3e38, -3e38, math.inf, -math.inf, math.nan, tiny / 8]
    ours = kernel.topk_select(moved({"s": torch.tensor([row])})["s"], 4)
    assert ours.tolist() == [[0, 4, 6, 9]]


def test_strided_scores() -> None:
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    on_device = moved({"s": scores})["s"]
    wide = on_device.new_full((3, 100), math.inf)
    wide[:, ::2] = on_device
    assert kernel.topk_select(wide[:, ::2], 6).tolist() == selected(scores, 6)
    long = on_device.new_full((3, 70), math.inf)
    long[:, :50] = on_device
    assert kernel.topk_select(long[:, :50], 6).tolist() == selected(scores, 6)


def test_too_many_of_a_long_row_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_PART", 16)
    monkeypatch.setattr(kernel, "part_of_bins", lambda *sizes: None)
    with pytest.raises(ValueError, match="half"):
        kernel.topk_select(moved({"s": torch.zeros(1, 40)})["s"], 20)


def test_float64_runs_the_reference() -> None:
    scores = torch.tensor([[1.0, 1.0 + 1e-12, 0.0]], dtype=torch.float64)
    assert kernel.topk_select(moved({"s": scores})["s"], 1).tolist() == [[1]]
