"""Conversations that TinyFlash learns from: single questions, several turns, tool calls.

A conversation is messages plus how to render them; `chat` turns it into text and says which parts
the model writes. Arithmetic and retrieval come from their own modules; this one adds the turns
around them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from examples.tinyflash import arithmetic, retrieval, steps
from examples.tinyflash.draw import between, pick
from python_backend.text import chat

MAX_QUESTIONS_PER_DOCUMENT = 8

_DATA = Path(__file__).parent / "data" / "dialogue.json"
_THINKING_SHARE = 0.25
_SYSTEM_SHARE = 0.15


@dataclass(frozen=True)
class Conversation:
    """Messages that end in an assistant's, the mode and effort to render them in, the tools."""

    messages: tuple[chat.Message, ...]
    mode: chat.Mode = "chat"
    effort: int = chat.DEFAULT_EFFORT
    tools: tuple[chat.Tool, ...] = ()

    def segments(self) -> list[chat.Segment]:
        return chat.render_segments(
            self.messages, mode=self.mode, effort=self.effort, tools=self.tools
        )

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments())


@lru_cache(maxsize=1)
def phrases() -> Mapping[str, Any]:
    """The fixed sentences of conversations, by use."""
    loaded: Mapping[str, Any] = json.loads(_DATA.read_text())
    return loaded


def user(content: str) -> chat.Message:
    return {"role": "user", "content": content}


def assistant(
    mode: chat.Mode, content: str, thought: str, calls: tuple[Mapping[str, Any], ...] = ()
) -> chat.Message:
    """An assistant's message; in chat mode without the thought."""
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": thought if mode == "thinking" else "",
        "tool_calls": calls,
    }


def worked(mode: chat.Mode, steps: str, conclusion: str) -> chat.Message:
    """A worked answer: the steps are the reasoning, or the start of the content in chat mode."""
    return assistant(mode, conclusion if mode == "thinking" else f"{steps}\n{conclusion}", steps)


def draw_mode(rng: Random) -> chat.Mode:
    return "thinking" if rng.random() < _THINKING_SHARE else "chat"


def draw_effort(rng: Random) -> int:
    """Mostly the default; now and then any effort, so that the number in the text means nothing."""
    return chat.DEFAULT_EFFORT if rng.random() < 0.5 else between(rng, 1, 100)


def begin(rng: Random) -> list[chat.Message]:
    """No message, or a system message."""
    if rng.random() >= _SYSTEM_SHARE:
        return []
    return [{"role": "system", "content": pick(rng, phrases()["systems"])}]


def one_problem(rng: Random) -> Conversation:
    """A word problem and its worked answer."""
    mode = draw_mode(rng)
    problem = arithmetic.problem(rng)
    messages = begin(rng)
    messages += user(problem.question), worked(mode, problem.steps, problem.conclusion)
    return Conversation(tuple(messages), mode, draw_effort(rng))


def one_document(rng: Random, max_tokens: int) -> Conversation:
    """A document of about `max_tokens` tokens with its questions, in chat mode one per turn.

    Several questions share a document because a long one with a single short answer teaches
    little. In thinking mode there is one question: earlier answers would not count (see `chat`).
    """
    mode = draw_mode(rng)
    limit = 1 if mode == "thinking" else MAX_QUESTIONS_PER_DOCUMENT
    num_questions = between(rng, 1, max(1, min(limit, (max_tokens - 64) // 64)))
    overhead = 48 + 36 * num_questions
    text, facts = retrieval.document(rng, max(max_tokens - overhead, 48), num_questions)
    messages = []
    for place, fact in enumerate(facts):
        question = retrieval.question(rng, fact)
        messages.append(user(f"{text.text}\n\n{question}" if place == 0 else question))
        messages.append(_found(fact, mode))
    return Conversation(tuple(messages), mode, draw_effort(rng))


def several_turns(rng: Random) -> Conversation:
    """Two to four turns: word problems and follow-ups on them, a short text, small talk."""
    mode = draw_mode(rng)
    messages = begin(rng)
    value = 0  # the last answer, for a follow-up
    num_turns = between(rng, 2, 4)
    for turn in range(num_turns):
        choice = rng.random()
        if value and choice < 0.35:
            follow_up, value = _follow_up(rng, value, mode)
            messages += follow_up
        elif choice < 0.65:
            problem = arithmetic.problem(rng)
            value = problem.answer
            messages.append(user(problem.question))
            messages.append(worked(mode, problem.steps, problem.conclusion))
        elif choice < 0.8 or turn == num_turns - 1:
            text, (fact,) = retrieval.document(rng, between(rng, 64, 192), 1)
            messages.append(user(f"{text.text}\n\n{retrieval.question(rng, fact)}"))
            messages.append(_found(fact, mode))
            value = 0
        else:
            talk = pick(rng, phrases()["small_talk"])
            messages.append(user(pick(rng, talk["user"])))
            messages.append(assistant(mode, talk["assistant"], talk["thought"]))
            value = 0
    return Conversation(tuple(messages), mode, draw_effort(rng))


def small_talk(rng: Random) -> Conversation:
    """One exchange of pleasantries."""
    mode = draw_mode(rng)
    talk = pick(rng, phrases()["small_talk"])
    answer = assistant(mode, talk["assistant"], talk["thought"])
    messages = (*begin(rng), user(pick(rng, talk["user"])), answer)
    return Conversation(messages, mode, draw_effort(rng))


def _found(fact: retrieval.Fact, mode: chat.Mode) -> chat.Message:
    return assistant(mode, fact.answer, phrases()["search_thought"].format(**fact._asdict()))


def _follow_up(rng: Random, value: int, mode: chat.Mode) -> tuple[list[chat.Message], int]:
    """One more step on the last answer, and its result."""
    run = steps.Run()
    run.value = value
    divisors = [d for d in range(2, 11) if value % d == 0]
    possible = {
        "+": value < steps.HIGHEST,
        "-": value > 1,
        "*": value * 2 <= steps.HIGHEST,
        "/": bool(divisors),
    }
    op = pick(rng, [op for op, allowed in possible.items() if allowed])
    if op == "/":
        number = pick(rng, divisors)
    elif op == "*":
        number = between(rng, 2, min(9, steps.HIGHEST // value))
    else:
        number = between(rng, 1, steps.HIGHEST - value if op == "+" else value - 1)
    run.then(op, number)
    question = pick(rng, phrases()["follow_ups"][op]).format(x=number)
    answer = worked(mode, str(run.lines[0]), arithmetic.conclusion(run.value))
    return [user(question), answer], run.value
