"""What the core takes and what it refuses at once."""

from __future__ import annotations

import numpy as np
import pytest
from serving import Stream, finish, limits, new_core, serve, tokens

from python_backend.request import Request, RequestError, SamplingParams


def test_a_request_id_in_use_is_refused() -> None:
    core = new_core(limits())
    first, second = Stream("same", tokens(18, 10), 5), Stream("same", tokens(19, 10), 5)
    core.add_request(first.request)
    core.add_request(second.request)
    finish(core)
    first.assert_served()
    error = second.deltas[0].error
    assert error is not None
    assert error.code == "duplicate_request_id"
    third = Stream("same", tokens(20, 10), 5)
    serve(core, third)


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"input_ids": np.empty(0, np.int32)}, "empty_prompt", "at least one prompt token"),
        ({"input_ids": tokens(1, 5).astype(np.int64)}, "invalid_input_ids", r"got int64 \(5,\)"),
        ({"input_ids": tokens(1, 6).reshape(2, 3)}, "invalid_input_ids", r"got int32 \(2, 3\)"),
        ({"input_ids": tokens(1, 10)[::2]}, "invalid_input_ids", "contiguous"),
        ({"input_ids": np.array([3, 50], np.int32)}, "token_out_of_range", "got 50 at position 1"),
        ({"input_ids": np.array([-1, 3], np.int32)}, "token_out_of_range", "got -1 at position 0"),
        ({"max_tokens": 0}, "invalid_max_tokens", "max_tokens ≥ 1, got 0"),
        (
            {"max_tokens": 3, "sampling": SamplingParams(min_tokens=4)},
            "invalid_sampling",
            "min_tokens of at most max_tokens, got 4 and 3",
        ),
        ({"max_tokens": 508}, "too_long", r"at most 512 tokens together, got 5 \+ 508"),
        ({"end_ids": frozenset({50})}, "token_out_of_range", "end ids from 0 to 49, got 50"),
        ({"end_ids": frozenset(range(33))}, "too_many_end_ids", "at most 32 end ids, got 33"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "invalid_sampling", "temperature ≥ 0"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "invalid_sampling", "got nan"),
        ({"sampling": SamplingParams(temperature=float("inf"))}, "invalid_sampling", "got inf"),
        ({"sampling": SamplingParams(top_k=-1)}, "invalid_sampling", "top_k from 0"),
        ({"sampling": SamplingParams(top_p=0.0)}, "invalid_sampling", "top_p above 0"),
        ({"sampling": SamplingParams(top_p=float("nan"))}, "invalid_sampling", "got nan"),
        ({"sampling": SamplingParams(seed=-1)}, "invalid_sampling", "seed from 0"),
        ({"sampling": SamplingParams(seed=1 << 64)}, "invalid_sampling", "seed from 0"),
    ],
)
def test_bad_requests_are_refused_at_once(
    changes: dict[str, object], code: str, sentence: str
) -> None:
    values: dict[str, object] = {
        "request_id": "bad",
        "input_ids": tokens(1, 5),
        "max_tokens": 5,
        "sampling": SamplingParams(),
        "end_ids": frozenset(),
        "on_delta": lambda delta: pytest.fail(f"got {delta}"),
    }
    core = new_core(limits())
    with pytest.raises(RequestError, match=sentence) as refusal:
        core.add_request(Request(**(values | changes)))  # type: ignore[arg-type]
    assert refusal.value.code == code
    assert str(refusal.value).startswith(f"[{code}] expected ")
    assert not core.has_work


def test_the_largest_seed_and_most_end_ids_are_served() -> None:
    core = new_core(limits())
    stream = Stream("a", tokens(21, 5), 40, end_ids=frozenset(range(32)), seed=(1 << 64) - 1)
    serve(core, stream)


def test_the_callers_buffer_is_free_after_adding() -> None:
    core = new_core(limits())
    prompt = tokens(22, 40)
    stream = Stream("a", prompt, 5)
    expected = stream.alone()
    core.add_request(stream.request)
    prompt[:] = 0
    finish(core)
    assert stream.output == expected
