"""Index scores against a per-entry oracle; memory and independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plugins.formats.records import index_record
from plugins.formats.rows import PackedRows, ValueRows
from plugins.indexer import candidate_topk, index_scores
from plugins.indexer.cases import CASES, IndexCase
from plugins.topk_select import topk_select

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5}


def oracle(operands: dict[str, torch.Tensor | ValueRows]) -> np.ndarray:
    """One entry at a time, in float64."""
    names = ("queries", "head_weights")
    queries, weights = (operands[name].double().numpy() for name in names)
    values = operands["keys"].values.double().numpy()
    slots, request = operands["key_slots"].tolist(), operands["request"].tolist()
    visible = operands["num_visible"].tolist()
    num_keys = operands["key_slots"].shape[1]
    scores = np.full((len(queries), num_keys), -np.inf)
    for t in range(len(queries)):
        for j in range(min(visible[t], num_keys)):
            slot = slots[request[t]][j]
            if slot >= 0:
                dots = [max(0.0, float(q @ values[slot])) for q in queries[t]]
                scores[t, j] = sum(w * dot for w, dot in zip(weights[t], dots, strict=True))
    return scores


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_the_per_entry_oracle(case: IndexCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    scores = index_scores(**operands)
    assert scores.dtype == torch.promote_types(dtype, torch.float32)
    expected = oracle(operands)
    ours = scores.double().numpy()
    assert np.array_equal(np.isneginf(ours), np.isneginf(expected)), "−inf at other columns"
    atol = TOLERANCE[dtype] * case.heads * math.sqrt(case.width)
    np.testing.assert_allclose(ours, expected, rtol=TOLERANCE[dtype], atol=atol)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 40),
    st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=25)
def test_ragged_batches(rows: list[int], keys: int, seed: int) -> None:
    operands = IndexCase("ragged", tuple(rows), 3, 8, keys, holes=0.2).operands(torch.float64, seed)
    ours = index_scores(**operands).numpy()
    np.testing.assert_allclose(ours, oracle(operands), rtol=1e-12, atol=1e-12)


def test_hand_computed_score() -> None:
    """Heads see −1 (rectified) and 2; weights 5 and −3: −6. The second key is not visible yet."""
    scores = index_scores(
        torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]),
        torch.tensor([[5.0, -3.0]]),
        ValueRows(torch.tensor([[-1.0, 2.0], [9.0, 9.0]])),
        torch.tensor([[0, 1]]),
        torch.tensor([0]),
        torch.tensor([1]),
    )
    assert scores.tolist() == [[-6.0, -math.inf]]


def test_packed_keys_score_like_their_values() -> None:
    layout = index_record(32)
    draw = torch.Generator().manual_seed(5)
    values = layout.round(torch.randn(40, 32, generator=draw))
    packed = PackedRows(torch.zeros(40, layout.bytes_per_row, dtype=torch.uint8), layout)
    packed.write(torch.arange(40), values)
    operands = IndexCase("packed", (3, 1), 4, 32, 20).operands(torch.float32)
    operands["key_slots"] = torch.randperm(40, generator=draw).view(2, 20)
    of_values = index_scores(**{**operands, "keys": ValueRows(values)})
    assert torch.equal(index_scores(**{**operands, "keys": packed}), of_values)


@pytest.mark.parametrize(("heads", "width", "keys"), [(16, 32, 700), (4, 32, 30), (32, 128, 600)])
def test_a_row_does_not_depend_on_the_batch(heads: int, width: int, keys: int) -> None:
    case = IndexCase("batch", (70, 3, 1, 20, 1), heads, width, keys)
    operands = case.operands(torch.float32)
    whole = index_scores(**operands)
    for start in range(60, 95, 4):
        for rows in (1, 2, 17):
            part = slice(start, min(start + rows, 95))
            visible = operands["num_visible"][part]
            seen = max(int(visible.max()), 1)  # a batch pads its keys to its own longest row
            alone = index_scores(
                operands["queries"][part].clone(),
                operands["head_weights"][part].clone(),
                operands["keys"],
                operands["key_slots"][:, :seen],
                operands["request"][part],
                visible,
            )
            assert torch.equal(alone, whole[part, :seen])


def test_visible_entries_within_k_are_all_selected() -> None:
    """With num_visible ≤ k, scores have no influence."""
    operands = IndexCase("dense", (9, 4), 4, 16, 12).operands(torch.float32)
    selected = topk_select(index_scores(**operands), 12)
    for picks, visible in zip(selected.tolist(), operands["num_visible"].tolist(), strict=True):
        assert picks == list(range(visible)) + [-1] * (12 - visible)


class TensorSizes(TorchDispatchMode):
    """Collects the size of every memory block that an operation makes or returns."""

    def __init__(self) -> None:
        super().__init__()
        self.mebibytes: set[float] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.mebibytes.add(leaf.untyped_storage().nbytes() / 2**20)
        return result


def test_long_contexts_stay_within_memory() -> None:
    """512 rows × 32768 keys × 16 heads: the result is 64 MiB, a full product would be 1 GiB."""
    num_rows, num_keys = 512, 32768
    store = ValueRows(torch.randn(num_keys, 16))
    args = (
        torch.randn(num_rows, 16, 16),
        torch.randn(num_rows, 16),
        store,
        torch.arange(num_keys).view(1, -1),
        torch.zeros(num_rows, dtype=torch.int64),
        torch.full((num_rows,), num_keys),
    )
    with TensorSizes() as sizes:
        scores = index_scores(*args)
    largest, second = sorted(sizes.mebibytes, reverse=True)[:2]
    assert largest == 64.0
    assert second < 32.0
    row, key = 511, 32767
    expected = (args[1][row] * (args[0][row] @ store.values[key]).relu()).sum()
    torch.testing.assert_close(scores[row, key], expected, rtol=1e-4, atol=1e-4)


def test_gradients() -> None:
    operands = IndexCase("gradient", (2, 1), 2, 4, 3).operands(torch.float64)
    readable = operands["key_slots"][operands["request"]]
    visible = torch.arange(3) < operands["num_visible"].unsqueeze(1)
    values = operands["keys"].values.nan_to_num()
    inputs = [operands["queries"], operands["head_weights"], values]

    def run(queries, head_weights, values):
        scores = index_scores(
            queries,
            head_weights,
            ValueRows(values),
            operands["key_slots"],
            operands["request"],
            operands["num_visible"],
        )
        return scores[visible & (readable >= 0)]

    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in inputs])


def test_the_best_of_the_candidates() -> None:
    """One query of one head; key j scores j, so blocks decide alone."""
    keys = ValueRows(torch.arange(10.0).unsqueeze(1))
    ours = candidate_topk(
        torch.ones(2, 1, 1),
        torch.ones(2, 1),
        keys,
        torch.arange(10).unsqueeze(0),
        torch.zeros(2, dtype=torch.int64),
        torch.tensor([10, 2]),
        torch.tensor([[1, 3], [0, -1]]),
        k=3,
        block_size=3,
    )
    assert ours.tolist() == [[4, 5, 9], [0, 1, -1]]
