"""The chat format against strings written by hand, and the loss mask at its borders."""

from random import Random

import numpy as np
import pytest

from examples.tinyflash import dialogue, tools
from examples.tinyflash.dialogue import Conversation
from examples.tinyflash.mixture import tokenise
from examples.tinyflash.tokenizer import encoder
from python_backend.text import chat

BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER = "<\uff5cUser\uff5c>"
ASSISTANT = "<\uff5cAssistant\uff5c>"
SYSTEM = "<\uff5cSystem\uff5c>"
EFFORT_75 = (
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)

Q1: chat.Message = {"role": "user", "content": "q1"}
A1: chat.Message = {"role": "assistant", "content": "a1", "reasoning_content": "r1"}
Q2: chat.Message = {"role": "user", "content": "q2"}
A2: chat.Message = {"role": "assistant", "content": "a2", "reasoning_content": "r2"}
TOOL: chat.Tool = {"type": "function", "function": {"name": "f", "parameters": {"n": "é"}}}


def call(identity: str, name: str, arguments: object) -> dict[str, object]:
    return {"id": identity, "function": {"name": name, "arguments": arguments}}


def test_chat_mode() -> None:
    assert chat.render([Q1]) == f"{BOS}{USER}q1{ASSISTANT}</think>"
    assert chat.render([Q1, A1]) == f"{BOS}{USER}q1{ASSISTANT}</think>a1{EOS}"
    assert chat.render([Q1, A1, Q2]) == (
        f"{BOS}{USER}q1{ASSISTANT}</think>a1{EOS}{USER}q2{ASSISTANT}</think>"
    )


def test_thinking_mode_begins_with_the_effort_line() -> None:
    assert chat.render([Q1], mode="thinking") == (
        f"{BOS}{SYSTEM}{EFFORT_75}{USER}q1{ASSISTANT}<think>"
    )
    assert "Reasoning Effort: 7 (range" in chat.render([Q1], mode="thinking", effort=7)
    assert chat.EFFORT_LEVELS == {"low": 50, "high": 75, "xhigh": 75, "max": 100}


def test_thinking_drops_earlier_reasoning() -> None:
    assert chat.render([Q1, A1, Q2, A2], mode="thinking") == (
        f"{BOS}{SYSTEM}{EFFORT_75}{USER}q1{ASSISTANT}</think>a1{EOS}"
        f"{USER}q2{ASSISTANT}<think>r2</think>a2{EOS}"
    )


def test_tools_keep_all_reasoning() -> None:
    text = chat.render([Q1, A1, Q2], mode="thinking", tools=[TOOL])
    assert text.startswith(f"{BOS}{SYSTEM}{EFFORT_75}\n\n## Tools\n\n")
    assert '\n\n### Available Tool Schemas\n\n{"name": "f", "parameters": {"n": "é"}}\n' in text
    assert text.endswith(f"{USER}q1{ASSISTANT}<think>r1</think>a1{EOS}{USER}q2{ASSISTANT}<think>")


def test_system_messages() -> None:
    first = {"role": "system", "content": "be brief"}
    assert chat.render([first, Q1]) == f"{BOS}{SYSTEM}be brief{USER}q1{ASSISTANT}</think>"
    assert chat.render([first, Q1], mode="thinking") == (
        f"{BOS}{SYSTEM}{EFFORT_75}be brief{USER}q1{ASSISTANT}<think>"
    )
    with_tools = chat.render([first, Q1], tools=[TOOL])
    assert with_tools.startswith(f"{BOS}{SYSTEM}be brief\n\n## Tools\n\n")
    assert chat.render([Q1], tools=[TOOL]).startswith(f"{BOS}{SYSTEM}\n\n## Tools\n\n")


def test_a_later_system_message_is_answered_like_a_user_message() -> None:
    later = {"role": "system", "content": "now in rhyme"}
    assert chat.render([Q1, A1, later], mode="thinking") == (
        f"{BOS}{SYSTEM}{EFFORT_75}{USER}q1{ASSISTANT}</think>a1{EOS}"
        f"{SYSTEM}now in rhyme{ASSISTANT}<think>"
    )
    # Followed by a user message, only that one gets the assistant's header.
    assert chat.render([Q1, A1, later, Q2]) == (
        f"{BOS}{USER}q1{ASSISTANT}</think>a1{EOS}{SYSTEM}now in rhyme{USER}q2{ASSISTANT}</think>"
    )


