"""Answers of the OpenAI API as its official client sees them, before the real server with the
echo model: the answer repeats the last message, one byte a token."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.client.openai_proxy import CHAT, MODEL, chat, post, user

pytestmark = pytest.mark.server

SHELL = 'cd "$HOME" && make all 2>&1'
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
]
CALLS = (
    "Well.\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="shell">\n'
    f'<｜DSML｜ parameter name="command" string="true">{SHELL}</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="limits" string="false">[1, 2.5]</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    '<｜DSML｜ invoke name="list">\n\n</｜DSML｜ invoke>\n'
    "</｜DSML｜ calls>"
)


def described(answer: str) -> dict[str, Any]:
    """What the deployment was sent, by name."""
    inputs = json.loads(answer)["inputs"]
    return {n: v[2] if len(v[2]) > 1 else v[2][0] for n, v in inputs.items()}


# -- answers -------------------------------------------------------------------------------------


def test_a_whole_answer(api: openai.OpenAI) -> None:
    made = chat(api, "[cached]Grüße")
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Grüße")
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    usage = made.usage
    # 7 bytes and one id for [cached]; the echo model says that 64 are cached.
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 7, 15)
    assert usage.prompt_tokens_details.cached_tokens == 64
    assert made._request_id == made.id
    assert chat(api, "four", max_completion_tokens=3).choices[0].finish_reason == "length"


def test_chinese_and_emoji_stream_token_by_token(api: openai.OpenAI) -> None:
    """Tokens are single bytes here: every character leaves whole, as soon as it is."""
    text = "深度求索🙂é!"
    usage = {"include_usage": True}
    *chunks, last = chat(api, text, stream=True, stream_options=usage)
    deltas = [chunk.choices[0].delta.content for chunk in chunks]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [delta for delta in deltas if delta] == list(text)
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.completion_tokens) == ([], len(text.encode()))
    assert last.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_accepted_drafts_are_counted_streamed_and_whole(api: openai.OpenAI) -> None:
    usage = {"include_usage": True}
    *_, last = chat(api, "[pairs]abcdef", stream=True, stream_options=usage)
    for counted in (last.usage, chat(api, "[pairs]abcdef").usage):
        assert counted.completion_tokens_details.accepted_prediction_tokens == 3


def test_reasoning_is_split_from_content(api: openai.OpenAI) -> None:
    thinking = {"thinking": {"type": "enabled"}}
    message = chat(api, "2 < 3</think>So 3.", extra_body=thinking).choices[0].message
    assert (message.reasoning_content, message.content) == ("2 < 3", "So 3.")
    deltas = [
        chunk.choices[0].delta
        for chunk in chat(api, "2 < 3</think>So 3.", extra_body=thinking, stream=True)
    ]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "2 < 3"
    assert "".join(d.content or "" for d in deltas) == "So 3."
    plain = chat(api, "2 < 3</think>So 3.").choices[0].message
    assert plain.content == "2 < 3</think>So 3."
    assert not hasattr(plain, "reasoning_content")


def test_streamed_tool_calls_equal_whole_ones(api: openai.OpenAI) -> None:
    """An argument that ends in 2>&1 lost its end in another server's stream."""
    made = chat(api, CALLS, tools=TOOLS).choices[0]
    assert (made.finish_reason, made.message.content) == ("tool_calls", "Well.")
    whole = [(call.function.name, call.function.arguments) for call in made.message.tool_calls]
    assert json.loads(whole[0][1]) == {"command": SHELL, "limits": [1, 2.5]}
    assert [name for name, _ in whole] == ["shell", "list"]
    assert json.loads(whole[1][1]) == {}
    assert len({call.id for call in made.message.tool_calls}) == 2

    content, finish, calls = "", None, {}
    for chunk in chat(api, CALLS, tools=TOOLS, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or ():
            if part.id:
                calls[part.index] = [part.function.name, ""]
            calls[part.index][1] += part.function.arguments
    assert (content, finish) == ("Well.", "tool_calls")
    assert [tuple(calls[index]) for index in range(2)] == whole


def test_markup_is_read_where_there_are_tools(api: openai.OpenAI) -> None:
    assert chat(api, CALLS).choices[0].message.content == CALLS
    none = chat(api, CALLS, tools=TOOLS, tool_choice="none").choices[0]
    assert (none.message.content, none.finish_reason) == (CALLS, "stop")
    one = chat(api, CALLS, tools=TOOLS, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in one.tool_calls] == ["shell"]
    short = chat(api, CALLS, tools=TOOLS, max_tokens=len(CALLS.encode()) - 150).choices[0]
    assert short.finish_reason == "length"


def test_a_call_that_the_model_leaves_open_is_a_call(api: openai.OpenAI) -> None:
    """Clients look for calls where the answer says so, and then see that the arguments are none."""
    open_call = CALLS[: CALLS.index("2>&1")]
    (made,) = chat(api, open_call, tools=TOOLS).choices
    assert made.finish_reason == "tool_calls"
    (call,) = made.message.tool_calls
    assert call.function.name == "shell"
    assert call.function.arguments.startswith('{"command": "')
    *_, last = chat(api, open_call, tools=TOOLS, stream=True)
    assert last.choices[0].finish_reason == "tool_calls"


def test_the_stream_helper_of_the_official_client(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(model=MODEL, messages=user(CALLS), tools=TOOLS) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["command"] == SHELL


def test_completions_of_several_prompts(api: openai.OpenAI) -> None:
    made = api.completions.create(model=MODEL, prompt=["ab", "ü"], max_tokens=4)
    assert [(c.index, c.text, c.finish_reason) for c in made.choices] == [
        (0, "abab", "length"),
        (1, "üü", "length"),
    ]
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (4, 8)
    text = ["", ""]
    for chunk in api.completions.create(model=MODEL, prompt=[[97, 98], [99]], stream=True):
        text[chunk.choices[0].index] += chunk.choices[0].text
    assert text == ["ab" * 8, "c" * 16]


# -- what is sent --------------------------------------------------------------------------------


def test_a_chat_as_the_deployment_gets_it(api: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
    parts = [{"type": "text", "text": text} for text in ("Be ", "brief.")]
    messages: list[Any] = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning": "r", "tool_calls": [call | {"index": 0}],
         "content": None, "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c", "content": "done", "name": "shell"},
        {"role": "user", "content": "[describe_inputs]"},
    ]  # fmt: skip
    made = api.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, reasoning_effort="medium", stop="#",
        temperature=0.5, top_p=0.25, seed=-1, logit_bias={"5": -100}, user="u",
        extra_body={"top_k": -1},
    )  # fmt: skip
    sent = described(made.choices[0].message.reasoning_content)
    assert json.loads(sent.pop("messages")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
        {"role": "user", "content": "[describe_inputs]"},
    ]
    assert json.loads(sent.pop("tools")) == TOOLS
    assert json.loads(sent.pop("logit_bias")) == {"5": -100}
    assert sent == {
        "max_tokens": -1, "stream": False, "temperature": 0.5, "top_p": 0.25, "top_k": 0,
        "seed": 2**64 - 1, "thinking": True, "reasoning_effort": "high", "stop_words": "#",
    }  # fmt: skip


