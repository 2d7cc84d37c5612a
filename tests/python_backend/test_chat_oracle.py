"""The chat format against vLLM's encoder of it, where vLLM is installed.

Only the words of the two sections differ, which are this project's own: the oracle's are given as a
checkpoint gives them, in chat_sections.json, and then every text must be equal.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat_sections import CHAT_SECTIONS_NAME, ChatSections
from python_backend.text import chat


def _encoder() -> ModuleType | None:
    """vLLM's file alone: the package imports much that this test does not need."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "tokenizers" / "deepseek_v41_encoding.py"
    spec = importlib.util.spec_from_file_location("oracle", path) if path.exists() else None
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ORACLE = _encoder()
pytestmark = pytest.mark.skipif(ORACLE is None, reason="needs vllm with deepseek_v41_encoding.py")

TEXT = st.text("ab é🙂\n<>\"'{}", max_size=5)
SCHEMA = st.dictionaries(TEXT, st.integers() | TEXT, min_size=1, max_size=2)
SYSTEM: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"role": st.just("system"), "content": TEXT}, optional={"response_format": SCHEMA}
)
USER: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"role": st.just("user"), "content": TEXT}
)
ARGUMENTS = st.dictionaries(TEXT, TEXT | st.booleans() | st.lists(st.integers(), max_size=2))
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": TEXT, "parameters": SCHEMA}),
        }
    ),
    max_size=2,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns in an order that an API allows, results behind their calls in any order; the last one
    is not the assistant's."""
    messages = [draw(SYSTEM)] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages += draw(st.lists(USER, min_size=1, max_size=2))
        if draw(st.integers(0, 3)) == 0:
            messages.append(draw(SYSTEM))
        if not draw(st.booleans()):
            continue
        calls: list[dict[str, Any]] = [
            {
                "id": f"c{len(messages)}.{i}",
                "type": "function",
                "function": {"name": draw(TEXT), "arguments": draw(ARGUMENTS)},
            }
            for i in range(draw(st.integers(0, 2)))
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": draw(TEXT)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(TEXT)
        if calls:
            answer["tool_calls"] = calls
        messages.append(answer)
        for call in draw(st.permutations(calls)):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": draw(TEXT)})
    return [*messages, draw(USER)] if messages[-1]["role"] == "assistant" else messages


@pytest.fixture(scope="module")
def oracles_words(tmp_path_factory: pytest.TempPathFactory) -> ChatSections:
    assert ORACLE is not None
    tools = ORACLE.render_tools([])
    place = "### Available Tool Schemas\n\n"
    assert tools.count(place) == 1
    texts = {
        "tools": tools.replace(place, place + "{schemas}"),
        "response_format": ORACLE.response_format_template,
    }
    directory = tmp_path_factory.mktemp("checkpoint")
    (directory / CHAT_SECTIONS_NAME).write_text(json.dumps(texts))
    sections = ChatSections.read(directory)
    assert sections is not None
    return sections


@settings(max_examples=300, deadline=None)
@given(conversations(), TOOLS, st.sampled_from(["chat", "thinking"]), st.integers(1, 100))
def test_every_conversation_has_the_oracles_text(
    oracles_words: ChatSections,
    messages: list[dict[str, Any]],
    tools: list[Any],
    mode: chat.Mode,
    effort: int,
) -> None:
    assert ORACLE is not None
    given = list(messages)
    if tools:  # the oracle has them on a message, the first of the conversation
        if given[0]["role"] != "system":
            given.insert(0, {"role": "system", "content": ""})
        given[0] = {**given[0], "tools": tools}
    expected = ORACLE.encode_messages(given, mode, reasoning_effort=effort)
    ours = chat.render(messages, mode=mode, effort=effort, tools=tools, sections=oracles_words)
    assert ours == expected


def test_levels_of_effort() -> None:
    assert ORACLE is not None
    assert chat.EFFORT_LEVELS == ORACLE.REASONING_EFFORT_MAPPINGS
