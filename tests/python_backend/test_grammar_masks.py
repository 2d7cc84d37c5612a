"""Masks against brute force, behind drafts, and together with the other rules."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.generation.options import GenerationOptions
from python_backend.generation.sampler import Sampler
from python_backend.grammar.bitmask import allow, everything, forbid, holds
from python_backend.grammar.compiler import GrammarCompiler
from python_backend.grammar.grammar import Grammar
from python_backend.grammar.guide import Guide, GuideKind
from python_backend.grammar.masks import GrammarMasks
from python_backend.request import Delta, Request, SamplingParams
from tests.python_backend.grammar_texts import (
    END,
    VOCAB,
    rows_of,
    setup_of,
    tinyflash_text,
    tokens_of,
)

TEXT = tinyflash_text()
NOTHING = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(setup_of(TEXT))
    yield made
    made.close()


def id_of(word: str) -> int:
    (token,) = TEXT.encode_word(word)
    return token


def regex(compiler: GrammarCompiler, pattern: str) -> Future[Grammar]:
    return compiler.compile(Guide(GuideKind.REGEX, pattern))


# -- the bits ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 69), st.booleans()), max_size=20))
def test_sets_of_tokens(changes: list[tuple[int, int, bool]]) -> None:
    masks = everything(3, 70)
    sets = [set(range(96)) for _ in range(3)]
    for row, token, allowed in changes:
        (allow if allowed else forbid)(masks, np.array([row]), np.array([token]))
        (sets[row].add if allowed else sets[row].discard)(token)
    assert [tokens_of(mask) for mask in masks] == [sorted(one) for one in sets]
    assert holds(masks, 69).tolist() == [69 in one for one in sets]


# -- against all texts of a language -------------------------------------------------------------

FINITE = ["(ab|ba){1,3}c?", "a{2,4}(b|cc)", "(abc|aba|b)?", "[ab]{3}c[ab]"]


@pytest.mark.parametrize("pattern", FINITE)
def test_a_mask_has_the_tokens_that_some_text_goes_on_with(
    compiler: GrammarCompiler, pattern: str
) -> None:
    """Walks through every text of the language. Where the next character is certain the library
    allows the tokenizer's own way of cutting it only, elsewhere all."""
    grammar = regex(compiler, pattern).result()
    masks = GrammarMasks(VOCAB, END, 1)
    strings = map("".join, itertools.chain(*(itertools.product("abc", repeat=n) for n in range(8))))
    language = [one for one in strings if re.fullmatch(pattern, one)]
    assert len(language) > 3
    spelled = {
        id: piece.decode()
        for id, piece in enumerate(TEXT.bytes_of(np.arange(VOCAB, dtype=np.int32)))
        if piece and set(piece) <= set(b"abc")
    }
    assert max(map(len, spelled.values())) > 1
    for goal in language:
        masks.begin(0, grammar, NOTHING)
        for end in range(len(goal) + 1):
            before = goal[:end]
            rests = [one[end:] for one in language if one.startswith(before)]
            viable = {t for t, s in spelled.items() if any(r.startswith(s) for r in rests)}
            found = set(tokens_of(masks.masks(rows_of([0]))[0]))
            assert (END in found) == ("" in rests)
            assert found - {END} <= viable
            if len({rest[:1] for rest in rests}) > 1:
                assert found - {END} == viable
            else:
                assert found
            if end < len(goal):
                token = np.array([[id_of(goal[end])]], dtype=np.int32)
                masks.append(np.array([0]), token, np.array([1]))


