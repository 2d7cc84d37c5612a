"""Reading a request: what is accepted, and the sentence for everything that is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from python_backend import wire
from python_backend.request import RequestError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "model_repository/deepseek_v41/config.pbtxt"


def tensors(**values: Any) -> dict[str, np.ndarray]:
    """Values as [1, n] arrays of the right type, the prompt 1 2 3 unless another is given."""
    dtypes = {"STRING": object, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
    kinds = {tensor.name: tensor.kind for tensor in wire.INPUTS}
    if "text_input" not in values:
        values = {"input_ids": [1, 2, 3]} | values
    return {
        name: np.atleast_1d(np.array(value, dtype=dtypes.get(kinds[name], np.bool_)))[None]
        for name, value in values.items()
        if value is not None
    }


def refusal(inputs: dict[str, np.ndarray], **parameters: Any) -> str:
    with pytest.raises(RequestError) as caught:
        wire.read_request(inputs, parameters)
    assert caught.value.code == "invalid_argument"
    assert str(caught.value).startswith("[invalid_argument] expected ")
    return str(caught.value)


def test_the_tables_are_those_of_config_pbtxt() -> None:
    config = text_format.Parse(CONFIG.read_text(), model_config_pb2.ModelConfig())
    kinds = model_config_pb2.DataType.Name
    for ours, theirs in ((wire.INPUTS, config.input), (wire.OUTPUTS, config.output)):
        assert [(t.name, f"TYPE_{t.kind}", [t.size]) for t in ours] == [
            (t.name, kinds(t.data_type), list(t.dims)) for t in theirs
        ]
    assert all(t.optional for t in config.input)
    assert config.model_transaction_policy.decoupled


def test_defaults() -> None:
    request = wire.read_request(tensors(), {"id": "r1"})
    assert request.text is None
    assert request.input_ids is not None
    assert request.input_ids.tolist() == [1, 2, 3]
    assert request.input_ids.dtype == np.int32
    assert (request.max_tokens, request.stream, request.end_ids) == (16, False, None)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (
        0.0,
        0,
        1.0,
    )


def test_everything_given() -> None:
    request = wire.read_request(
        tensors(
            text_input="Grüße".encode(), max_tokens=7, stream=True, temperature=0.5, top_k=3,
            top_p=0.25, seed=2**64 - 1, end_id=5, pad_id=2, beam_width=1, stop_words=[b""],
            min_tokens=1, return_num_input_tokens=False,
        ),
        {},
    )  # fmt: skip
    assert (request.text, request.input_ids) == ("Grüße", None)
    assert (request.max_tokens, request.stream, request.end_ids) == (7, True, frozenset({5}))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (
        0.5,
        3,
        0.25,
        2**64 - 1,
    )
    assert (request.return_num_input_tokens, request.return_num_output_tokens) == (False, True)


def test_an_end_id_of_minus_one_means_that_nothing_ends_it() -> None:
    assert wire.read_request(tensors(end_id=-1), {}).end_ids == frozenset()


def test_the_older_name_of_the_seed() -> None:
    assert wire.read_request(tensors(random_seed=8), {}).sampling.seed == 8
    assert "seed 7 and random_seed 8" in refusal(tensors(seed=7, random_seed=8))


def test_requests_without_a_seed_differ() -> None:
    seeds = {wire.read_request(tensors(), {}).sampling.seed for _ in range(8)}
    assert len(seeds) == 8


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"input_ids": None}, "exactly one of text_input, input_ids, messages, got none"),
        ({"text_input": b"a", "input_ids": [1]}, "exactly one of .*, got text_input and input_ids"),
        ({"text_input": b""}, "a prompt of at least one token, got an empty text"),
        ({"text_input": b"ab\xff"}, "text_input as UTF-8, got byte 0xff at 2"),
        ({"beam_width": 2}, "beam_width to be 1 or not sent, got 2"),
        ({"num_return_sequences": 3}, "num_return_sequences to be 1 or not sent, got 3"),
        ({"repetition_penalty": 1.5}, "repetition_penalty to be 1.0 or not sent, got 1.5"),
        ({"frequency_penalty": np.nan}, "frequency_penalty to be 0.0 or not sent, got nan"),
        ({"min_tokens": 2}, "min_tokens to be 0 or 1 or not sent, got 2"),
        ({"stop_words": [b"", b"end"]}, "stop_words to be '' or not sent, got 'end'"),
        ({"return_log_probs": True}, "return_log_probs to be False or not sent, got True"),
        ({"exclude_input_in_output": False}, "exclude_input_in_output to be True or not sent"),
        ({"guided_decoding_guide": b"\xff"}, "guided_decoding_guide as UTF-8"),
    ],
)  # fmt: skip
def test_bad_values(values: dict[str, Any], sentence: str) -> None:
    assert re.search(sentence, refusal(tensors(**values)))


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("input_ids", np.ones((1, 3), np.int64), "input_ids as INT32, got int64"),
        ("input_ids", np.ones(3, np.int32), r"input_ids of shape \[1, n\], got \[3\]"),
        ("input_ids", np.ones((2, 3), np.int32), r"one request per call.*got \[2, 3\]"),
        ("input_ids", np.ones((0, 3), np.int32), r"input_ids of shape \[1, n\], got \[0, 3\]"),
        ("max_tokens", np.ones((1, 2), np.int32), r"max_tokens of shape \[1, 1\], got \[1, 2\]"),
        ("temperature", np.ones((1, 1)), "temperature as FP32, got float64"),
        ("stream", np.ones((1, 1), np.int32), "stream as BOOL, got int32"),
        ("top_q", np.ones((1, 1), np.float32), "got 'top_q'; did you mean top_"),
    ],
)  # fmt: skip
def test_wrong_types_and_shapes(name: str, array: np.ndarray, sentence: str) -> None:
    assert re.search(sentence, refusal(tensors() | {name: array}))


def test_an_unknown_field_is_not_ignored() -> None:
    assert "got 'max_token'; did you mean max_tokens?" in refusal(tensors(), max_token=5)
    assert "see the model's documentation" in refusal(tensors(), zzz=5)


def test_every_code_of_the_backend_has_a_wire_code() -> None:
    """Reads the sources, so that a new code cannot reach clients as `internal` unnoticed."""
    used = set()
    for path in (ROOT / "python_backend").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RequestError":
                used |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    assert {"exceeds_cache", "token_out_of_range"} <= used
    for code in used:
        error = wire.to_wire(RequestError(code, "expected [a] thing"))
        assert error.code != "internal" or code in {"core_failed", "executor_failed", "internal"}
        assert str(error) == f"[{error.code}] expected [a] thing"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("too_long", "invalid_argument"),
        ("exceeds_cache", "over_capacity"),
        ("shutting_down", "unavailable"),
        ("executor_failed", "internal"),
        ("cancelled", "cancelled"),
        ("never heard of", "internal"),
    ],
)
def test_wire_codes(code: str, expected: str) -> None:
    assert wire.to_wire(RequestError(code, "a")).code == expected
