"""The expansion of a step from per-request to per-row facts, against numbers worked by hand."""

from __future__ import annotations

import numpy as np

from engine.batch import StepArrays


def arrays(**changes: object) -> StepArrays:
    """A prefill chunk (positions 4 … 6), a decode row (position 9), a cold start (0, 1)."""
    values: dict[str, object] = {
        "tokens": np.array([11, 12, 13, 21, 31, 32], dtype=np.int32),
        "query_start": np.array([0, 3, 4, 6], dtype=np.int32),
        "first_position": np.array([4, 9, 0]),
        "encoder_floor": np.array([2, 0, 0]),
        "decoder_floor": np.array([5, 3, 7]),
        "write_floor": np.array([6, 0, 0]),
        "history": np.array([[8, 9, 10], [7, 8, 9], [-1, -1, -1]], dtype=np.int32),
        "wants_logits": np.array([True, True, False]),
    }
    return StepArrays(**{**values, **changes})  # type: ignore[arg-type]


def test_rows_get_position_and_request() -> None:
    batch = arrays().to_torch()
    assert batch.positions.tolist() == [4, 5, 6, 9, 0, 1]
    assert batch.request.tolist() == [0, 0, 0, 1, 2, 2]
    assert (batch.num_rows, batch.num_requests, batch.max_context) == (6, 3, 10)


def test_decoder_rows_are_those_at_or_above_the_floor() -> None:
    batch = arrays().to_torch()
    assert batch.decoder_rows.tolist() == [1, 2, 3]


def test_logit_rows_are_the_last_rows_of_those_who_ask() -> None:
    assert arrays().to_torch().logit_rows.tolist() == [1, 2]
    first_only = arrays(wants_logits=np.array([True, False, False]))
    assert first_only.to_torch().logit_rows.tolist() == [1]
    assert arrays().to_torch(all_logits=True).logit_rows.tolist() == [0, 1, 2]


def test_every_tensor_is_int64() -> None:
    batch = arrays().to_torch()
    for name in ("tokens", "query_start", "history", "logit_rows", "decoder_rows", "write_floor"):
        assert str(getattr(batch, name).dtype) == "torch.int64", name


def test_a_step_below_every_decoder_floor_has_no_decoder_row() -> None:
    batch = arrays(
        decoder_floor=np.array([100, 100, 100]), wants_logits=np.array([False] * 3)
    ).to_torch()
    assert batch.decoder_rows.tolist() == []
    assert batch.logit_rows.tolist() == []
