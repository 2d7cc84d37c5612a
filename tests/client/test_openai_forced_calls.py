"""The grammar of forced calls, compiled by the server's compiler: random answers that it allows are
read back, and answers that the chat format's encoder renders are allowed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from client.openai.answer_reader import AnswerReader
from client.openai.fields import ToolFunction
from client.openai.forced_calls import grammar_of_calls
from python_backend.grammar.compiler import GrammarCompiler
from python_backend.grammar.grammar import Grammar
from python_backend.grammar.guide import Guide, GuideKind
from python_backend.text.chat import render
from tests.python_backend.grammar_texts import accepts, drawn_answer, setup_of, tinyflash_text

WEATHER = ToolFunction(
    name='we"ather',
    parameters={
        "type": "object",
        "properties": {
            "days": {"type": "integer"},
            "unit": {"enum": ["°C", "F", None]},
            "city": {"type": "string"},
            "exact": {"type": "boolean"},
            "places": {"type": "array"},
            "any\n": {},
        },
        "required": ["unit", "days"],
    },
)
PLAIN = ToolFunction(name="plain")
NOTHING = ToolFunction(name="nothing", parameters={"type": "object", "properties": {}})
TEXT = tinyflash_text()


@pytest.fixture(scope="module")
def grammars() -> dict[bool, Grammar]:
    """By `only_one`."""
    compiler = GrammarCompiler(setup_of(TEXT))
    try:
        made = {
            one: compiler.compile(
                Guide(GuideKind.GRAMMAR, grammar_of_calls([WEATHER, PLAIN, NOTHING], only_one=one))
            )
            for one in (True, False)
        }
        return {one: future.result(60) for one, future in made.items()}
    finally:
        compiler.close()


def calls_of(answer: str) -> list[tuple[str, str]]:
    reader = AnswerReader(reasons=False, calls=True)
    calls: list[tuple[str, str]] = []
    for piece in reader.feed(answer, last=True):
        if piece.kind == "name":
            calls.append((piece.text, ""))
        else:
            assert piece.kind == "arguments"
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    return calls


def answer_of(*calls: tuple[str, dict[str, Any]]) -> str:
    """As the model is taught to write it."""
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": str(i), "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    text = render([{"role": "user", "content": "q"}, message])
    return text.partition("</think>")[2].removesuffix("<｜end▁of▁sentence｜>")


def test_random_answers_are_calls_with_the_arguments_that_are_needed(
    grammars: dict[bool, Grammar],
) -> None:
    rng = np.random.default_rng(5)
    names, ended = set(), 0
    for trial in range(40):
        answer = drawn_answer(grammars[trial % 2 == 0], TEXT, rng, most=300)
        if answer is None:
            continue
        ended += 1
        calls = calls_of(answer)
        assert len(calls) == 1 if trial % 2 == 0 else calls
        for name, arguments in calls:
            names.add(name)
            values = json.loads(arguments)
            if name == 'we"ather':
                assert {"unit", "days"} <= set(values) <= set(WEATHER.parameters["properties"])  # type: ignore[index]
                assert values["unit"] in ("°C", "F", None)
                assert type(values["days"]) is int
                assert type(values.get("exact", True)) is bool
            if name == "nothing":
                assert values == {}
    assert names == {'we"ather', "plain", "nothing"}
    assert ended > 10


@pytest.mark.parametrize(
    ("calls", "one", "several"),
    [
        ([("nothing", {})], True, True),
        ([("plain", {})], True, True),
        ([("plain", {"a": "2>&1", "b": [1, {"c": None}]})], True, True),
        ([('we"ather', {"days": -3, "unit": "F"})], True, True),
        ([('we"ather', {"days": 0, "unit": None, "city": "</b> < 世", "places": [1]})], True, True),
        ([("nothing", {}), ("plain", {"x": 1})], False, True),
        ([('we"ather', {"days": 3})], False, False),  # unit is missing
        ([('we"ather', {"days": 3.5, "unit": "F"})], False, False),
        ([('we"ather', {"days": 3, "unit": "K"})], False, False),
        ([('we"ather', {"days": 3, "unit": "F", "other": 1})], False, False),
        ([("other", {})], False, False),
    ],
)  # fmt: skip
def test_calls_as_the_model_writes_them(
    grammars: dict[bool, Grammar], calls: list[Any], one: bool, several: bool
) -> None:
    answer = answer_of(*calls)
    assert accepts(grammars[True], TEXT, answer) is one
    assert accepts(grammars[False], TEXT, answer) is several
    assert not accepts(grammars[False], TEXT, "Well." + answer)


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": ["string", "null"]}, ["2>&1", None], [3, True]),
        ({"type": ["integer", "boolean"]}, [-3, True], ["3", 3.5, None]),
        ({"type": {"any": 1}}, ["x", 3, [1]], []),  # no schema, and no reason to fail
        ({"enum": ["C:\\bin\\foo", "\b\f"]}, ["C:\\bin\\foo", "\b\f"], ["C:", "\\b\\f"]),
    ],
)
def test_values_of_several_types_and_with_backslashes(
    schema: dict[str, Any], allowed: list[Any], refused: list[Any]
) -> None:
    function = ToolFunction(name="f", parameters={"properties": {"a": schema}, "required": ["a"]})
    compiler = GrammarCompiler(setup_of(TEXT))
    try:
        guide = Guide(GuideKind.GRAMMAR, grammar_of_calls([function], only_one=True))
        grammar = compiler.compile(guide).result(60)
    finally:
        compiler.close()
    for value in allowed:
        assert accepts(grammar, TEXT, answer_of(("f", {"a": value}))), value
    for value in refused:
        assert not accepts(grammar, TEXT, answer_of(("f", {"a": value}))), value