def test_a_first_system_message_that_the_assistant_answers_has_no_header() -> None:
    first = {"role": "system", "content": "greet"}
    assert chat.render([first, A1, Q1]) == (f"{BOS}{SYSTEM}greeta1{EOS}{USER}q1{ASSISTANT}</think>")
    assert chat.render([first]) == f"{BOS}{SYSTEM}greet{ASSISTANT}</think>"


def test_the_format_of_the_reply_stands_behind_the_tools_and_each_system_text() -> None:
    form = {"type": "object", "title": "é"}
    section = (
        "\n\n## Response Format\n\nThe reply is JSON of this schema and nothing else:\n"
        '{"type": "object", "title": "é"}'
    )
    first = {"role": "system", "content": "", "response_format": form}
    assert chat.render([first, Q1], mode="thinking") == (
        f"{BOS}{SYSTEM}{EFFORT_75}{section}{USER}q1{ASSISTANT}<think>"
    )
    with_tools = chat.render([first, Q1], tools=[TOOL])
    assert with_tools.startswith(f"{BOS}{SYSTEM}\n\n## Tools\n\n")
    assert with_tools.endswith(f"\n{section}{USER}q1{ASSISTANT}</think>")
    later = {"role": "system", "content": "now", "response_format": form}
    assert chat.render([Q1, A1, later]).endswith(f"{SYSTEM}now{section}{ASSISTANT}</think>")


def test_tool_calls_and_results() -> None:
    messages: list[chat.Message] = [
        Q1,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                call("x", "find", {"key": "a b", "n": 3, "all": True}),
                call("y", "now", "{}"),
            ],
        },
        {"role": "tool", "tool_call_id": "y", "content": "noon"},
        {"role": "tool", "tool_call_id": "x", "content": "[1]"},
        {"role": "user", "content": "and?"},
    ]
    assert chat.render(messages).removeprefix(f"{BOS}{USER}q1{ASSISTANT}</think>") == (
        "Let me see.\n\n"
        "<\uff5cDSML\uff5c calls>\n"
        '<\uff5cDSML\uff5c invoke name="find">\n'
        '<\uff5cDSML\uff5c parameter name="key" string="true">a b</\uff5cDSML\uff5c parameter>\n'
        '<\uff5cDSML\uff5c parameter name="n" string="false">3</\uff5cDSML\uff5c parameter>\n'
        '<\uff5cDSML\uff5c parameter name="all" string="false">true</\uff5cDSML\uff5c parameter>\n'
        "</\uff5cDSML\uff5c invoke>\n"
        '<\uff5cDSML\uff5c invoke name="now">\n'
        "\n"
        "</\uff5cDSML\uff5c invoke>\n"
        f"</\uff5cDSML\uff5c calls>{EOS}"
        f"{USER}<tool_result>[1]</tool_result>\n\n<tool_result>noon</tool_result>\n\nand?"
        f"{ASSISTANT}</think>"
    )


def test_tool_results_alone_begin_no_turn() -> None:
    """Without tools defined: the reasoning that led to the call is still shown."""
    calling = {**A1, "reasoning_content": "r1", "tool_calls": [call("x", "now", "{}")]}
    result = {"role": "tool", "tool_call_id": "x", "content": "noon"}
    text = chat.render([Q1, calling, result], mode="thinking")
    assert f"{ASSISTANT}<think>r1</think>a1" in text
    assert text.endswith(f"{USER}<tool_result>noon</tool_result>{ASSISTANT}<think>")
    assert "r1" not in chat.render([Q1, calling, result, Q2], mode="thinking")


