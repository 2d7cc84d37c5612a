"""Conversations with tool calls: a calculator and a directory look-up.

The user asks, the model calls, the tool answers, the model states the answer. The numbers of the
calculator go beyond what the model works out itself; the entries of the directory are in no
document, so the answers can only come from the tools.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from examples.tinyflash import arithmetic, retrieval
from examples.tinyflash.dialogue import (
    Conversation,
    assistant,
    begin,
    draw_effort,
    draw_mode,
    phrases,
    user,
    worked,
)
from examples.tinyflash.draw import between, pick
from python_backend.text import chat

CALCULATOR: chat.Tool = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out a calculation with two integers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
DIRECTORY: chat.Tool = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Read one entry of the directory.",
        "parameters": {
            "type": "object",
            "properties": {"entity": {"type": "string"}, "attribute": {"type": "string"}},
            "required": ["entity", "attribute"],
        },
    },
}
TOOLS = (CALCULATOR, DIRECTORY)

_EXPRESSION = re.compile(r"\s*(\d+)\s*([-+*/])\s*(\d+)\s*", re.ASCII)


def calculate(expression: str) -> int:
    """The calculator: two non-negative integers and one of + - * / (division rounds down).

    Raises ValueError when the expression has another form or divides by zero.
    """
    match = _EXPRESSION.fullmatch(expression)
    if match is None or (match[2] == "/" and int(match[3]) == 0):
        raise ValueError(
            f'expected a calculation such as "12 * 34", got "{expression}"; write two integers '
            "and one of + - * / (not a division by zero)"
        )
    left, right = int(match[1]), int(match[3])
    if match[2] == "+":
        return left + right
    if match[2] == "-":
        return left - right
    return left * right if match[2] == "*" else left // right


def tool_conversation(rng: Random) -> Conversation:
    """One or two questions with both tools at hand; some need no tool."""
    mode = draw_mode(rng)
    messages = begin(rng)
    for turn in range(between(rng, 1, 2)):
        choice = rng.random()
        if choice < 0.4:
            messages += _calculation(rng, mode, turn)
        elif choice < 0.75:
            messages += _lookup(rng, mode, turn)
        elif choice < 0.9:
            messages += _double_lookup(rng, mode, turn)
        else:
            problem = arithmetic.problem(rng)
            messages += user(problem.question), worked(mode, problem.steps, problem.conclusion)
    return Conversation(tuple(messages), mode, draw_effort(rng), TOOLS)


def _call(identity: str, name: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _result(identity: str, content: str) -> chat.Message:
    return {"role": "tool", "tool_call_id": identity, "content": content}


def _calculation(rng: Random, mode: chat.Mode, turn: int) -> list[chat.Message]:
    op = pick(rng, "+-*/")
    left, right = between(rng, 100, 9999), between(rng, 2, 99 if op == "/" else 999)
    if op == "-":
        left, right = max(left, right), min(left, right)
    if op == "/":
        left -= left % right
    expression = f"{left} {op} {right}"
    result = calculate(expression)
    identity = f"call_{turn}_0"
    return [
        user(pick(rng, phrases()["calculations"]).format(expression=expression)),
        assistant(
            mode,
            "",
            phrases()["calculation_thought"],
            (_call(identity, "calculator", {"expression": expression}),),
        ),
        _result(identity, str(result)),
        assistant(mode, arithmetic.conclusion(result), phrases()["result_thought"]),
    ]


def _lookup(rng: Random, mode: chat.Mode, turn: int) -> list[chat.Message]:
    fact = retrieval.random_fact(rng)
    known = rng.random() < 0.9
    identity = f"call_{turn}_0"
    answer = fact.answer if known else phrases()["not_found_answer"].format(**fact._asdict())
    return [
        user(pick(rng, phrases()["lookups"]).format(**fact._asdict())),
        assistant(mode, "", phrases()["lookup_thought"], (_directory_call(identity, fact),)),
        _result(identity, fact.value if known else phrases()["not_found"]),
        assistant(mode, answer, phrases()["result_thought"]),
    ]


def _double_lookup(rng: Random, mode: chat.Mode, turn: int) -> list[chat.Message]:
    first, second = retrieval.random_fact(rng), retrieval.random_fact(rng)
    identities = f"call_{turn}_0", f"call_{turn}_1"
    question = pick(rng, phrases()["double_lookups"]).format(
        **first._asdict(), attribute2=second.attribute, entity2=second.entity
    )
    calls = (_directory_call(identities[0], first), _directory_call(identities[1], second))
    return [
        user(question),
        assistant(mode, "", phrases()["lookup_thought"], calls),
        _result(identities[0], first.value),
        _result(identities[1], second.value),
        assistant(mode, f"{first.answer} {second.answer}", phrases()["result_thought"]),
    ]


def _directory_call(identity: str, fact: retrieval.Fact) -> dict[str, Any]:
    arguments = {"entity": fact.entity, "attribute": fact.attribute}
    return _call(identity, "lookup", arguments)
