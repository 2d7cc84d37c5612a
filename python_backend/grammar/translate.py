"""Guides as grammars of llguidance, and its refusals as sentences with a place in the guide."""

from __future__ import annotations

import bisect
import json
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from llguidance import LLMatcher, grammar_from, regex_to_lark

from python_backend.grammar.endless import endless, escaped
from python_backend.grammar.gbnf import GbnfError, Lark, to_lark
from python_backend.grammar.guide import GUIDE_NAME, Guide, GuideError, GuideKind

# JSON comes on one line, with at most one space where white space may be: endless runs of it would
# be JSON too, and models fall into them.
_WHITE_SPACE = " "
_AFTER_REASONING = "start: reasoning {end} @guided\nreasoning: /(?s:.*)/\n"
_LOCATING_SECONDS = 0.2
_SHOWN = 30

# A grammar to what is wrong with it, "" for nothing.
Check = Callable[[str], str]
Explain = Callable[[str], str]


class _Part(NamedTuple):
    """One grammar of llguidance's JSON form, and what makes a sentence of what is wrong with it."""

    grammar: dict[str, Any]
    explain: Explain

    def whole(self) -> str:
        return json.dumps({"grammars": [self.grammar]})


def translate(guide: Guide, check: Check, reasoning_end: int | None) -> str:
    """A grammar that passes `check`. Raises GuideError with one sentence."""
    part = _PARTS[guide.kind](guide.text, check)
    problem = check(part.whole())
    if problem:
        raise GuideError(f"{part.explain(problem)}; correct it")
    if not guide.after_reasoning:
        return part.whole()
    outer = {"lark_grammar": _AFTER_REASONING.format(end=f"<[{reasoning_end}]>")}
    return json.dumps({"grammars": [outer, part.grammar | {"name": "guided"}]})


def _json(text: str, check: Check) -> _Part:
    return _json_schema('{"type": "object"}', check)


def _json_schema(text: str, check: Check) -> _Part:
    schema = _parsed("a JSON schema", text)
    if not isinstance(schema, dict):
        raise GuideError(
            f"expected {GUIDE_NAME} as a JSON schema, an object, got {_shown(text)}; correct it"
        )
    place = endless(schema)
    if place is not None:
        raise GuideError(
            f"expected {GUIDE_NAME} as a JSON schema, got at #{place}: one that always needs "
            "itself, so that no text is ever complete; correct it"
        )

    def explain(problem: str) -> str:
        pointer = _locate(schema, problem, check)
        return f"expected {GUIDE_NAME} as a JSON schema, got at #{pointer}: {_first(problem)}"

    return _Part(_schema_grammar(schema), explain)


def _schema_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    return _only(
        LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITE_SPACE})
    )


def _choice(text: str, check: Check) -> _Part:
    choices = _parsed("a JSON list of texts", text)
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)):
        raise GuideError(
            f"expected {GUIDE_NAME} as a JSON list of one or more texts, got {_shown(text)}; "
            "correct it"
        )
    return _Part(
        {"lark_grammar": grammar_from("choice", text)},
        lambda problem: f"expected {GUIDE_NAME} as a JSON list of texts, got: {_first(problem)}",
    )


def _regex(text: str, check: Check) -> _Part:
    grammar = _only(LLMatcher.grammar_from_regex(text))
    return _Part(grammar, lambda problem: _regex_sentence(text, problem))


def _gbnf(text: str, check: Check) -> _Part:
    try:
        lark = to_lark(text)
    except GbnfError as error:
        raise GuideError(f"{_gbnf_sentence(text, error.offset, str(error))}; correct it") from None
    return _Part({"lark_grammar": lark.text}, lambda problem: _lark_sentence(text, lark, problem))


_PARTS: dict[GuideKind, Callable[[str, Check], _Part]] = {
    GuideKind.JSON: _json,
    GuideKind.JSON_SCHEMA: _json_schema,
    GuideKind.REGEX: _regex,
    GuideKind.GRAMMAR: _gbnf,
    GuideKind.CHOICE: _choice,
}


def _only(grammar: str) -> dict[str, Any]:
    part: dict[str, Any]
    (part,) = json.loads(grammar)["grammars"]
    return part


def _parsed(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise GuideError(
            f"expected {GUIDE_NAME} as {what}, got one nested too deeply; flatten it"
        ) from None
    except json.JSONDecodeError as error:
        raise GuideError(
            f"expected {GUIDE_NAME} as {what}, got at line {error.lineno}, column {error.colno}: "
            f"{error.msg}; correct it"
        ) from None


def _locate(schema: Any, problem: str, check: Check) -> str:
    """The JSON pointer of the innermost schema that has this problem by itself."""
    until = time.monotonic() + _LOCATING_SECONDS
    pointer = ""
    while True:
        for name, child in _children(schema):
            if time.monotonic() > until:
                return pointer
            if check(_Part(_schema_grammar(child), str).whole()) == problem:
                pointer, schema = pointer + name, child
                break
        else:
            return pointer


def _children(schema: Any) -> list[tuple[str, Any]]:
    """What may be a schema inside one, by its pointer from there."""
    found: list[tuple[str, Any]] = []
    if not isinstance(schema, dict):
        return found
    for keyword, value in schema.items():
        inside = f"/{escaped(keyword)}"
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(value, dict):
                found += [(f"{inside}/{escaped(name)}", child) for name, child in value.items()]
        elif isinstance(value, list):
            found += [(f"{inside}/{i}", child) for i, child in enumerate(value)]
        elif keyword not in ("const", "default"):
            found.append((inside, value))
    return [(name, child) for name, child in found if isinstance(child, dict)]


def _regex_sentence(text: str, problem: str) -> str:
    """The library shows the pattern as it stands in Lark, and carets below what is wrong."""
    carets = re.search(r"^    ( *)\^+$", problem, re.MULTILINE)
    reason = re.search(r"^error: (.*)$", problem, re.MULTILINE)
    if carets is None or reason is None:
        named = re.search(r"\(in regex\): ([^;\n]*)", problem)
        what = named[1] if named else _first(problem)
        return f"expected {GUIDE_NAME} as a regular expression, got: {what}"
    offset = bisect.bisect_left(
        range(len(text)), len(carets[1]), key=lambda end: len(regex_to_lark(text[:end], ""))
    )
    return f"expected {GUIDE_NAME} as a regular expression, got {_at(text, offset)}: {reason[1]}"


def _lark_sentence(text: str, lark: Lark, problem: str) -> str:
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ([^\n]*)", problem)
    if place is None:
        return f"expected {GUIDE_NAME} as a GBNF grammar, got: {_first(problem)}"
    reason = place[3].partition(" (at ")[0]
    return _gbnf_sentence(text, lark.offset(int(place[1]), int(place[2])), reason)


def _gbnf_sentence(text: str, offset: int, problem: str) -> str:
    return f"expected {GUIDE_NAME} as a GBNF grammar, got {_at(text, offset)}: {problem}"


def _at(text: str, offset: int) -> str:
    line = text.count("\n", 0, offset) + 1
    column = offset - text.rfind("\n", 0, offset)
    return f"at line {line}, column {column} ({_shown(text[offset:])})"


def _first(problem: str) -> str:
    """One line of a report of several."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons or lines or ["no reason given"])[0][:200]


def _shown(text: str) -> str:
    return repr(text.split("\n", 1)[0][:_SHOWN])
