"""Bodies without a server: whatever JSON comes is either sent or refused with a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.grpc import infer_message
from client.openai.errors import ApiError
from client.openai.fields import ChatFields, CompletionFields, read_body
from client.openai.limits import RateLimit
from client.openai.requests import chat_request, completion_request
from client.openai.settings import ApiKeys

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6) | st.sampled_from(["none", "auto", "text", "user", "tool", "function"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "name", "function", "parameters", "id", "x"]),
        inner, max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": st.text(max_size=4),
    },
    optional={"tool_calls": JSON, "name": JSON, "reasoning": JSON, "tool_call_id": JSON},
)  # fmt: skip


def fields_of(kind: Any, fixed: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The fixed fields, most of them right, and a few of the others with anything in them."""
    others = [name for name in kind.model_fields if name not in fixed]
    return st.builds(
        lambda a, b: {**a, **b},
        st.fixed_dictionaries(fixed),
        st.dictionaries(st.sampled_from(others), JSON, max_size=3),
    )


CHAT = fields_of(ChatFields, {"model": st.just("m"), "messages": st.lists(MESSAGE, max_size=3)})
COMPLETION = fields_of(
    CompletionFields,
    {
        "model": st.just("m"),
        "prompt": st.text(max_size=3) | st.lists(st.integers(-9, 2**31)) | JSON,
    },
)


def refusal(body: dict[str, Any]) -> str:
    """What is said to the client, empty for a body that is sent."""
    raw = json.dumps(body).encode()
    try:
        if "messages" in body:
            asked = chat_request(read_body(ChatFields, raw), "id")
        else:
            asked = completion_request(read_body(CompletionFields, raw), "id")
    except ApiError as error:
        return error.message if error.status == 400 else f"status {error.status}"
    try:
        for request in asked.requests:
            infer_message("m", request, stream=asked.stream)
    except ValueError as error:  # the proxy's 400, too: a value that its tensor cannot hold
        return str(error)
    return ""


@settings(deadline=None, max_examples=150)
@given(body=CHAT | COMPLETION)
def test_any_body_is_sent_or_refused_with_a_sentence(body: dict[str, Any]) -> None:
    said = refusal(body)
    assert not said or said.startswith(("expected ", "in "))
    assert len(said) < 400


@pytest.mark.parametrize(
    ("fields", "kind", "guide"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json", None),
        (
            {"response_format": {
                "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}
            }},
            "json_schema", '{"type": "null"}',
        ),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json_schema", '{"type": "null"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["é"]}}, "choice", '["é"]'),
        ({"structured_outputs": {"grammar": "root ::= [a]"}}, "grammar", "root ::= [a]"),
    ],
)  # fmt: skip
def test_forms_of_an_answer(fields: dict[str, Any], kind: str | None, guide: str | None) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    (request,) = chat_request(read_body(ChatFields, json.dumps(body).encode()), "id").requests
    assert request.guided_decoding_guide_type == kind
    assert request.guided_decoding_guide == guide


def test_the_model_is_told_the_form() -> None:
    """In the first system message, which is made where there is none."""
    schema = {"type": "integer"}
    by_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    user = {"role": "user", "content": "a"}
    developer = {"role": "developer", "content": "be brief"}
    for form, messages, first in (
        (by_schema, [user], {"content": "", "response_format": schema}),
        (by_schema, [developer, user], {"content": "be brief", "response_format": schema}),
        ({"type": "json_object"}, [user], {"content": "", "response_format": {"type": "object"}}),
    ):
        body = {"model": "m", "messages": messages, "response_format": form}
        asked = chat_request(read_body(ChatFields, json.dumps(body).encode()), "id")
        (request,) = asked.requests
        assert request.messages == [{"role": "system", **first}, user]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "it needs one of json, regex, choice and grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "it needs one of"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "says another form",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}],
             "response_format": {"type": "json_object"}},
            "an answer of a given form calls none",
        ),
    ],
)  # fmt: skip
def test_forms_that_cannot_be_had(fields: dict[str, Any], sentence: str) -> None:
    said = refusal({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields})
    assert sentence in said


def test_lists_that_are_empty_ask_for_nothing() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stop": [], "tools": []}
    asked = chat_request(read_body(ChatFields, json.dumps(body).encode()), "id")
    (request,) = asked.requests
    names = {tensor.name for tensor in infer_message("m", request, stream=False).inputs}
    assert names == {"messages", "max_tokens", "stream"}
    assert not asked.calls


def test_a_bucket_fills_evenly() -> None:
    """60 a minute: all 60 at once, then one a second; other callers have their own."""
    now = [100.0]
    limit = RateLimit(60, clock=lambda: now[0])
    for _ in range(60):
        limit.take("a")
    with pytest.raises(ApiError) as refused:
        limit.take("a")
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    limit.take("b")
    now[0] += 1.0
    limit.take("a")
    with pytest.raises(ApiError):
        limit.take("a")
    now[0] += 3600.0
    for _ in range(60):
        limit.take("a")
    with pytest.raises(ApiError):
        limit.take("a")


def test_callers_that_are_many_take_bounded_memory() -> None:
    now = [0.0]
    limit = RateLimit(1, clock=lambda: now[0])
    for i in range(25_000):
        now[0] += 0.001
        limit.take(str(i))
    assert len(limit._buckets) <= 10_000


def test_keys_are_named_by_their_place() -> None:
    keys = ApiKeys(("a", "b" * 100))
    assert [keys.name(key) for key in ("a", "b" * 100, "b", "", "ü")] == [
        "0",
        "1",
        None,
        None,
        None,
    ]
    assert not ApiKeys()
    assert ApiKeys(("ü",)).name("ü") == "0"
