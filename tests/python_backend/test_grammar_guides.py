"""Guides: what they allow by independent judges, what is refused and where, and hostile ones."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine.config import ModelConfig
from python_backend.grammar.compiler import GrammarCompiler
from python_backend.grammar.grammars import Grammars
from python_backend.grammar.guide import MAX_GUIDE_BYTES, Guide, GuideError, GuideKind, read_guide
from python_backend.request import RequestError
from python_backend.text.tokenizer import TextTokenizer
from tests.python_backend.grammar_texts import accepts, drawn_answer, setup_of, tinyflash_text

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def text() -> TextTokenizer:
    return tinyflash_text()


@pytest.fixture(scope="module")
def compiler(text: TextTokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(setup_of(text))
    yield made
    made.close()


def is_person(answer: str) -> bool:
    """PERSON, by hand."""
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and {"name", "age"} <= set(value) <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 4
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value.get("tags", [])) <= 2
        and all(tag in ("a", "b") for tag in value.get("tags", []))
    )


def is_object(answer: str) -> bool:
    try:
        return isinstance(json.loads(answer), dict)
    except ValueError:
        return False


def is_nested_list(answer: str) -> bool:
    """Lists of lists, written without white space."""
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return isinstance(value, list) and answer == json.dumps(value, separators=(",", ":"))


def is_sum(answer: str) -> bool:
    """From the innermost brackets outwards, each sum in them a term x."""
    terms, before = r"([0-9]{1,3}|x)(\+([0-9]{1,3}|x))*", ""
    while answer != before:
        before, answer = answer, re.sub(rf"\({terms}\)", "x", answer)
    return re.fullmatch(terms, answer) is not None


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda answer: re.fullmatch(pattern, answer) is not None


NESTED = 'root ::= "[" (root ("," root)*)? "]"  # lists\n'
SUM = """root ::= sum
sum ::= term
  | sum "+" term   # left recursive
