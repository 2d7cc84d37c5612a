"""The model's chat format: a conversation as the text that the model reads.

The one definition of it: the server renders `messages` with it, and TinyFlash is trained on exactly
these strings. `chat_input` judges what comes from outside.

Messages are mappings with `role` "system", "user", "assistant" or "tool" and `content`; assistant
messages may have `reasoning_content` and `tool_calls` (each with `id` and `function`: `name`,
`arguments` as a mapping or as JSON text), tool messages a `tool_call_id`. Tools are given in the
`{"type": "function", "function": {...}}` form. A system message may have a `response_format`, the
JSON schema of the reply.

The rules (the released encoder's; in the examples `·` joins special strings and text):

* No newline anywhere around role markers. The text starts with begin-of-sentence.
* The System token comes first when the conversation thinks, has tools, or begins with a system
  message: once, before the effort line, the system text, the tools section and the section of the
  reply's format, with a blank line before each section.
* Runs of user and tool messages make one user turn, parts joined by a blank line, tool results in
  the order of the calls. Later system messages have their own System token.
* A user turn or a later system message that an assistant answers ends in `Assistant·<think>` or
  `Assistant·</think>`: the former in thinking mode for the last turn, and for every turn when
  reasoning is kept. A first system message answered by the assistant has no such end.
* Reasoning of earlier turns is dropped, unless tools are defined: then all of it is kept. Tool
  results alone begin no turn.
* A conversation that ends in a user (or system) turn is a prompt; one that ends in an assistant
  message ends in end-of-sentence.

The words of the two sections are this project's own, which TinyFlash was trained on. A checkpoint
trained elsewhere brings its own (`engine.chat_sections`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from engine.chat_sections import ChatSections

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
SYSTEM = "<｜System｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
# What any conversation is built from; DSML is needed for tool calls only.
MARKERS = (BOS, EOS, USER, ASSISTANT, SYSTEM, THINK_START, THINK_END)

Mode = Literal["chat", "thinking"]
Message = Mapping[str, Any]
Tool = Mapping[str, Any]

EFFORT_LEVELS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
DEFAULT_EFFORT = EFFORT_LEVELS["high"]

_TOOLS = f"""## Tools

These tools can be called. A reply that calls them ends in a block of this form:

<{DSML} calls>
<{DSML} invoke name="TOOL">
<{DSML} parameter name="NAME" string="true|false">VALUE</{DSML} parameter>
</{DSML} invoke>
</{DSML} calls>

A value with string="true" is text as it stands; with string="false" it is JSON.

### Available Tool Schemas

{{schemas}}
"""
_RESPONSE_FORMAT = """## Response Format