@settings(deadline=None, max_examples=30)
@given(
    pattern=st.sampled_from([*FINITE, "[a-c]*", "a*b"]),
    made=st.text("abc", max_size=4),
    drafts=st.lists(st.sampled_from([*map(id_of, "abc"), END, 0, 7]), max_size=4),
)
def test_rows_behind_drafts_see_the_drafts(
    compiler: GrammarCompiler, pattern: str, made: str, drafts: list[int]
) -> None:
    """As a matcher that has them as outputs, as far as they are allowed; nothing is remembered."""
    grammar, other = (regex(compiler, one).result() for one in (pattern, "b?"))
    outputs = [id_of(letter) for letter in made]
    masks = GrammarMasks(VOCAB, END, 1)
    masks.begin(0, grammar, np.array(outputs, dtype=np.int32))
    if masks.failures(np.array([0])):
        return
    masks.begin(1, other, NOTHING)
    before = masks.masks(rows_of([1, 0])).copy()
    together = masks.masks(rows_of([1, 0, 1], [[], drafts, [id_of("b")]]))[1:-2]
    for k in range(len(drafts) + 1):
        alone = GrammarMasks(VOCAB, END, 1)
        alone.begin(0, grammar, np.array(outputs + drafts[:k], dtype=np.int32))
        expected = tokens_of(alone.masks(rows_of([0]))[0])
        assert tokens_of(together[k]) == expected
        if k < len(drafts) and (drafts[k] not in expected or drafts[k] == END):
            break  # what is chosen behind it is not kept
    assert np.array_equal(masks.masks(rows_of([1, 0])), before)


# -- with the other rules ------------------------------------------------------------------------

A, B, C = id_of("j"), id_of("q"), id_of("x")


def letters(compiler: GrammarCompiler, pattern: str) -> Future[Grammar]:
    """A pattern of the letters a, b and c in letters that no token has two of."""
    return regex(compiler, pattern.translate(str.maketrans("abc", "jqx")))


def asked(
    grammar: Future[Grammar] | None, ends: Sequence[int] = (END,), **options: object
) -> Request:
    def ignore(delta: Delta) -> None:
        del delta

    return Request(
        request_id="r",
        input_ids=np.array([A], dtype=np.int32),
        max_tokens=100,
        sampling=SamplingParams(**options),  # type: ignore[arg-type]
        end_ids=frozenset(ends),
        on_delta=ignore,
        grammar=grammar,
    )


def answer(request: Request, liked: Sequence[int], made: Sequence[int] = (), most: int = 12) -> str:
    """Greedy outputs until an end token, of a model that likes `liked`, the first most; beside an
    answer without a grammar, which likes what it likes."""
    sampler = Sampler(3, VOCAB)
    outputs = list(made)
    sampler.begin(2, request, np.array([A, *made], dtype=np.int32))
    sampler.begin(0, asked(None), np.array([A], dtype=np.int32))
    logits = torch.zeros(2, VOCAB)
    for value, token in enumerate(reversed(liked), start=1):
        logits[:, token] = float(value)
    while len(outputs) < most and not (outputs and outputs[-1] in request.end_ids):
        rows = rows_of([0, 2])
        rows = rows._replace(output_index=np.array([0, len(outputs)]))
        choice = sampler.choose(logits, rows)
        assert choice.tokens[0] == liked[0]
        assert not choice.failures
        outputs.append(int(choice.tokens[1]))
        sampler.append(rows, np.zeros(2, np.int64), choice.tokens)
    letters = {A: "a", B: "b", C: "c", END: "."}
    return "".join(letters.get(token, "?") for token in outputs)


def test_a_text_ends_where_it_is_complete(compiler: GrammarCompiler) -> None:
    assert answer(asked(letters(compiler, "ab")), [END, C]) == "ab."
    assert answer(asked(letters(compiler, "ab*")), [END, B]) == "a."
    assert answer(asked(letters(compiler, "ab*")), [B, END], most=5) == "abbbb"
    assert answer(asked(letters(compiler, "ab?c")), [B, C, END], made=[A]) == "abc."


def test_min_tokens_gives_way_to_a_grammar_that_is_through(compiler: GrammarCompiler) -> None:
    assert answer(asked(letters(compiler, "a{1,9}"), min_tokens=4), [END, A]) == "aaaa."
    assert answer(asked(letters(compiler, "ab"), min_tokens=4), [END, A]) == "ab."


def test_bad_words_give_way_to_a_grammar_without_another(compiler: GrammarCompiler) -> None:
    words = {"bad_words": ((B,), (A, A))}
    assert answer(asked(letters(compiler, "a(b|c)"), **words), [B, C, END]) == "ac."
    assert answer(asked(letters(compiler, "ab"), **words), [END]) == "ab."
    assert answer(asked(letters(compiler, "a{1,4}"), **words), [A, END]) == "a."


