"""Whatever arrives, the wire reader answers with a request or with one coded sentence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from python_backend import wire
from python_backend.generation.options import OptionError
from python_backend.request import Delta, Request, RequestError
from python_backend.scheduler.checks import check_request
from python_backend.text.chat_input import ChatError, ChatRequest
from tests.python_backend.serving import limits

NAMES = [tensor.name for tensor in wire.INPUTS]
PROMPTS = ("text_input", "input_ids", "messages")
DTYPES = {
    "STRING": np.object_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
words = st.one_of(
    st.binary(max_size=12),
    st.text(max_size=12).map(str.encode),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.sampled_from([b"json", b"regex", b"high", b"[]", b"{}", b'[{"role":"user","content":"x"}]']),
)


@st.composite
def right_types(draw: st.DrawFn, name: str) -> npt.NDArray[Any]:
    """A tensor of an input's own type and shape, with any values."""
    spec = next(tensor for tensor in wire.INPUTS if tensor.name == name)
    size = draw(st.integers(0, 4)) if spec.size < 0 else spec.size
    if spec.kind == "STRING":
        return np.array([draw(st.lists(words, min_size=size, max_size=size))], dtype=np.object_)
    dtype = np.dtype(DTYPES[spec.kind])
    return draw(arrays.arrays(dtype, (1, size), elements=arrays.from_dtype(dtype)))


@st.composite
def any_tensor(draw: st.DrawFn) -> npt.NDArray[Any]:
    dtype = draw(
        st.sampled_from(["int8", "int32", "int64", "uint64", "float32", "float64", "bool"])
    )
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    return draw(arrays.arrays(np.dtype(dtype), shape))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, npt.NDArray[Any]]:
    """Mostly one prompt and some options of the right type; sometimes anything at all."""
    inputs: dict[str, npt.NDArray[Any]] = {}
    for name in (
        draw(st.sampled_from(PROMPTS)),
        *draw(st.lists(st.sampled_from(NAMES), max_size=5)),
    ):
        inputs[name] = draw(right_types(name))
    if draw(st.integers(0, 4)) == 0:
        inputs[draw(st.sampled_from(NAMES) | st.text(max_size=10))] = draw(any_tensor())
    return inputs


def is_one_sentence(error: Exception) -> bool:
    text = str(error).strip()
    return "\n" not in text and "expected" in text


def read_and_judge(inputs: dict[str, npt.NDArray[Any]], parameters: dict[str, Any]) -> None:
    """What a call goes through before it is queued. Raises RequestError."""
    asked = wire.read_request(inputs, parameters)
    assert sum(given is not None for given in (asked.text, asked.input_ids, asked.chat)) == 1
    sampling = asked.options.resolve(lambda word: [len(word)])
    ids = np.array([5], np.int32) if asked.input_ids is None else asked.input_ids
    end_ids = asked.options.end_ids(asked.end_ids or frozenset())
    check_request(Request("", ids, asked.max_tokens, sampling, end_ids, ignore), limits())


def ignore(delta: Delta) -> None:
    del delta


@settings(max_examples=300, deadline=None)
@given(calls(), st.dictionaries(st.text(max_size=6), json_values, max_size=1) | st.just({}))
def test_any_tensors_give_a_request_or_a_coded_sentence(
    inputs: dict[str, npt.NDArray[Any]], parameters: dict[str, Any]
) -> None:
    refusal = None
    try:
        read_and_judge(inputs, parameters)
    except RequestError as error:
        refusal = error
    if refusal is not None:
        code = wire.to_wire(refusal).code
        assert code in (wire.INVALID_ARGUMENT, wire.OVER_CAPACITY)
        assert is_one_sentence(refusal), refusal


MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool"]) | json_values,
        "content": st.text(max_size=12) | json_values,
        "reasoning_content": st.text(max_size=5) | json_values,
        "tool_calls": json_values
        | st.lists(
            st.fixed_dictionaries(
                {"id": st.text(max_size=3)},
                optional={
                    "function": st.fixed_dictionaries(
                        {"name": st.text(max_size=4)}, optional={"arguments": json_values}
                    )
                },
            ),
            max_size=2,
        ),
        "tool_call_id": st.text(max_size=3) | json_values,
        "name": json_values,
    },
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(MESSAGE, max_size=4).map(json.dumps) | json_values.map(json.dumps) | st.text(),
    st.none() | json_values.map(json.dumps) | st.text(max_size=20),
    st.booleans(),
    st.none() | st.text(max_size=5) | st.sampled_from(["low", "max", "50", "٣", "1e2"]),
)
def test_any_conversation_is_rendered_or_refused(
    messages: str, tools: str | None, thinking: bool, effort: str | None
) -> None:
    refusal = None
    try:
        chat = ChatRequest.read(messages, tools=tools, thinking=thinking, reasoning_effort=effort)
        chat.render()
    except ChatError as error:
        refusal = error
    assert refusal is None or is_one_sentence(refusal), refusal


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deeply_nested_json_is_refused(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    with pytest.raises(ChatError):
        ChatRequest.read(nested, tools=None, thinking=False, reasoning_effort=None)
    inputs = {
        "input_ids": np.array([[5]], np.int32),
        "logit_bias": np.array([[nested.encode()]], np.object_),
    }
    with pytest.raises((RequestError, OptionError)):
        wire.read_request(inputs, {})
