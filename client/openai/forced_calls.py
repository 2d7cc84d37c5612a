"""The grammar of an answer that must call tools: the markup of `answer_reader`, in GBNF.

Names are those of the tools and of their declared parameters, in the order of the schema, required
ones always there. Texts may hold anything but the beginning of a tag of the markup; integers,
numbers, truth values and enumerations are exact. Arrays, objects and parameters without a plain
type are the model's to write: a grammar of nested JSON is recursive, and the server reads recursive
rules as a lexer does, whose texts would never end at a tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from client.openai.answer_reader import (
    BLANK_LINE,
    CALLS,
    END_CALLS,
    END_INVOKE,
    END_OF_TAG,
    END_PARAMETER,
    INVOKE,
    PARAMETER,
)
from client.openai.fields import ToolFunction

# No "</｜" in it, with which the closing tag begins.
_TEXT = '( [^<] | "<"+ [^</] | "<"+ "/" [^<｜] )*'
_EMPTY_LINE = '"\\n"'  # of a call without arguments
_SCALARS = {
    "integer": '"-"? ( "0" | [1-9] [0-9]* )',
    "number": '"-"? ( "0" | [1-9] [0-9]* ) ( "." [0-9]+ )? ( [eE] [+-]? [0-9]+ )?',
    "boolean": '( "true" | "false" )',
    "null": '"null"',
}
_BRACKETS = {"array": ("[", "]"), "object": ("{", "}")}
_ESCAPES = re.compile(r"\\.")
_OTHERS = {r"\b": r"\u0008", r"\f": r"\u000c"}  # JSON has them, GBNF has not


def grammar_of_calls(functions: Sequence[ToolFunction], *, only_one: bool) -> str:
    """One call or more of any of the functions, and nothing else."""
    names = [f"call-{index}" for index in range(len(functions))]
    more = "" if only_one else f" ( {_quoted(chr(10))} call )*"
    rules = [
        f"root ::= {_quoted(BLANK_LINE + CALLS + chr(10))} call{more} "
        f"{_quoted(chr(10) + END_CALLS)}",
        f"call ::= {' | '.join(names)}",
        f"text ::= {_TEXT}",
    ]
    for name, function in zip(names, functions, strict=True):
        rules += _call(name, function)
    return "\n".join(rules)


def _call(name: str, function: ToolFunction) -> list[str]:
    """Its rule, and one for what may follow each parameter; every parameter ends its line."""
    schema = function.parameters or {}
    properties = schema.get("properties")
    required = schema.get("required")
    rules = []
    if isinstance(properties, dict) and properties:
        needed = required if isinstance(required, list) else []
        lines = [_line(key, value) for key, value in properties.items()]
        places = range(len(lines))
        rest = [f"{name}-{place}" for place in places]
        for place, key in enumerate(properties):
            after = f" {rest[place + 1]}" if place + 1 < len(lines) else ""
            line = lines[place] if key in needed else f"( {lines[place]} )?"
            rules.append(f"{rest[place]} ::= {line}{after}")
        body = rest[0] if needed else f"( {_EMPTY_LINE} | {rest[0]} )"
    elif "properties" in schema:
        body = _EMPTY_LINE
    else:
        line = f'{_quoted(PARAMETER)} [^"<>\\n]+ {_value({})}'
        body = f"( {_EMPTY_LINE} | ( {line} )+ )"
    start, end = _quoted(f"{INVOKE}{function.name}{END_OF_TAG}\n"), _quoted(END_INVOKE)
    return [f"{name} ::= {start} {body} {end}", *rules]


def _line(key: str, schema: Any) -> str:
    return f"{_quoted(PARAMETER + key)} {_value(schema if isinstance(schema, dict) else {})}"


def _value(schema: Mapping[str, Any]) -> str:
    """From behind the name to the line's end."""
    kind, choices = schema.get("type"), schema.get("enum")
    if isinstance(choices, list) and choices:
        spelled = [_tagged(isinstance(c, str), _quoted(_spelled(c))) for c in choices]
        return f"( {' | '.join(spelled)} )"
    values = [_of_kind(each) for each in (kind if isinstance(kind, list) else [kind])]
    if not values or None in values:
        values = [_tagged(True, "text"), _tagged(False, "text")]
    return f"( {' | '.join(map(str, values))} )"


def _of_kind(kind: Any) -> str | None:
    """None for what is no plain type."""
    if kind == "string":
        return _tagged(True, "text")
    if isinstance(kind, str) and kind in _SCALARS:
        return _tagged(False, _SCALARS[kind])
    if isinstance(kind, str) and kind in _BRACKETS:
        first, last = _BRACKETS[kind]
        return _tagged(False, f"{_quoted(first)} text {_quoted(last)}")
    return None


def _tagged(is_text: bool, value: str) -> str:
    opening = f'" string="{str(is_text).lower()}{END_OF_TAG}'
    return f"{_quoted(opening)} {value} {_quoted(END_PARAMETER + chr(10))}"


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    """A literal. JSON's escapes are GBNF's, but for two."""
    spelled = json.dumps(text, ensure_ascii=False)
    return _ESCAPES.sub(lambda escape: _OTHERS.get(escape[0], escape[0]), spelled)