term ::= [0-9]{1,3} | "(" sum ")"
"""
CLASSES = r'root ::= "\u0041" [\u00e4-\u00f6\x41]+ [^\]\-/"a-z] "\n"?'
CASES: list[tuple[GuideKind, str, Callable[[str], bool], list[str]]] = [
    (
        GuideKind.JSON_SCHEMA,
        json.dumps(PERSON),
        is_person,
        [
            '{"name": "Bo", "age": 7}',
            '{"name":"","age":150,"tags":["b", "a"]}',
            '{"name": "ä😀", "age": 0}',
            '{"name": "Bo", "age": 151}',
            '{"name": "Bob B", "age": 1}',
            '{"name": "Bo"}',
            '{"name": "Bo", "age": 7, "x": 1}',
            '{"name": "Bo", "age": 7',
            '{"name": "Bo", "age": 7.5}',
            '{"name": "Bo", "age": 7, "tags": ["c"]}',
        ],
    ),
    (GuideKind.JSON, "", is_object, ['{"a": [1, {"b": null}]}', "{}", "[1]", "{} x", '"a"']),
    (
        GuideKind.REGEX,
        r"(ab|c)*[0-9]{2}(/|\n)?",
        matches(r"(ab|c)*[0-9]{2}(/|\n)?"),
        ["abc12", "12", "ab1", "a12", "ccab99/", "12\n", "abc123", ""],
    ),
    (GuideKind.REGEX, r"^(?i)yes|no$", matches(r"(?i:yes|no)"), ["yes", "NO", "n", "yesno"]),
    (
        GuideKind.CHOICE,
        '["ja", "nein 😀", "a\\"b\\\\"]',
        lambda answer: answer in ("ja", "nein 😀", 'a"b\\'),
        ["ja", "nein 😀", 'a"b\\', "nein", "jaja", ""],
    ),
    (GuideKind.GRAMMAR, NESTED, is_nested_list, ["[]", "[[],[[]]]", "[[]", "[,]", "[[] ,[]]", "]"]),
    (
        GuideKind.GRAMMAR,
        SUM,
        is_sum,
        ["1", "12+345", "(1+2)+3", "((7))", "+1", "1+", "1234", "(1", "1)(2", "2(1)"],
    ),
    (
        GuideKind.GRAMMAR,
        CLASSES,
        matches(r"A[ä-öA]+[^\]\-/\"a-z]\n?"),
        ["AäAB", "AA1\n", "A1", "AAa", "AA]", "Aö-", "BAA"],
    ),
]


@pytest.mark.parametrize(("kind", "guide", "judge", "answers"), CASES)
def test_a_guide_allows_what_its_judge_allows(
    compiler: GrammarCompiler,
    text: TextTokenizer,
    kind: GuideKind,
    guide: str,
    judge: Callable[[str], bool],
    answers: list[str],
) -> None:
    """Given answers, and ten that random tokens make."""
    grammar = compiler.compile(Guide(kind, guide)).result()
    verdicts = {answer: accepts(grammar, text, answer) for answer in answers}
    assert verdicts == {answer: judge(answer) for answer in answers}
    assert True in verdicts.values()
    assert False in verdicts.values()
    rng = np.random.default_rng(5)
    drawn = [drawn_answer(grammar, text, rng, 60) for _ in range(10)]
    ended = [answer for answer in drawn if answer is not None]
    assert all(judge(answer) for answer in ended), ended
    assert ended or kind == GuideKind.JSON


def test_an_answer_after_reasoning(compiler: GrammarCompiler, text: TextTokenizer) -> None:
    grammar = compiler.compile(Guide(GuideKind.REGEX, "[0-9]+", after_reasoning=True)).result()
    assert accepts(grammar, text, "Let me see: {\n 1 + 1 = 2 😀\n</think>2")
    assert accepts(grammar, text, "</think>2")
    assert not accepts(grammar, text, "2")
    assert not accepts(grammar, text, "Let me see</think>two")


@pytest.mark.parametrize(
    ("kind", "guide", "said"),
    [
        (GuideKind.JSON_SCHEMA, '{"type": "object",', "at line 1, column 19: Expecting"),
        (GuideKind.JSON_SCHEMA, '{\n "type": objekt}', "at line 2, column 10: Expecting value"),
        (GuideKind.JSON_SCHEMA, "[1]", "an object, got '[1]'"),
        (
            GuideKind.JSON_SCHEMA,
            '{"properties": {"a/b": {"type": "array", "items": {"type": "strin"}}}}',
            "at #/properties/a~1b/items: Invalid type: strin",
        ),
        (
            GuideKind.JSON_SCHEMA,
            '{"anyOf": [{"type": "null"}, {"pattern": "(a"}]}',
            "at #/anyOf/1: unclosed group",
        ),
        (GuideKind.JSON_SCHEMA, '{"$ref": "#/$defs/x"}', "at #: Pointer '/$defs/x' does not exist"),
        (GuideKind.REGEX, "ab(c", "at line 1, column 3 ('(c'): unclosed group"),
        (GuideKind.REGEX, "a/\n[z-a]", "at line 2, column 2 ('z-a]'): invalid character class"),
        (GuideKind.REGEX, "x(?=y)", "at line 1, column 2 ('(?=y)'): look-around"),
        (GuideKind.GRAMMAR, 'root ::= "a" b', "at line 1, column 14 ('b'): no rule named b"),
        (GuideKind.GRAMMAR, 'root ::= "a"\n | (', "at line 2, column 4 ('('): Expected token"),
        (
            GuideKind.GRAMMAR,
            'root ::= "a"\nx ::= [z-a]',
            "line 2, column 7 ('[z-a]'): the range",
        ),
        (GuideKind.GRAMMAR, 'root ::= "a', "at line 1, column 10 ('\"a'): nothing begins with"),
        (GuideKind.GRAMMAR, 'root ::= "\\q"', "column 11 ('\\\\q\"'): no escape"),
        (GuideKind.GRAMMAR, 'a ::= "x"', "no rule named root"),
        (GuideKind.GRAMMAR, 'root ::= "x"\nroot ::= "y"', "at line 2, column 1 ('root"),
        (GuideKind.GRAMMAR, "root ::= root", "at line 1, column 1 ('root ::= root'): rule root"),
        (GuideKind.GRAMMAR, 'root ::= "[" root "]"', 'column 1 (\'root ::= "[" root "]"\'): rule'),
        (
            GuideKind.GRAMMAR,
            'root ::= "x" a\na ::= b{2}\nb ::= (a | b)+ "c"?',
            "at line 2, column 1",
        ),
        (GuideKind.CHOICE, '["a", 1]', "a JSON list of one or more texts, got"),
        (GuideKind.CHOICE, "[]", "a JSON list of one or more texts, got '[]'"),
        (GuideKind.CHOICE, '["a"', "at line 1, column 5: Expecting ',' delimiter"),
    ],
)
def test_a_refusal_says_where(
    compiler: GrammarCompiler, kind: GuideKind, guide: str, said: str
) -> None:
    error = compiler.compile(Guide(kind, guide)).exception()
    assert isinstance(error, RequestError)
    assert error.code == "invalid_grammar"
    assert said in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("kind", "guide", "said"),
    [
        ("", "x", "with guided_decoding_guide, got none"),
        ("jsn", "x", "to be json, json_schema, regex, ebnf_grammar, choice, grammar, got 'jsn'"),
        ("json", "{}", "which is any JSON object, got one"),
        ("regex", "", "expected guided_decoding_guide with guided_decoding_guide_type regex"),
        ("regex", "a" * (MAX_GUIDE_BYTES + 1), f"at most {MAX_GUIDE_BYTES} bytes"),
    ],
)
def test_what_is_no_guide_is_refused(kind: str, guide: str, said: str) -> None:
    texts = {"guided_decoding_guide_type": [kind], "guided_decoding_guide": [guide]}
    with pytest.raises(GuideError, match=re.escape(said)):
        read_guide(texts, after_reasoning=False)


def test_a_server_that_compiles_nothing_says_what_it_lacks(
    tiny_config: ModelConfig, text: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for given, lack in ((None, "lacks a tokenizer.json"), (text, "lacks llguidance; install")):
        grammars = Grammars(tiny_config, given)
        with pytest.raises(RequestError, match=rf"\[invalid_argument\] .*{lack}"):
            grammars.compile(Guide(GuideKind.JSON, ""))
        grammars.close()


def test_guides_are_read() -> None:
    def read(kind: str, guide: str) -> Guide | None:
        texts = {"guided_decoding_guide_type": [kind], "guided_decoding_guide": [guide]}
        return read_guide(texts, after_reasoning=False)

    assert read("", "") is read_guide({}, after_reasoning=True) is None
    assert read("grammar", "g") == read("ebnf_grammar", "g") == Guide(GuideKind.GRAMMAR, "g")
    assert read("json", "") == Guide(GuideKind.JSON, "")
