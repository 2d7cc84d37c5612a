"""Structured output on the real server: TinyFlash with drafts, streamed and not, and what is
refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from builder.cli import main as build
from examples import demo
from tests.server.deployment import Deployment, RefusedError

pytestmark = pytest.mark.server

SCHEMA = {
    "type": "object",
    "properties": {
        "apples": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 3},
    },
    "required": ["apples"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many has he?"}]
# References so deep that compiling them overflows a stack.
DEEP = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3500)} | {"a3500": {}}


@pytest.fixture(scope="module")
def tinyflash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    engine = tmp_path_factory.mktemp("guided") / "engine"
    assert build(["engine", f"--checkpoint_dir={demo.CHECKPOINT}", f"--output_dir={engine}"]) == 0
    deployment = Deployment(engine, "--speculative")
    try:
        yield deployment.wait_until_ready()
    finally:
        deployment.end()


def asked(kind: str, guide: Any, **options: Any) -> dict[str, Any]:
    text = guide if isinstance(guide, str) else json.dumps(guide)
    return {
        "messages": json.dumps(QUESTION),
        "max_tokens": 60,
        "guided_decoding_guide_type": kind,
        "guided_decoding_guide": text,
    } | options


def assert_fits(answer: str) -> None:
    """SCHEMA, by hand."""
    value = json.loads(answer)
    assert {"apples"} <= set(value) <= {"name", "apples"}
    assert isinstance(value.get("name", ""), str)
    assert len(value.get("name", "")) <= 3
    assert type(value["apples"]) is int
    assert 0 <= value["apples"] <= 99


def test_a_schema_streamed_and_not(tinyflash: Deployment) -> None:
    """Over both protocols the same; the end token comes when it is whole."""
    whole = tinyflash.generate(**asked("json_schema", SCHEMA))
    assert_fits(whole["text_output"])
    assert whole["finish_reason"] == "stop"
    events = list(tinyflash.sse(**asked("json_schema", SCHEMA, stream=True)))
    assert len(events) > 3
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    pieces = list(tinyflash.stream(**asked("json_schema", SCHEMA, stream=True)))
    assert "".join(piece["text_output"] for piece in pieces) == whole["text_output"]


def test_the_other_guides(tinyflash: Deployment) -> None:
    def said(kind: str, guide: Any, **options: Any) -> str:
        text: str = tinyflash.generate(**asked(kind, guide, **options))["text_output"]
        return text

    hot = {"temperature": 2.0, "seed": 3}
    assert re.fullmatch(r"Tom has \d{1,2}\.", said("regex", r"Tom has \d{1,2}\.", **hot))
    assert said("choice", ["seven", "eight 🍎"], **hot) in ("seven", "eight 🍎")
    assert re.fullmatch(r"(\d\+)*\d", said("ebnf_grammar", 'root ::= [0-9] ("+" root)?'))
    assert said("regex", "a{2}b", ignore_eos=True) == "aab"
    assert said("choice", ["<think>7</think>"]) == "<think>7</think>"


def test_a_stop_word_cuts_a_guided_answer(tinyflash: Deployment) -> None:
    """Inside, over tokens and at its end; one that the guide never lets by changes nothing."""
    guide = "regex", "Tom has 7 apples\\."
    for word, text in (("has", "Tom "), ("m has 7 ap", "To"), (".", "Tom has 7 apples")):
        options = {"stop_words": word, "return_stop_reason": True}
        whole = tinyflash.generate(**asked(*guide, **options))
        assert (whole["text_output"], whole["finish_reason"]) == (text, "stop")
        assert whole["stop_reason"] == word
        events = list(tinyflash.sse(**asked(*guide, **options, stream=True)))
        assert "".join(event["text_output"] for event in events) == text
        kept = tinyflash.generate(**asked(*guide, **options, include_stop_str_in_output=True))
        assert kept["text_output"] == text + word
    other = tinyflash.generate(**asked(*guide, stop_words="has 8", return_stop_reason=True))
    assert (other["text_output"], other["stop_reason"]) == ("Tom has 7 apples.", "")
    assert tinyflash.seconds_until_empty(2) < 2


def test_refusals_say_where_and_stall_nobody(tinyflash: Deployment) -> None:
    """A hostile guide and a wrong one, beside an answer that goes on."""
    answers: list[dict[str, Any]] = []
    other = threading.Thread(
        target=lambda: answers.append(
            tinyflash.generate(messages=json.dumps(QUESTION), max_tokens=10)
        )
    )
    other.start()
    hostile = {"$ref": "#/$defs/a0", "$defs": DEEP}
    for kind, guide, sentence in (
        ("json_schema", hostile, "too deep"),
        ("json_schema", '{"type": objekt}', "at line 1, column 10"),
        ("regex", "a(b", r"at line 1, column 2 \('\(b'\): unclosed group"),
        ("xml", "a", "guided_decoding_guide_type to be json, json_schema, regex"),
    ):
        with pytest.raises(RefusedError, match=rf"\[invalid_argument\] .*{sentence}"):
            tinyflash.generate(**asked(kind, guide))
    other.join()
    assert answers[0]["num_output_tokens"] > 0
    assert tinyflash.stop() == 0
