"""Guides that need themselves: those that can end, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from python_backend.grammar.compiler import GrammarCompiler
from python_backend.grammar.guide import Guide, GuideKind
from python_backend.request import RequestError
from python_backend.text.tokenizer import TextTokenizer
from tests.python_backend.grammar_texts import accepts, setup_of, tinyflash_text


@pytest.fixture(scope="module")
def text() -> TextTokenizer:
    return tinyflash_text()


@pytest.fixture(scope="module")
def compiler(text: TextTokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(setup_of(text))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("guide", "answer"),
    [
        ('root ::= "a" | root "b"', "abb"),
        ('root ::= "x" root?', "xxx"),
        ('root ::= "x" (root "y")*', "xxyxy"),
        ('root ::= "x" root{0,2}', "xxx"),
        ('root ::= ("x" (root) | ("z"))', "xxz"),
        ('root ::= "x" a{2}\na ::= "" | "y" root', "xyxyx"),
        ('root ::= "a"\nendless ::= "x" endless', "a"),
    ],
)
def test_recursion_that_can_end(
    compiler: GrammarCompiler, text: TextTokenizer, guide: str, answer: str
) -> None:
    assert accepts(compiler.compile(Guide(GuideKind.GRAMMAR, guide)).result(), text, answer)


@pytest.mark.parametrize(
    ("guide", "line"),
    [
        ('root ::= "a" b*\nb ::= "x" b', 2),
        ('root ::= "a" b?\nb ::= "x" b', 2),
        ('root ::= "a" (b "c" | "d"){0,3}\nb ::= b', 2),
        ('root ::= "a" | b\nb ::= "x" c\nc ::= "y" d+\nd ::= c', 3),
    ],
)
def test_what_an_answer_would_never_leave_is_refused(
    compiler: GrammarCompiler, guide: str, line: int
) -> None:
    """Other answers would end; this one would go on until the parser gives up."""
    error = compiler.compile(Guide(GuideKind.GRAMMAR, guide)).exception()
    assert isinstance(error, RequestError)
    assert f"at line {line}, column 1 " in str(error)
    assert "always needs itself, so that no text with it is ever complete" in str(error)


ITSELF: dict[str, Any] = {"$ref": "#"}
LIST_OF_ITSELF: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a~1b"}}
NAMED: dict[str, Any] = {"$id": "http://a/x", "type": "array", "minItems": 1, "items": ITSELF}
PAIR: dict[str, Any] = {"type": "object", "properties": {"a": ITSELF}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (ITSELF, ""),
        (PAIR, ""),
        ({"type": "array", "items": ITSELF, "minItems": 1}, ""),
        ({"type": "array", "prefixItems": [{}, ITSELF], "minItems": 2}, ""),
        ({"allOf": [{"type": "object"}, ITSELF]}, ""),
        ({"anyOf": [{"$ref": "#/$defs/x"}, ITSELF], "$defs": {"x": PAIR}}, ""),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": ITSELF}}, ""),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/%24defs/x"}}}, "/$defs/x"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": LIST_OF_ITSELF}}, "/$defs/a~1b"),
        (
            {"type": "object", "properties": {"b": {"$ref": "#/$defs/a~1b"}, "a": {}},
             "required": ["a", "b"], "$defs": {"a/b": LIST_OF_ITSELF}},
            "/$defs/a~1b",
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": NAMED}}, "/$defs/x"),
        ({"$ref": "http://a/x#", "$defs": {"x": NAMED}}, "/$defs/x"),
        ({"$id": "http://a/r", "$ref": "x", "$defs": {"y": {**NAMED, "$id": "x"}}}, "/$defs/y"),
        ({"$id": "http://a/r", "$ref": "r#/$defs/y", "$defs": {"y": {
          "type": "array", "minItems": 1, "items": {"$ref": "/r#/$defs/y"}}}}, "/$defs/y"),
        ({"$id": "urn:r", "$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "/$defs/x"),
    ],
)  # fmt: skip
def test_a_schema_that_never_ends_is_refused_where_it_needs_itself(
    compiler: GrammarCompiler, schema: dict[str, Any], place: str
) -> None:
    error = compiler.compile(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))).exception()
    assert isinstance(error, RequestError)
    assert f"got at #{place}: one that always needs itself" in str(error)


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({**PAIR, "required": []}, "{}"),
        ({**PAIR, "type": ["object", "null"]}, "null"),
        ({"anyOf": [PAIR, {"type": "null"}]}, '{"a":null}'),
        ({"type": "array", "items": ITSELF}, "[[], []]"),
        ({"type": "array", "prefixItems": [{}, ITSELF], "minItems": 1}, "[1]"),
        ({"type": "array", "items": {"anyOf": [{"type": "null"}, ITSELF]}, "minItems": 1},
         "[[null]]"),
        ({"anyOf": [{"$ref": "#/$defs/x"}, {"const": 1}], "$defs": {"x": {"$ref": "#/$defs/x"}}},
         "1"),
        ({"type": "object", "properties": {"id": {"type": "null"},
          "a": {"$ref": "#/properties/id"}}, "required": ["id", "a"]}, '{"id": null, "a": null}'),
        # References begin at the nearest name around them.
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$id": "http://a/x", "$ref": "#/$defs/x",
          "$defs": {"x": {"type": "null"}}}}}, "null"),
        ({"$id": "http://a/r", "$ref": "x", "default": {**NAMED, "$id": "x"},
          "$defs": {"b": {"$id": "x", "type": "null"}}}, "null"),
        # Until draft 7 there is nothing beside a reference, a name neither.
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/x",
          "definitions": {"x": {"$id": "http://a/x", "$ref": "#/definitions/y", "definitions": {
            "y": {"$ref": "#/definitions/y"}}}, "y": {"type": "null"}}}, "null"),
    ],
)  # fmt: skip
def test_a_schema_whose_recursion_can_end(
    compiler: GrammarCompiler, text: TextTokenizer, schema: dict[str, Any], answer: str
) -> None:
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))
    assert accepts(compiler.compile(guide).result(), text, answer)
