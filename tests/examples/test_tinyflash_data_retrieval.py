"""Documents: one answer per question, uniform places, lengths, nothing held out in training."""

import re
from random import Random

import numpy as np
import pytest

from examples.tinyflash import dialogue, retrieval, tools
from examples.tinyflash.scoring import is_correct
from examples.tinyflash.tokenizer import encoder
from python_backend.text import chat

NAME = r"[A-Z][a-z]+ [A-Z][a-z]+"
STATEMENTS = (
    re.compile(rf"The (?P<attribute>[a-z ]+?) (?:for|of) (?P<entity>{NAME}) is (?P<value>\w+)\."),
    re.compile(rf"(?P<entity>{NAME}) has the (?P<attribute>[a-z ]+) (?P<value>\w+)\."),
    re.compile(rf"For (?P<entity>{NAME}), the (?P<attribute>[a-z ]+) is (?P<value>\w+)\."),
)


def stated(text: str) -> list[tuple[str, str, str]]:
    """Every (entity, attribute, value) that a text states, read from the text alone."""
    return [
        (match["entity"], match["attribute"], match["value"])
        for form in STATEMENTS
        for match in form.finditer(text)
    ]


def num_tokens(text: str) -> int:
    return len(encoder().tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("size", [96, 300, 1000, 8000])
def test_a_document_states_each_fact_once_and_fills_its_length(size: int) -> None:
    rng = Random(size)
    for _ in range(40 if size < 8000 else 6):
        document, targets = retrieval.document(rng, size, 2)
        text = document.text
        assert size - 32 < num_tokens(text) <= size
        facts = stated(text)
        assert sorted(facts) == sorted(document.facts)
        keys = [(entity, attribute) for entity, attribute, _ in facts]
        assert len(set(keys)) == len(keys) <= retrieval.MAX_FACTS
        assert set(targets) <= set(document.facts)
        if size >= 300:
            for target in targets:
                rivals = [fact for fact in facts if fact != tuple(target)]
                first, second = target.entity.split()
                assert any(
                    attribute == target.attribute or entity == target.entity or
                    first in entity or second in entity
                    for entity, attribute, _ in rivals
                )  # fmt: skip


def test_places_of_targets_are_uniform() -> None:
    rng = Random(1)
    depths = []
    for _ in range(3000):
        document, (target,) = retrieval.document(rng, 400, 1)
        start = document.text.index(document.fact_pieces[document.facts.index(target)])
        depths.append(start / len(document.text))
        assert abs(depths[-1] - document.depth(target)) < 0.25
    counts = np.histogram(depths, bins=4, range=(0, 1))[0]
    # 750 expected in each quarter, standard deviation 24; the last sentence's length blurs it.
    assert np.all(np.abs(counts - 750) < 100), counts


def test_held_out_questions() -> None:
    questions = retrieval.heldout_retrieval(60, 7, 4096, 8192)
    assert questions == retrieval.heldout_retrieval(60, 7, 4096, 8192)
    assert questions[:5] != retrieval.heldout_retrieval(5, 8, 4096, 8192)
    lengths = []
    for question in questions:
        document, asked = question.prompt.split("\n\n")
        matches = [fact for fact in stated(document) if fact[0] in asked and fact[1] in asked]
        assert len(matches) == 1
        entity, attribute, value = matches[0]
        assert value == question.answer
        assert question.source == f"{attribute} of {entity}"
        assert is_correct(question, f"The {attribute} for {entity} is {value}.")
        assert not is_correct(question, f"The {attribute} for {entity} is {value}1.")
        lengths.append(num_tokens(chat.render([{"role": "user", "content": question.prompt}])))
    assert min(lengths) >= 4096
    assert max(lengths) <= 8192
    assert max(lengths) - min(lengths) > 3000
    assert {question.label for question in questions} == {f"depth {n}/4" for n in (1, 2, 3, 4)}


def test_training_never_mentions_a_held_out_entity() -> None:
    rng = Random(2)
    mentioned: set[str] = set()
    for _ in range(3000):
        mentioned |= {fact.entity for fact in retrieval.document(rng, 300, 3)[0].facts}
    for _ in range(300):
        for conversation in (dialogue.several_turns(rng), tools.tool_conversation(rng)):
            mentioned |= {entity for entity, _, _ in stated(conversation.text)}
    assert len(mentioned) > 5000  # of 84 x 84 x 7/8 = 6174
    held_out = {
        question.source.rsplit(" of ", 1)[1]
        for question in retrieval.heldout_retrieval(400, 0, 128, 256)
    }
    assert not mentioned & held_out


def test_sizes_that_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="expected room for 8 facts, got 100 tokens"):
        retrieval.document(Random(0), 100, 8)
    with pytest.raises(ValueError, match="a span of 64, got 500 to 520"):
        retrieval.heldout_retrieval(1, 0, 500, 520)


def test_sizes_assumed_for_pieces_hold() -> None:
    rng = Random(4)
    lengths = [num_tokens(" " + retrieval.exchange(rng)[0]) for _ in range(5000)]
    assert max(lengths) <= retrieval.MAX_FACT_TOKENS
    assert all(
        num_tokens(text) <= retrieval.MAX_OPENING_TOKENS for text in retrieval._bank().openings
    )
    longest = int(retrieval.sentence_pool().lengths.max())
    assert longest < 32
