"""Guides that need the names of special tokens as text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest

from builder.byte_tokenizer import byte_tokenizer
from engine.config import ModelConfig
from python_backend.grammar.compiler import GrammarCompiler
from python_backend.grammar.grammar import Grammar
from python_backend.grammar.guide import Guide, GuideKind
from python_backend.grammar.masks import GrammarMasks
from python_backend.text.tokenizer import TextTokenizer
from tests.python_backend.grammar_texts import (
    CHECKPOINT,
    END,
    VOCAB,
    accepts,
    drawn_ids,
    rows_of,
    setup_of,
    text_of,
    tinyflash_text,
    tokens_of,
)

TEXT = tinyflash_text()
DSML = "｜DSML｜"
ADDED = {
    token["content"]: token["id"]
    for token in json.loads((CHECKPOINT / "tokenizer.json").read_text("utf-8"))["added_tokens"]
}
NO_TEXT = set(ADDED.values()) - {ADDED[DSML]}
OBJECT = {
    "type": "object",
    "properties": {"<think>": {"const": "a<｜User｜>"}},
    "required": ["<think>"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(setup_of(TEXT))
    yield made
    made.close()


def assert_says(grammar: Grammar, answers: set[str], reasoning: list[int]) -> None:
    """Behind the reasoning a random walk says one of the answers, in tokens that are text; so do
    rows behind drafts of it."""
    matcher = grammar.matcher()
    assert matcher.consume_tokens(reasoning)
    rest = Grammar(matcher, 0, END)
    ids = drawn_ids(rest, np.random.default_rng(3))
    assert ids is not None
    assert NO_TEXT.isdisjoint(ids)
    assert text_of(ids, TEXT) in answers
    masks = GrammarMasks(VOCAB, END, 1)
    masks.begin(0, rest, np.empty(0, np.int32))
    allowed = [tokens_of(row) for row in masks.masks(rows_of([0], [ids]))]
    assert all(token in row for token, row in zip([*ids, END], allowed, strict=True))
    assert not masks.failures(np.array([0]))


@pytest.mark.parametrize("after_reasoning", [False, True])
@pytest.mark.parametrize(
    ("kind", "guide", "answers"),
    [
        *((GuideKind.CHOICE, json.dumps([f"a{name}b"]), {f"a{name}b"}) for name in ADDED),
        (GuideKind.CHOICE, '["</think>"]', {"</think>"}),
        (GuideKind.CHOICE, '["<think>x", "<think>"]', {"<think>x", "<think>"}),
        (GuideKind.REGEX, "[xy]</think>", {"x</think>", "y</think>"}),
        (GuideKind.REGEX, "(</think>){2}", {"</think></think>"}),
        (GuideKind.JSON_SCHEMA, '{"const": "<think>"}', {'"<think>"'}),
        (
            GuideKind.JSON_SCHEMA,
            json.dumps(OBJECT),
            {
                f'{{{a}"<think>"{b}:{c}"a<｜User｜>"{d}}}'
                for a, b, c, d in itertools.product(("", " "), repeat=4)
            },
        ),
        (GuideKind.GRAMMAR, 'root ::= "<think>" [01]', {"<think>0", "<think>1"}),
        (GuideKind.GRAMMAR, 'root ::= "<think>" ("(" root ")")? ".."', {"<think>.."}),
    ],
)
def test_the_name_of_a_special_token_is_text(
    compiler: GrammarCompiler,
    kind: GuideKind,
    guide: str,
    answers: set[str],
    after_reasoning: bool,
) -> None:
    grammar = compiler.compile(Guide(kind, guide, after_reasoning)).result()
    assert_says(grammar, answers, [ADDED["</think>"]] if after_reasoning else [])


def test_an_end_token_is_not_the_text_of_its_name(compiler: GrammarCompiler) -> None:
    """The end token would have ended such an answer before its first letter."""
    guide = Guide(GuideKind.CHOICE, '["<｜end▁of▁sentence｜>"]')
    grammar, masks = compiler.compile(guide).result(), GrammarMasks(VOCAB, END, 1)
    masks.begin(0, grammar, np.empty(0, np.int32))
    first = tokens_of(masks.masks(rows_of([0]))[0])
    assert first
    assert END not in first


def test_an_added_token_that_is_text_stays_whole(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Guide(GuideKind.CHOICE, f'["</{DSML}calls>"]')).result()
    ids = drawn_ids(grammar, np.random.default_rng(3))
    assert ids is not None
    assert ids.count(ADDED[DSML]) == 1


def test_reasoning_ends_with_its_token_only(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Guide(GuideKind.CHOICE, '["7"]', after_reasoning=True)).result()
    spelled = [id for letter in "</think>" for id in TEXT.encode_word(letter)]
    seven = TEXT.encode_word("7")
    matcher = grammar.matcher()
    assert matcher.consume_tokens([*spelled, *seven])
    assert not matcher.is_accepting()
    assert matcher.consume_tokens([ADDED["</think>"], *seven])
    assert matcher.is_accepting()


def test_special_tokens_of_the_vocabulary_keep_their_ids(tiny_config: ModelConfig) -> None:
    """Where the model's vocabulary has all of them, as in a byte tokenizer."""
    text = TextTokenizer(byte_tokenizer(tiny_config), tiny_config.vocab_size)
    made = GrammarCompiler(setup_of(text, tiny_config.vocab_size))
    try:
        grammar = made.compile(Guide(GuideKind.REGEX, "</think>", after_reasoning=True)).result()
        spelled = [id for letter in "</think>" for id in text.encode_word(letter)]
        (end,) = text.encode_word("</think>")
        matcher = grammar.matcher()
        assert matcher.consume_tokens([end, *spelled])
        assert matcher.is_accepting()
        assert not accepts(grammar, text, "</think></think>")
    finally:
        made.close()
