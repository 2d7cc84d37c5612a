"""Documents with facts hidden in bland text, and questions about them.

A document is an opening, filler sentences from a grammar of its own, and facts ("The access code
for Harbor Lamp is 4729.") laid between the sentences. One fact per question is the target. The
others distract: another attribute of the same entity, the same attribute of an entity that shares
a word with it (one of these for each target where there is room), unrelated facts. No two facts
share entity and attribute, so every question has one answer. The answer restates the fact in one
form, whatever form the document used.

Entities are pairs of words. One pair in eight, by a fixed hash, is held out: training never asks
about it and never states a fact of it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from examples.tinyflash.draw import pick
from examples.tinyflash.scoring import Question
from examples.tinyflash.tokenizer import encoder

NUM_POOL_SENTENCES = 16384
MAX_FACTS = 64
MAX_FACT_TOKENS = 16
MAX_OPENING_TOKENS = 16
MIN_DOCUMENT_TOKENS = 128
MIN_TOKEN_SPAN = 64  # more than one sentence and one question

_DATA = Path(__file__).parent / "data" / "documents.json"


class Fact(NamedTuple):
    """One entity's value of one attribute. The value is digits or a word."""

    entity: str
    attribute: str
    value: str

    @property
    def answer(self) -> str:
        return _bank().answer.format(**self._asdict())


@dataclass(frozen=True)
class Document:
    """A text as its pieces in order. Each but the opening starts with a space, where the tokenizer
    always cuts, so that the pieces' token counts add up."""

    facts: tuple[Fact, ...]
    fact_pieces: tuple[str, ...]  # how the text states each fact
    layout: tuple[int, ...]  # index into the sentence pool (≥ 0) or −1 − index of the fact
    opening: str

    @property
    def text(self) -> str:
        texts = sentence_pool().texts
        parts = [texts[i] if i >= 0 else self.fact_pieces[-1 - i] for i in self.layout]
        return self.opening + "".join(parts)

    def depth(self, fact: Fact) -> float:
        """Where the fact is stated: 0 first, 1 last piece of the text."""
        place = self.layout.index(-1 - self.facts.index(fact))
        return place / max(1, len(self.layout) - 1)


class SentencePool(NamedTuple):
    """Filler sentences with their leading space, and their numbers of tokens, int32 [n]."""

    texts: tuple[str, ...]
    lengths: npt.NDArray[np.int32]


class _Bank(NamedTuple):
    first: tuple[str, ...]
    second: tuple[str, ...]
    attributes: tuple[tuple[str, int | str], ...]  # number of digits, or name of a value list
    values: dict[str, tuple[str, ...]]
    facts: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    openings: tuple[str, ...]
    sentences: tuple[str, ...]
    words: dict[str, tuple[str, ...]]


@lru_cache(maxsize=1)
def _bank() -> _Bank:
    raw = json.loads(_DATA.read_text())
    kinds = ("adjectives", "nouns", "verbs", "adverbs", "places", "times")
    return _Bank(
        first=tuple(raw["first"]),
        second=tuple(raw["second"]),
        attributes=tuple((name, values) for name, values in raw["attributes"]),
        values={name: tuple(words) for name, words in raw["values"].items()},
        facts=tuple(raw["facts"]),
        questions=tuple(raw["questions"]),
        answer=raw["answer"],
        openings=tuple(raw["openings"]),
        sentences=tuple(raw["sentences"]),
        words={kind: tuple(raw[kind]) for kind in kinds},
    )


def is_held_out_entity(entity: str) -> bool:
    """Whether training never mentions this entity: one in eight, by a fixed hash of its name."""
    return zlib.crc32(entity.encode()) % 8 == 0


def attribute_names() -> list[str]:
    return [name for name, _ in _bank().attributes]


def filler_sentences() -> Iterator[str]:
    """The NUM_POOL_SENTENCES filler sentences, always the same, each with a leading space."""
    rng = Random("filler sentences")
    words = _bank().words
    for _ in range(NUM_POOL_SENTENCES):
        noun, noun2 = rng.sample(words["nouns"], 2)
        adjective, adjective2 = rng.sample(words["adjectives"], 2)
        place, time = rng.choice(words["places"]), rng.choice(words["times"])
        sentence = rng.choice(_bank().sentences).format(
            noun=noun,
            noun2=noun2,
            adjective=adjective,
            adjective2=adjective2,
            verb=rng.choice(words["verbs"]),
            adverb=rng.choice(words["adverbs"]),
            place=place,
            Place=place.capitalize(),
            time=time,
            Time=time.capitalize(),
            number=rng.randrange(2, 100),
        )
        yield " " + sentence


@lru_cache(maxsize=1)
def sentence_pool() -> SentencePool:
    texts = tuple(filler_sentences())
    lengths = [len(encoder().encode(text)) for text in texts]
    return SentencePool(texts, np.array(lengths, np.int32))


def random_fact(rng: Random, *, held_out: bool = False) -> Fact:
    """A fact about an entity of training, or about a held-out one."""
    bank = _bank()
    while True:
        entity = f"{pick(rng, bank.first)} {pick(rng, bank.second)}"
        if is_held_out_entity(entity) == held_out:
            return _fact_about(rng, entity, pick(rng, bank.attributes)[0])


def question(rng: Random, fact: Fact) -> str:
    return pick(rng, _bank().questions).format(attribute=fact.attribute, entity=fact.entity)


def exchange(rng: Random) -> tuple[str, str, str]:
    """A statement, a question and its answer about one fact, without a document."""
    fact = random_fact(rng)
    return _statement(rng, fact), question(rng, fact), fact.answer