def test_end_tokens_are_the_requests_own(compiler: GrammarCompiler) -> None:
    """One that is no text ends a complete text only; one that is text also where it is allowed."""
    user = 4082
    assert answer(asked(letters(compiler, "ab*"), [user]), [END, user, B]) == "a?"
    assert answer(asked(letters(compiler, "aabc"), [B, END]), [C, END]) == "aab"
    assert answer(asked(letters(compiler, "aac"), [B]), [B, C]) == "aacb"
    special = asked(letters(compiler, "ab*"), [user, END])
    assert answer(special, [user, END, B]) == "a?"


def test_a_guide_without_an_end_token_ends_when_nothing_else_is_left(
    compiler: GrammarCompiler,
) -> None:
    sampling, own, guide = SamplingParams(), frozenset({END}), Guide(GuideKind.REGEX, "a")
    guided = GenerationOptions(sampling, ignore_eos=True, guide=guide)
    params, ends = guided.end_of_guide(sampling, guided.end_ids(own), own, most=8)
    assert (params.min_tokens, ends) == (8, own)
    request = asked(letters(compiler, "ab{1,4}"), sorted(ends), min_tokens=params.min_tokens)
    assert answer(request, [END, B]) == "abbbb."
    assert guided.end_of_guide(sampling, frozenset({7}), own, 8) == (sampling, {7})
    plain = GenerationOptions(sampling, ignore_eos=True)
    assert plain.end_of_guide(sampling, frozenset(), own, 8) == (sampling, frozenset())


def test_a_slot_forgets_its_grammar(compiler: GrammarCompiler) -> None:
    sampler = Sampler(1, VOCAB)
    logits = torch.zeros(1, VOCAB)
    logits[0, C] = 1.0
    for grammar, expected in (
        (letters(compiler, "ab"), A),
        (None, C),
        (letters(compiler, "bc"), B),
    ):
        sampler.begin(0, asked(grammar), np.array([A], dtype=np.int32))
        assert sampler.choose(logits, rows_of([0])).tokens.tolist() == [expected]


def test_sampled_answers_follow_the_grammar_and_their_probabilities(
    compiler: GrammarCompiler,
) -> None:
    """800 draws: what is allowed has its softmax."""
    count = 800
    sampler = Sampler(count, VOCAB)
    grammars = [letters(compiler, "[abc]") for _ in range(count)]
    logits = torch.zeros(count, VOCAB)
    logits[:, A], logits[:, B], logits[:, END] = 2.0, 1.0, 9.0
    for slot, grammar in enumerate(grammars):
        sampler.begin(slot, asked(grammar, temperature=1.0, seed=slot), np.array([A], np.int32))
    drawn = sampler.choose(logits, rows_of(list(range(count)))).tokens.tolist()
    weights = np.exp([2.0, 1.0, 0.0])
    expected = count * weights / weights.sum()
    observed = np.array([drawn.count(token) for token in (A, B, C)])
    assert observed.sum() == count
    assert ((observed - expected) ** 2 / expected).sum() < 13.8  # χ² with 2 degrees at 0.001


def test_a_grammar_that_is_too_much_fails_its_own_answer(compiler: GrammarCompiler) -> None:
    grammar = regex(compiler, "(?:[a-z]{1,100}){1,100}").result()
    other = letters(compiler, "a").result()
    masks = GrammarMasks(VOCAB, END, 1)
    masks.begin(0, grammar, NOTHING)
    masks.begin(1, other, NOTHING)
    for _ in range(60):
        found = masks.masks(rows_of([0, 1]))
        failures = masks.failures(np.array([0, 1]))
        if failures:
            break
        token = np.array([[tokens_of(found[0])[-1]]], dtype=np.int32)
        masks.append(np.array([0]), token, np.array([1]))
    assert list(failures) == [0]
    assert failures[0]
    assert tokens_of(found[1]) == [A]