def test_a_second_turn_with_and_without_the_reasoning_field(api: openai.OpenAI) -> None:
    """The answer goes back as it came: either name of the field is the model's own."""
    answer = chat(api, "because</think>yes", reasoning_effort="low").choices[0].message
    for sent in (answer.model_dump(), {"role": "assistant", "content": "yes"}):
        messages: list[Any] = [*user("q"), sent, *user("[describe_inputs]")]
        made = api.chat.completions.create(model=MODEL, messages=messages)
        told = json.loads(described(made.choices[0].message.content)["messages"])[1]
        kept = {"reasoning_content": "because"} if "reasoning_content" in sent else {}
        assert told == {"role": "assistant", "content": "yes", **kept}


def test_a_completion_as_the_deployment_gets_it(api: openai.OpenAI) -> None:
    made = api.completions.create(model=MODEL, prompt=[305, 7], stop=["a", "b"])
    assert described(made.choices[0].text) == {
        "input_ids": [305, 7], "max_tokens": 16, "stream": False, "stop_words": ["a", "b"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "thinks", "effort"),
    [
        ({}, None, None),
        ({"reasoning_effort": "none"}, None, None),
        ({"reasoning_effort": 7}, True, "7"),
        ({"reasoning_effort": "minimal"}, True, "low"),
        ({"reasoning_effort": "max", "thinking": {"type": "enabled"}}, True, "max"),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "disabled"}}, None, None),
    ],
)
def test_how_reasoning_is_asked_for(
    proxy: str, changes: dict[str, Any], thinks: bool | None, effort: str | None
) -> None:
    body = {"model": MODEL, "messages": user("[describe_inputs]"), **changes}
    status, _, made = post(proxy, CHAT, body)
    assert status == 200, made
    message = made["choices"][0]["message"]
    sent = described(message.get("reasoning_content") or message["content"])
    assert (sent.get("thinking"), sent.get("reasoning_effort")) == (thinks, effort)
