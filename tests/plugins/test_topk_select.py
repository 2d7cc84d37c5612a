"""Selection against sorting in Python, its tie rule, and what the two levels mean together."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.topk_select import candidate_blocks, topk_of_blocks, topk_select
from plugins.topk_select.cases import CASES, SelectCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def best(scores: list[float], k: int) -> list[int]:
    """Ascending indices of the k best readable scores; a stable sort keeps the lower of equals."""
    readable = [j for j, score in enumerate(scores) if score > -math.inf]
    return sorted(sorted(readable, key=lambda j: -scores[j])[:k])


def oracle_blocks(scores: list[float], visible: int, size: int, count: int) -> list[int]:
    blocks = [
        max((x for x in scores[b : b + size] if not math.isnan(x)), default=-math.inf)
        for b in range(0, len(scores), size)
    ]
    newest = {(visible - 1) // size} if visible > 0 else set()
    others = [-math.inf if b in newest else score for b, score in enumerate(blocks)]
    return sorted(newest | set(best(others, max(0, min(count, len(blocks)) - len(newest)))))


@by_case
@by_dtype
def test_topk_matches_sorting(case: SelectCase, dtype: torch.dtype) -> None:
    scores = case.operands(dtype)["scores"]
    selected = topk_select(scores, case.k)
    width = min(case.k, case.columns)
    assert selected.shape == (case.rows, width)
    assert selected.dtype == torch.int64
    for t, row in enumerate(scores.tolist()):
        expected = best(row, case.k)
        assert selected[t].tolist() == expected + [-1] * (width - len(expected)), f"row {t}"


@by_case
@by_dtype
def test_blocks_match_sorting(case: SelectCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    sizes = {"block_size": case.block_size, "num_blocks": case.num_blocks}
    blocks = candidate_blocks(**operands, **sizes)
    width = min(case.num_blocks, -(-case.columns // case.block_size))
    assert blocks.dtype == torch.int64
    assert blocks.shape == (case.rows, width)
    for t, (row, visible) in enumerate(
        zip(operands["scores"].tolist(), operands["num_visible"].tolist(), strict=True)
    ):
        expected = oracle_blocks(row, visible, case.block_size, case.num_blocks)
        assert blocks[t].tolist() == expected + [-1] * (width - len(expected)), f"row {t}"


@by_case
@by_dtype
def test_topk_of_blocks_matches_sorting(case: SelectCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    size = case.block_size
    blocks = candidate_blocks(**operands, block_size=size, num_blocks=case.num_blocks)
    selected = topk_of_blocks(operands["scores"], blocks, k=case.k, block_size=size)
    width = min(case.k, case.columns)
    assert selected.shape == (case.rows, width)
    for t, (row, listed) in enumerate(
        zip(operands["scores"].tolist(), blocks.tolist(), strict=True)
    ):
        inside = [x if j // size in listed else -math.inf for j, x in enumerate(row)]
        expected = best(inside, case.k)
        assert selected[t].tolist() == expected + [-1] * (width - len(expected)), f"row {t}"


@given(
    st.lists(
        st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, math.inf]), min_size=23, max_size=23),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 5),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=60)
def test_more_blocks_than_k_hold_the_k_best(rows: list[list[float]], k: int, size: int) -> None:
    scores = torch.tensor(rows)
    visible = torch.full((len(rows),), 23)
    blocks = candidate_blocks(scores, visible, block_size=size, num_blocks=k + 1)
    among = topk_of_blocks(scores, blocks, k=k, block_size=size)
    assert torch.equal(among, topk_select(scores, k))


@given(
    st.lists(
        st.lists(
            st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, math.inf]), min_size=11, max_size=11
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 13),
)
@settings(deadline=None, max_examples=60)
def test_topk_of_tied_scores(rows: list[list[float]], k: int) -> None:
    selected = topk_select(torch.tensor(rows), k).tolist()
    for picks, row in zip(selected, rows, strict=True):
        assert [j for j in picks if j >= 0] == best(row, k)
        assert picks == sorted(picks, key=lambda j: (j < 0, j))


@by_case
def test_the_newest_block_is_in_and_unreadable_blocks_are_not(case: SelectCase) -> None:
    operands = case.operands(torch.float32)
    blocks = candidate_blocks(**operands, block_size=case.block_size, num_blocks=case.num_blocks)
    for listed, visible in zip(blocks.tolist(), operands["num_visible"].tolist(), strict=True):
        if visible:
            assert (visible - 1) // case.block_size in listed
        assert max(listed, default=-1) < -(-visible // case.block_size)
        assert len(listed) <= case.num_blocks


def test_one_block_is_the_newest_whatever_scores_say() -> None:
    scores = torch.tensor([[math.inf, math.inf, 0.0, -5.0, -math.inf]])
    blocks = candidate_blocks(scores, torch.tensor([4]), block_size=2, num_blocks=1)
    assert blocks.tolist() == [[1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_columns_and_other_rows_change_nothing(dtype: torch.dtype) -> None:
    scores = SelectCase("batch", 130, 33, 6, values="few values").operands(dtype)["scores"]
    whole = topk_select(scores, 6)
    padded = torch.nn.functional.pad(scores, (0, 50), value=-math.inf)
    assert torch.equal(topk_select(padded, 6), whole)
    for t in (0, 63, 64, 65, 129):
        assert torch.equal(topk_select(scores[t : t + 1], 6), whole[t : t + 1])