def document(
    rng: Random, num_tokens: int, num_targets: int, *, held_out: bool = False
) -> tuple[Document, tuple[Fact, ...]]:
    """A document of at most `num_tokens` tokens (short of it by less than a sentence) and the
    facts to ask for, in random order.

    With `held_out` the targets are about held-out entities; distractors may then be too. The
    places of the facts are uniform over the document. Raises ValueError when `num_tokens` has no
    room for that many facts.
    """
    room = (num_tokens - MAX_OPENING_TOKENS) // MAX_FACT_TOKENS
    if room < num_targets:
        raise ValueError(
            f"expected room for {num_targets} facts, got {num_tokens} tokens, which hold {room}; "
            "ask for a longer document or fewer facts"
        )
    drawn = (random_fact(rng, held_out=held_out) for _ in count())
    targets = _distinct(num_targets, drawn)
    num_facts = num_targets + 2 + int(rng.random() * (2 + num_tokens / 100))
    facts = _with_distractors(rng, targets, min(num_facts, room, MAX_FACTS), held_out)
    opening = pick(rng, _bank().openings)
    pieces = tuple(" " + _statement(rng, fact) for fact in facts)
    used = sum(len(encoder().encode(piece)) for piece in (opening, *pieces))
    layout = _draw_sentences(rng, num_tokens - used)
    # Facts take uniform places among all pieces: an exchangeable arrangement needs only the set.
    places = sorted(rng.sample(range(len(layout) + len(facts)), len(facts)))
    order = list(range(len(facts)))
    rng.shuffle(order)
    for place, index in zip(places, order, strict=True):
        layout.insert(place, -1 - index)
    return Document(facts, pieces, tuple(layout), opening), targets


def heldout_retrieval(n: int, seed: int, min_tokens: int, max_tokens: int) -> list[Question]:
    """`n` questions about held-out entities, one per document.

    Document and question together have between `min_tokens` and `max_tokens` tokens, uniformly;
    the label is the quarter of the document that states the fact ("depth 1/4" is its start).
    Raises ValueError as `check_lengths`.
    """
    check_lengths(min_tokens, max_tokens)
    rng = Random(f"held-out retrieval {seed}")
    questions = []
    for _ in range(n):
        budget = rng.randint(min_tokens + MIN_TOKEN_SPAN, max_tokens)
        text, (fact,) = document(rng, budget - MIN_TOKEN_SPAN // 2, 1, held_out=True)
        quarter = min(4, 1 + int(4 * text.depth(fact)))
        prompt = f"{text.text}\n\n{question(rng, fact)}"
        label = f"depth {quarter}/4"
        source = f"{fact.attribute} of {fact.entity}"
        questions.append(Question("retrieval", label, source, prompt, fact.value))
    return questions


def check_lengths(min_tokens: int, max_tokens: int) -> None:
    """Raises ValueError when the two are less than MIN_TOKEN_SPAN apart or too small for a
    document."""
    if min_tokens < MIN_DOCUMENT_TOKENS or max_tokens - min_tokens < MIN_TOKEN_SPAN:
        raise ValueError(
            f"expected at least {MIN_DOCUMENT_TOKENS} tokens and a span of {MIN_TOKEN_SPAN}, "
            f"got {min_tokens} to {max_tokens}; widen the range"
        )


def _statement(rng: Random, fact: Fact) -> str:
    return pick(rng, _bank().facts).format(**fact._asdict())


def _fact_about(rng: Random, entity: str, attribute: str) -> Fact:
    bank = _bank()
    values = dict(bank.attributes)[attribute]
    if isinstance(values, str):
        return Fact(entity, attribute, pick(rng, bank.values[values]))
    low = 10 ** (values - 1)
    return Fact(entity, attribute, str(low + int(rng.random() * 9 * low)))


def _distinct(n: int, draws: Iterator[Fact]) -> tuple[Fact, ...]:
    """The first `n` facts drawn, no two with the same entity and attribute."""
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < n:
        fact = next(draws)
        facts.setdefault((fact.entity, fact.attribute), fact)
    return tuple(facts.values())


def _with_distractors(
    rng: Random, targets: tuple[Fact, ...], n: int, held_out: bool
) -> tuple[Fact, ...]:
    """`n` facts: the targets, one that resembles each of them, and then half and half."""

    def draws() -> Iterator[Fact]:
        yield from targets
        for target in targets:
            yield _resembling(rng, target, held_out)
        while True:
            yield _resembling(rng, pick(rng, targets), held_out)
            yield random_fact(rng)

    return _distinct(n, draws())


def _resembling(rng: Random, target: Fact, held_out: bool) -> Fact:
    """Another attribute of the entity, or the attribute of one that shares a word with it."""
    bank = _bank()
    first, second = target.entity.split()
    while True:
        choice = rng.random()
        if choice < 0.3:
            attribute = pick(rng, bank.attributes)[0]
            if attribute != target.attribute:
                return _fact_about(rng, target.entity, attribute)
            continue
        if choice < 0.65:
            entity = f"{first} {pick(rng, bank.second)}"
        else:
            entity = f"{pick(rng, bank.first)} {second}"
        if entity != target.entity and (held_out or not is_held_out_entity(entity)):
            return _fact_about(rng, entity, target.attribute)


def _draw_sentences(rng: Random, num_tokens: int) -> list[int]:
    """Pool indices whose sentences have at most `num_tokens` tokens together, and nearly so."""
    lengths = sentence_pool().lengths
    generator = np.random.Generator(np.random.PCG64(rng.getrandbits(64)))
    drawn = generator.integers(0, len(lengths), size=num_tokens // int(lengths.min()) + 1)
    kept = np.searchsorted(np.cumsum(lengths[drawn]), num_tokens, side="right")
    return list(map(int, drawn[:kept]))