The reply is JSON of this schema and nothing else:
{schema}"""
OWN_SECTIONS = ChatSections(_TOOLS, _RESPONSE_FORMAT)


class Segment(NamedTuple):
    """A stretch of the rendered text. `generated`: the model itself writes it in this context."""

    text: str
    generated: bool


class _Turn(NamedTuple):
    role: Literal["system", "user", "assistant"]
    text: str
    reasoning: str = ""
    section: str = ""  # behind a system text
    has_text: bool = True  # False for a user turn of tool results alone


def render(
    messages: Sequence[Message],
    *,
    mode: Mode = "chat",
    effort: int = DEFAULT_EFFORT,
    tools: Sequence[Tool] = (),
    sections: ChatSections = OWN_SECTIONS,
) -> str:
    """The whole text of a conversation, special strings included. Errors as `render_segments`."""
    segments = render_segments(messages, mode=mode, effort=effort, tools=tools, sections=sections)
    return "".join(segment.text for segment in segments)


def render_segments(
    messages: Sequence[Message],
    *,
    mode: Mode = "chat",
    effort: int = DEFAULT_EFFORT,
    tools: Sequence[Tool] = (),
    sections: ChatSections = OWN_SECTIONS,
) -> list[Segment]:
    """The text of a conversation, cut where the writer changes; cuts are at special strings.

    An assistant message whose reasoning is dropped counts as given, not generated: the model wrote
    it after reasoning that this text no longer shows.

    Raises ValueError for an unknown role, an assistant message that answers nothing, no messages,
    or an effort outside 1…100.
    """
    turns = _turns(messages, sections)
    thinking = mode == "thinking"
    keep_reasoning = bool(tools)
    last_question = max((i for i, turn in enumerate(turns) if _asks(turn, i)), default=-1)

    given = BOS
    if thinking or tools or turns[0].role == "system":
        given += SYSTEM
    if thinking:
        given += _effort_line(effort)
    if turns[0].role == "system":
        given += turns[0].text
    if tools:
        schemas = "\n".join(_json(tool["function"]) for tool in tools)
        given += "\n\n" + sections.with_schemas(schemas)
    given += turns[0].section

    segments: list[Segment] = []
    for i, turn in enumerate(turns):
        if turn.role == "assistant":
            if i == 0 or turns[i - 1].role == "assistant":
                raise ValueError(
                    "expected a user message before each assistant message, got none before "
                    f"turn {i}; merge or remove it"
                )
            shows_reasoning = thinking and (keep_reasoning or i > last_question)
            text = f"{turn.reasoning}{THINK_END}" if shows_reasoning else ""
            segments.append(Segment(given, False))
            segments.append(Segment(text + turn.text + EOS, shows_reasoning or not thinking))
            given = ""
            continue
        if turn.role == "user":
            given += USER + turn.text
        elif i > 0:
            given += SYSTEM + turn.text + turn.section
        is_greeting = i == 0 and turn.role == "system"
        if i + 1 == len(turns) or (turns[i + 1].role == "assistant" and not is_greeting):
            opens = thinking and (keep_reasoning or i >= last_question)
            given += ASSISTANT + (THINK_START if opens else THINK_END)
    if given:
        segments.append(Segment(given, False))
    return segments


def _asks(turn: _Turn, index: int) -> bool:
    """Tool results alone go on with the turn before them."""
    return turn.has_text and (turn.role == "user" or (turn.role == "system" and index > 0))


def _effort_line(effort: int) -> str:
    if not 1 <= effort <= 100:
        raise ValueError(f"expected a reasoning effort from 1 to 100, got {effort}; choose one")
    return (
        f"Reasoning Effort: {effort} "
        "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    )


def _turns(messages: Sequence[Message], sections: ChatSections) -> list[_Turn]:
    if not messages:
        raise ValueError("expected at least one message, got none; send what the user said")
    turns: list[_Turn] = []
    call_order: dict[str, int] = {}
    index = 0
    while index < len(messages):
        message = messages[index]
        role = message["role"]
        if role in ("user", "tool"):
            end = index
            while end < len(messages) and messages[end]["role"] in ("user", "tool"):
                end += 1
            parts = _user_parts(messages[index:end], call_order)
            has_text = any(each["role"] == "user" for each in messages[index:end])
            turns.append(_Turn("user", "\n\n".join(parts), has_text=has_text))
            index = end
            continue
        if role == "assistant":
            calls = message.get("tool_calls") or ()
            call_order = {call.get("id", ""): place for place, call in enumerate(calls)}
            text = (message.get("content") or "") + _render_calls(calls)
            turns.append(_Turn("assistant", text, message.get("reasoning_content") or ""))
        elif role == "system":
            form = message.get("response_format")
            section = "" if form is None else "\n\n" + sections.with_schema(_json(form))
            turns.append(_Turn("system", message.get("content") or "", section=section))
        else:
            raise ValueError(
                f'expected a role of "system", "user", "assistant" or "tool", got "{role}"; '
                "rename it"
            )
        index += 1
    return turns


def _user_parts(messages: Sequence[Message], call_order: Mapping[str, int]) -> list[str]:
    """The parts of one user turn; tool results swap places among themselves into call order."""
    results = sorted(
        (message for message in messages if message["role"] == "tool"),
        key=lambda message: call_order.get(message.get("tool_call_id", ""), 0),
    )
    in_order = iter(results)
    return [
        f"<tool_result>{next(in_order)['content']}</tool_result>"
        if message["role"] == "tool"
        else message.get("content") or ""
        for message in messages
    ]


def _render_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    if not calls:
        return ""
    invokes = []
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        parameters = "\n".join(
            f'<{DSML} parameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else _json(value)}</{DSML} parameter>"
            for name, value in arguments.items()
        )
        name = call["function"]["name"]
        invokes.append(f'<{DSML} invoke name="{name}">\n{parameters}\n</{DSML} invoke>')
    return f"\n\n<{DSML} calls>\n" + "\n".join(invokes) + f"\n</{DSML} calls>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
