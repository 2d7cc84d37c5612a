"""Splitting an answer: against answers put together by hand, however they are cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.openai.answer_reader import AnswerReader, Piece
from python_backend.text.chat import render

NO_CALLS: list[tuple[str, str]] = []


def markup(*calls: str) -> str:
    return "\n\n<｜DSML｜ calls>\n" + "\n".join(calls) + "\n</｜DSML｜ calls>"


def invoke(name: str, *parameters: str) -> str:
    inner = "\n".join(parameters)
    return f'<｜DSML｜ invoke name="{name}">\n{inner}\n</｜DSML｜ invoke>'


def parameter(name: str, value: str, *, string: bool = True) -> str:
    kind = str(string).lower()
    return f'<｜DSML｜ parameter name="{name}" string="{kind}">{value}</｜DSML｜ parameter>'


def joined(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and name and arguments of each call."""
    text = {"reasoning": "", "content": ""}
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "name":
            assert piece.call == len(calls)
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            assert piece.call == len(calls) - 1
            calls[-1][1] += piece.text
        else:
            text[piece.kind] += piece.text
    return text["reasoning"], text["content"], [(name, rest) for name, rest in calls]


def read(
    *parts: str, reasons: bool = False, calls: bool = True
) -> tuple[str, str, list[tuple[str, str]]]:
    reader = AnswerReader(reasons=reasons, calls=calls)
    pieces = [piece for part in parts for piece in reader.feed(part)]
    return joined(pieces + reader.feed("", last=True))


SHELL = 'cd "$HOME" && make 2>&1'
CASES: list[tuple[str, dict[str, bool], tuple[str, str, list[tuple[str, str]]]]] = [
    ("世界 🙂 <b>", {}, ("", "世界 🙂 <b>", NO_CALLS)),
    ("a < b</think>c</think>d", {"reasons": True}, ("a < b", "c</think>d", NO_CALLS)),
    ("never closed </thin", {"reasons": True}, ("never closed </thin", "", NO_CALLS)),
    ("</think>", {"reasons": True}, ("", "", NO_CALLS)),
    (
        "hm</think>So:" + markup(invoke("shell", parameter("command", SHELL))),
        {"reasons": True},
        ("hm", "So:", [("shell", json.dumps({"command": SHELL}))]),
    ),
    (
        markup(
            invoke("none", ""),
            invoke("two", parameter("a", "1.5", string=False), parameter("b", "[]", string=False)),
        ),
        {},
        ("", "", [("none", "{}"), ("two", '{"a": 1.5, "b": []}')]),
    ),
    (  # text that looks like JSON stays text; what should be JSON and is not becomes text
        markup(invoke("f", parameter("a", "1"), parameter("b", " NaN ", string=False))),
        {},
        ("", "", [("f", '{"a": "1", "b": " NaN "}')]),
    ),
    (  # quotes, newlines, tags of others
        markup(invoke("写", parameter('k"y', 'l1\nl2 "q" </x> <｜DSML｜ invoke name="z">\\'))),
        {},
        ("", "", [("写", json.dumps({'k"y': 'l1\nl2 "q" </x> <｜DSML｜ invoke name="z">\\'},
                                   ensure_ascii=False))]),
    ),
    (  # one newline before the tag, text between the calls, text behind them
        "x\n<｜DSML｜ calls>\n" + invoke("f", "") + "\nand\n" + "</｜DSML｜ calls> y",
        {},
        ("", "x\nand\n</｜DSML｜ calls> y", [("f", "{}")]),
    ),
    (  # a call that is not closed before its block
        "<｜DSML｜ calls>" + invoke("f", parameter("a", "b"))[: -len("</｜DSML｜ invoke>")]
        + "</｜DSML｜ calls>z",
        {},
        ("", "z", [("f", '{"a": "b"}')]),
    ),
    (markup(invoke("f", "")), {"calls": False}, ("", markup(invoke("f", "")), NO_CALLS)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_every_cut_in_two_and_every_single_character(
    text: str, options: dict[str, bool], expected: Any
) -> None:
    assert read(text, **options) == expected
    assert read(*text, **options) == expected
    for place in range(len(text)):
        assert read(text[:place], text[place:], **options) == expected


@pytest.mark.parametrize(
    ("cut_at", "arguments"),
    [
        ("<｜DSML｜ parameter", ""), ("value", '{"a": "'), ("ue</", '{"a": "val'),
        ("</｜DSML｜ inv", '{"a": "value"'),
    ],
)  # fmt: skip
def test_an_answer_cut_short_has_the_arguments_that_came(cut_at: str, arguments: str) -> None:
    whole = "Well." + markup(invoke("f", parameter("a", "value")))
    short = whole[: whole.index(cut_at)]
    for parts in ([short], list(short)):
        assert read(*parts) == ("", "Well.", [("f", arguments)])


def test_a_piece_leaves_as_soon_as_it_is_certain() -> None:
    """A character that can begin no tag is not held back, nor is the value of a text."""
    reader = AnswerReader(reasons=False, calls=True)
    assert reader.feed("世") == [Piece("content", "世")]
    assert reader.feed("\n") == []
    assert reader.feed("a") == [Piece("content", "\na")]
    reader.feed(markup(invoke("f", parameter("a", "")))[: -len(parameter("a", "")) + 30])
    reader = AnswerReader(reasons=False, calls=True)
    opened = (
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">'
    )
    pieces = [Piece("name", "f", 0), Piece("arguments", '{"a": "', 0)]
    assert reader.feed(opened) == pieces
    assert reader.feed('2>&1 "') == [Piece("arguments", '2>&1 \\"', 0)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip
TEXT = st.text(st.sampled_from('ab \n<>/｜"\\{}世🙂') | st.characters(codec="utf-8"), max_size=20)
NAMES = st.text(st.sampled_from('abc_ 世"'), min_size=1, max_size=6)


@settings(deadline=None, max_examples=80)
@given(
    reasoning=TEXT,
    content=TEXT,
    calls=st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES | TEXT, max_size=3)), max_size=3),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
)
def test_what_the_server_renders_is_read_back(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    """The encoder of the chat format is the oracle: an assistant message, rendered, is an answer.
    Blank lines before the calls belong to their markup."""
    message = {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [
            {"id": str(i), "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    tool = {"type": "function", "function": {"name": "f"}}
    text = render([{"role": "user", "content": "q"}, message], mode="thinking", tools=[tool])
    text = text[text.rindex("<｜Assistant｜><think>") + len("<｜Assistant｜><think>") :]
    text = text.removesuffix("<｜end▁of▁sentence｜>")
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    found = read(*parts, reasons=True)
    assert found[:2] == (reasoning, content)
    assert [(name, json.loads(arguments)) for name, arguments in found[2]] == calls
    assert found == read(text, reasons=True)
