"""Chat requests from outside: what is read, and the sentence for everything that is not."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from python_backend import wire
from python_backend.request import RequestError
from python_backend.text.chat_input import MAX_JSON_BYTES, ChatError
from python_backend.text.tokenizer import TextTokenizer, TokenizerError

Q = {"role": "user", "content": "q"}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "ok"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def read(messages: Any, **options: Any) -> wire.WireRequest:
    """Through the wire; a list is sent as its JSON, text and bytes as they are."""
    raw = messages if isinstance(messages, str | bytes) else json.dumps(messages)
    tensors = {"messages": np.array([[raw]], dtype=object)}
    for name, value in options.items():
        dtype = np.bool_ if isinstance(value, bool) else np.object_
        tensors[name] = np.array([[value]], dtype=dtype)
    return wire.read_request(tensors, {})


def rendered(messages: Any, **options: Any) -> str:
    request = read(messages, **options)
    assert request.chat is not None
    assert request.text is None
    assert request.input_ids is None
    return request.chat.render()


def test_a_question_with_every_option() -> None:
    assert rendered([Q]) == "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜></think>"
    text = rendered([Q], thinking=True, reasoning_effort="max", tools=json.dumps([TOOL]).encode())
    assert text.startswith("<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 100 (range")
    assert '{"name": "f", "parameters": {}}' in text
    assert text.endswith("<｜User｜>q<｜Assistant｜><think>")


def test_the_format_of_the_reply_is_told() -> None:
    text = rendered([{"role": "system", "content": "s", "response_format": {"type": "null"}}, Q])
    assert '\n{"type": "null"}<｜User｜>q<｜Assistant｜></think>' in text


@pytest.mark.parametrize(("effort", "number"), [("low", 50), ("high", 75), ("7", 7), ("100", 100)])
def test_effort(effort: str, number: int) -> None:
    text = rendered([Q], thinking=True, reasoning_effort=effort)
    assert f"Reasoning Effort: {number} (" in text


def test_tool_calls_and_their_results() -> None:
    text = rendered([Q, CALLS, RESULT])
    assert '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>' in text
    assert text.endswith("<｜User｜><tool_result>ok</tool_result><｜Assistant｜></think>")


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("[{", {}, "messages as a JSON list, but Expecting property name"),
    ("[NaN]", {}, "NaN is no JSON number"),
    ("[" * 100_000, {}, "got one nested too deeply"),
    (b"\xff", {}, "messages as UTF-8, got byte 0xff at 0"),
    ('"hello"', {}, "a JSON list of at least one object, got a string"),
    ("[]", {}, "got an empty list"),
    (["hello"], {}, r"messages\[0\] as a JSON object, got a string"),
    ([{"content": "q"}], {}, r'messages\[0\].role to be "system", .*got nothing'),
    ([{"role": "developer", "content": "q"}], {}, 'got "developer"'),
    ([{"role": ["user"], "content": "q"}], {}, "got a list; rename it"),
    ([{"role": "user"}], {}, r"messages\[0\].content as a string, got nothing"),
    ([Q, {"role": "assistant"}, Q], {}, r"messages\[1\].content as a string, got nothing"),
    ([{"role": "user", "content": ["q"]}], {}, "content as a string, got a list"),
    ([{"role": "user", "content": 7}], {}, "content as a string, got a number"),
    ([Q | {"name": "Ann"}], {}, r'fields of a user message \(content, role\), got "name"'),
    ([{"role": "user", "content": "\ud800"}], {}, "valid Unicode, got a lone surrogate"),
    ([Q | {"response_format": {}}], {}, r'a user message \(content, role\), got "response_format"'),
    (
        [{"role": "system", "content": "", "response_format": "json"}, Q],
        {},
        r"messages\[0\].response_format as a JSON object, got a string",
    ),
    ([Q, {"role": "assistant", "content": "a"}], {}, "last message .* got an assistant message"),
    ([Q, CALLS, RESULT | {"tool_call_id": "y"}], {}, r'messages\[2\].tool_call_id .*got "y"'),
    ([RESULT], {}, r'messages\[0\].tool_call_id .*got "x"'),
    ([Q, {"role": "assistant", "tool_calls": [{"id": "x"}]}, Q], {}, "function as a JSON object"),
    ([Q], {"tools": b"[{}]"}, r'tools\[0\].type to be "function", got nothing'),
    ([Q], {"tools": b'[{"type": "function", "function": {}}]'}, "function.name as a string"),
    (
        [Q],
        {"tools": json.dumps([TOOL, TOOL | {"function": {"name": "g"}}, TOOL]).encode()},
        r'tools of different names, got "f" in tools\[2\] and in tools\[0\]; rename one',
    ),
    ([Q], {"thinking": True, "reasoning_effort": "0"}, 'from 1 to 100, got "0"'),
    ([Q], {"thinking": True, "reasoning_effort": "huge"}, 'got "huge"; choose one'),
    ([Q], {"reasoning_effort": "low"}, "no reasoning_effort without thinking, got 'low'"),
    (
        [{"role": "assistant", "content": "a"}, Q],
        {},
        "a user message before each assistant message, got none before turn 0",
    ),
]


@pytest.mark.parametrize(("messages", "options", "sentence"), BAD)
def test_bad_chats(messages: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        rendered(messages, **options)
    assert str(caught.value).removeprefix("[invalid_argument] ").startswith("expected ")


def test_arguments_of_a_call_are_an_object() -> None:
    for arguments in ("[1]", "{", 3, None):
        call = {"id": "x", "function": {"name": "f", "arguments": arguments}}
        with pytest.raises(RequestError, match="arguments as a JSON object"):
            read([Q, {"role": "assistant", "tool_calls": [call]}, Q])


@pytest.mark.parametrize("depth", [300, 900, 940, 980, 1000, 5000])
def test_nested_arguments_render_or_are_refused(depth: int) -> None:
    """Whatever the depth of the stack where they are read and rendered."""
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    question = json.dumps(Q)
    for value in (json.dumps(arguments), arguments):
        call = f'{{"id": "x", "function": {{"name": "f", "arguments": {value}}}}}'
        calls = f'{{"role": "assistant", "tool_calls": [{call}]}}'
        outcome = outcome_of(f"[{question}, {calls}, {question}]")
        if depth <= 300:
            assert "[" * depth in outcome
        else:
            assert "[" * depth in outcome or re.search(
                "nested too deeply|arguments as a JSON object", outcome
            )


def outcome_of(messages: str) -> str:
    """The rendered text, or the refusal."""
    try:
        return rendered(messages)
    except (RequestError, ChatError) as error:
        return str(error)


def test_the_size_limit() -> None:
    envelope = len(json.dumps([{"role": "user", "content": ""}]))
    fits = [{"role": "user", "content": "a" * (MAX_JSON_BYTES - envelope)}]
    read(fits)
    fits[0]["content"] += "a"
    with pytest.raises(RequestError, match=f"at most {MAX_JSON_BYTES} bytes, got 16777217"):
        read(fits)


def test_chat_options_belong_to_messages() -> None:
    tensors = {
        "input_ids": np.ones((1, 3), np.int32),
        "thinking": np.ones((1, 1), np.bool_),
    }
    with pytest.raises(
        RequestError, match=r"^\[invalid_argument\] expected thinking with messages"
    ):
        wire.read_request(tensors, {})


def test_a_tokenizer_without_chat_tokens_renders_nothing() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    with pytest.raises(TokenizerError, match="a tokenizer with the token <｜begin"):
        TextTokenizer(tokenizer, 1).encode_rendered("a")