def test_arguments_may_be_json_text() -> None:
    as_text, as_mapping = (
        [Q1, {"role": "assistant", "tool_calls": [call("x", "f", arguments)]}]
        for arguments in ('{"n": {"a": [1, "ü"]}}', {"n": {"a": [1, "ü"]}})
    )
    text = chat.render(as_text)
    assert text == chat.render(as_mapping)
    assert 'string="false">{"a": [1, "ü"]}</' in text


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([A1], "a user message before each assistant"),
        ([Q1, A1, A2], "a user message before each assistant"),
        ([{"role": "developer", "content": "x"}], 'got "developer"'),
    ],
)
def test_conversations_that_cannot_be_rendered(messages: list[chat.Message], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chat.render(messages)


def test_effort_out_of_range() -> None:
    with pytest.raises(ValueError, match="from 1 to 100, got 0"):
        chat.render([Q1], mode="thinking", effort=0)


# -- loss mask -------------------------------------------------------------------------------------


def masked_stretches(conversation: Conversation) -> list[str]:
    """The text of every maximal run of masked tokens."""
    example = tokenise(conversation)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.mask.astype(int), [0]])))
    return [
        encoder().decode(example.tokens[start:end].tolist())
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def test_mask_covers_what_the_model_writes_and_end_of_sentence() -> None:
    assert masked_stretches(Conversation((Q1, A1, Q2, A2))) == [f"a1{EOS}", f"a2{EOS}"]


def test_mask_leaves_out_answers_whose_reasoning_was_dropped() -> None:
    assert masked_stretches(Conversation((Q1, A1, Q2, A2), "thinking")) == [f"r2</think>a2{EOS}"]
    with_tools = Conversation((Q1, A1, Q2, A2), "thinking", tools=(TOOL,))
    assert masked_stretches(with_tools) == [f"r1</think>a1{EOS}", f"r2</think>a2{EOS}"]


def test_mask_covers_tool_calls_and_not_their_results() -> None:
    conversation = Conversation(
        (
            Q1,
            {"role": "assistant", "tool_calls": [call("x", "f", {"k": "v"})]},
            {"role": "tool", "tool_call_id": "x", "content": "result"},
            {"role": "assistant", "content": "done"},
        ),
        tools=(TOOL,),
    )
    stretches = masked_stretches(conversation)
    assert len(stretches) == 2
    assert stretches[0].startswith("\n\n<\uff5cDSML\uff5c calls>\n")
    assert stretches[0].endswith(f"</\uff5cDSML\uff5c calls>{EOS}")
    assert stretches[1] == f"done{EOS}"


@pytest.mark.parametrize("seed", range(40))
def test_generated_conversations(seed: int) -> None:
    """Cuts are at special strings, so tokens do not depend on them; every answer ends once."""
    rng = Random(seed)
    for conversation in (
        dialogue.one_problem(rng),
        dialogue.one_document(rng, 600),
        dialogue.several_turns(rng),
        dialogue.small_talk(rng),
        tools.tool_conversation(rng),
    ):
        example = tokenise(conversation)
        whole = encoder().tokenizer.encode(conversation.text, add_special_tokens=False).ids
        assert example.tokens.tolist() == whole
        assert not example.mask[0]
        stretches = masked_stretches(conversation)
        assert stretches
        for stretch in stretches:
            assert stretch.endswith(EOS)
            assert stretch.count(EOS) == 1
            assert USER not in stretch
        assert conversation.messages[-1]["role"] == "assistant"


def test_calculator() -> None:
    assert tools.calculate("12 * 34") == 408
    assert tools.calculate("7-9") == -2
    assert tools.calculate("9 / 3") == 3
    for expression in ("1 / 0", "two + 2", "1 + 2 + 3", "__import__('os')"):
        with pytest.raises(ValueError, match="expected a calculation"):
            tools.calculate(expression)


def test_tool_answers_repeat_what_the_tools_said() -> None:
    kinds = set()
    for seed in range(300):
        conversation = tools.tool_conversation(Random(seed))
        messages = conversation.messages
        for index, message in enumerate(messages):
            for place, made in enumerate(message.get("tool_calls", ())):
                name = made["function"]["name"]
                result = messages[index + 1 + place]
                assert result["tool_call_id"] == made["id"]
                if name == "calculator":
                    expression = made["function"]["arguments"]["expression"]
                    left, op, right = expression.split()
                    exact = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}.get(
                        op, int.__floordiv__
                    )(int(left), int(right))
                    assert result["content"] == str(exact)
                answer = messages[index + 1 + len(message["tool_calls"])]["content"]
                kinds.add((name, len(message["tool_calls"]), result["content"] == "not found"))
                assert result["content"] in answer or result["content"] == "not found"
    assert kinds == {
        ("calculator", 1, False),
        ("lookup", 1, False),
        ("lookup", 1, True),
        ("lookup", 2, False),
    }
