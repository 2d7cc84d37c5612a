"""Sparse attention against a per-head oracle with complex rotations; sinks, holes, invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_oracle import oracle, rotate
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.formats.records import main_record, window_record
from plugins.formats.rows import PackedRows, ValueRows
from plugins.mega_attention import mega_attention
from plugins.mega_attention.cases import CASES, AttentionCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def check(operands: dict, dtype: torch.dtype) -> None:
    o = mega_attention(**operands)
    assert o.dtype == dtype
    assert o.shape == operands["q"].shape
    for t in range(o.shape[0]):
        for h in range(o.shape[1]):
            np.testing.assert_allclose(
                o[t, h].double().numpy(),
                oracle(operands, t, h),
                rtol=0,
                atol=TOLERANCE[dtype] * 4,
                err_msg=f"row {t}, head {h}",
            )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_the_per_head_oracle(case: AttentionCase, dtype: torch.dtype) -> None:
    if case.query_scale > 10 and dtype == torch.bfloat16:
        # Rotated queries are rounded to bfloat16: scores of ±500 are off by one whole unit.
        assert torch.isfinite(mega_attention(**case.operands(dtype))).all()
        return
    operands = case.operands(dtype)
    if case.query_scale > 10 and dtype == torch.float32:
        operands["scale"] /= 16.0
    check(operands, dtype)


@given(st.integers(1, 6), st.integers(1, 20), st.none() | st.integers(0, 20), st.integers(0, 2**16))
@settings(deadline=None, max_examples=30)
def test_ragged_key_sets(rows: int, window: int, main: int | None, seed: int) -> None:
    case = AttentionCase("ragged", rows, 2, 16, 8, window, main, holes=0.4, first_position=seed)
    check(case.operands(torch.float64, seed), torch.float64)


def test_key_sets_without_rows_give_zeros() -> None:
    for sink in ("finite", "-inf", "+inf"):
        operands = AttentionCase("empty", 3, 4, 32, 8, 8, 4, holes=1.0, sink=sink).operands(
            torch.float32
        )
        assert torch.equal(mega_attention(**operands), torch.zeros(3, 4, 32)), sink


def test_a_single_key_at_the_query_returns_its_unrotated_value() -> None:
    """Without a sink; the store holds the rotated row, as kv_write leaves it."""
    draw = torch.Generator().manual_seed(1)
    value, q = torch.randn(2, 32, generator=draw, dtype=torch.float64)
    inv_freq = torch.tensor([1.0, 0.3, 0.01, 1e-4], dtype=torch.float64)
    stored = torch.from_numpy(rotate(value.numpy(), 777, inv_freq.numpy()))
    o = mega_attention(
        q.view(1, 1, 32),
        torch.tensor([777]),
        inv_freq,
        ValueRows(stored.view(1, 32)),
        torch.tensor([[0, -1]]),
        None,
        None,
        torch.tensor([-torch.inf]),
        scale=0.2,
    )
    torch.testing.assert_close(o.flatten(), value, rtol=0, atol=1e-12)


def test_selecting_every_entry_is_dense_attention() -> None:
    """Order, holes and the split between window and main do not matter, only the set does."""
    draw = torch.Generator().manual_seed(2)
    values = ValueRows(torch.randn(30, 32, generator=draw, dtype=torch.float64))
    base = AttentionCase("dense", 4, 2, 32, 8, 1, None).operands(torch.float64)
    everything = torch.arange(30).expand(4, -1)
    dense = mega_attention(**{**base, "window": values, "window_slots": everything})
    shuffled = torch.stack([torch.randperm(30, generator=draw) for _ in range(4)])
    holes = torch.full((4, 5), -1)
    sparse = mega_attention(
        **{
            **base,
            "window": values,
            "window_slots": torch.cat((holes, shuffled[:, :12]), 1),
            "main": values,
            "main_slots": torch.cat((shuffled[:, 12:], holes), 1),
        }
    )
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-13)


def test_a_key_in_both_sets_counts_twice() -> None:
    operands = AttentionCase("twice", 1, 1, 16, 8, 2, 1, holes=0.0).operands(torch.float64)
    operands["main"] = operands["window"]
    operands["main_slots"] = operands["window_slots"][:, :1]
    check(operands, torch.float64)


def test_packed_rows_attend_like_their_values() -> None:
    draw = torch.Generator().manual_seed(4)
    operands = AttentionCase("packed", 5, 4, 64, 16, 8, 4).operands(torch.float32)
    stores = {}
    for name, layout in (("window", window_record(64)), ("main", main_record(64))):
        values = layout.round(torch.randn(32, 64, generator=draw))
        packed = PackedRows(torch.zeros(32, layout.bytes_per_row, dtype=torch.uint8), layout)
        packed.write(torch.arange(32), values)
        slots = operands[f"{name}_slots"]
        operands[f"{name}_slots"] = torch.where(slots >= 0, slots % 32, -1)
        stores[name] = (ValueRows(values), packed)
    of_values, of_bytes = (
        mega_attention(**{**operands, "window": stores["window"][i], "main": stores["main"][i]})
        for i in (0, 1)
    )
    assert torch.equal(of_bytes, of_values)


@pytest.mark.parametrize(
    ("heads", "width", "window", "main"), [(4, 64, 8, 4), (8, 64, 32, 48), (16, 512, 128, 80)]
)
def test_a_row_does_not_depend_on_the_batch(heads: int, width: int, window: int, main: int) -> None:
    case = AttentionCase("batch", 37, heads, width, width // 4, window, main)
    operands = case.operands(torch.float32)
    whole = mega_attention(**operands)
    names = ("q", "positions", "window_slots", "main_slots")
    for start in range(0, 37, 5):
        for rows in (1, 2, 17):
            part = slice(start, start + rows)
            alone = {name: operands[name][part].clone() for name in names}
            # A batch pads its selections to its own longest row.
            alone["main_slots"] = torch.nn.functional.pad(
                alone["main_slots"], (0, 7 * start), value=-1
            )
            assert torch.equal(mega_attention(**{**operands, **alone}), whole[part])


def test_row_tiles_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = AttentionCase("tiles", 23, 2, 32, 8, 8, 4).operands(torch.float32)
    whole = mega_attention(**operands)
    limits = {"cpu": 4 * 32 * 32 * 5}
    monkeypatch.setattr("plugins.mega_attention.reference._GATHER_BYTES", limits)
    assert torch.equal(mega_attention(**operands), whole)


def test_gradients() -> None:
    operands = AttentionCase("gradient", 2, 2, 6, 4, 3, 2).operands(torch.float64)
    operands["window"].values.nan_to_num_(1.0)
    operands["main"].values.nan_to_num_(1.0)
    inputs = [operands["q"], operands["window"].values, operands["main"].values, operands["sink"]]

    def run(q, window, main, sink):
        stores = {"window": ValueRows(window), "main": ValueRows(main)}
        return mega_attention(**{**operands, "q": q, "sink": sink, **stores})

    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in inputs])


def test_gradients_stay_finite_without_keys_and_with_unread_nan() -> None:
    operands = AttentionCase("no keys", 3, 2, 16, 8, 4, 2, holes=0.7).operands(torch.float32)
    operands["window_slots"][0] = operands["main_slots"][0] = -1
    leaves = [operands["q"], operands["sink"], operands["window"].values]
    for leaf in leaves:
        leaf.requires_grad_()
    mega_attention(**operands).sum().backward()
    for leaf in leaves:
        assert torch.isfinite(leaf.grad).all()
