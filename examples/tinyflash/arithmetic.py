"""Word problems in the manner of GSM8K, with worked steps and a `#### answer` line.

A template is a domain (a setting with its own words) and a sequence of step kinds: a start, up to
two changes and a question ("farm: groups half lose compare"). Each kind has several phrasings per
domain. Two to five worked lines follow, every number an integer from 1 to 999:

    12 * 3 = 36, which gives 36.
    36 - 14 = 22, which gives 22.
    The answer is 22.
    #### 22

The text of a line states the result twice so that most of it follows from its first half; that is
what a drafter can predict. A product of two numbers above ten is worked as two partial products
and their sum.

Three things are held out of training and can be asked for by name:

* `template`: the templates listed as held out. Their kinds and all neighbouring pairs of kinds do
  occur in trained templates, in other orders or settings.
* `numbers`: trained templates with a tuple of given numbers that training never uses (a fixed
  hash holds out one tuple in eight, whatever the template).
* `range`: trained templates with a given number inside `HELD_OUT_RANGES`; the word problems of
  training never give such a number (it may come up as a result).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from examples.tinyflash.draw import pick
from examples.tinyflash.scoring import Question
from examples.tinyflash.steps import KINDS, MAX_LINES, Line, Run

Split = Literal["train", "numbers", "range", "template"]

HELD_OUT_RANGES = ((37, 39), (64, 66), (430, 449), (780, 799))

_DATA = Path(__file__).parent / "data" / "arithmetic.json"
_NUMBER = re.compile(r"\d+", re.ASCII)
_SLOTS = ("x", "y", "z", "w")
_OBJECTIVE = {"he": "him", "she": "her", "they": "them"}
_JOINT_STARTS = ("more_than", "times_as", "fewer_than")


class Template(NamedTuple):
    """A setting and a sequence of step kinds; `held_out` ones are never trained on."""

    domain: str
    kinds: tuple[str, ...]
    held_out: bool

    @property
    def name(self) -> str:
        return f"{self.domain}: {' '.join(self.kinds)}"


@dataclass(frozen=True)
class Problem:
    """One word problem. `numbers` are the given numbers in the order of the question's text."""

    template: Template
    question: str
    numbers: tuple[int, ...]
    lines: tuple[Line, ...]

    @property
    def answer(self) -> int:
        return self.lines[-1].result

    @property
    def steps(self) -> str:
        """The worked lines: what a thinking model writes as its reasoning."""
        return "\n".join(map(str, self.lines))

    @property
    def conclusion(self) -> str:
        return conclusion(self.answer)

    @property
    def solution(self) -> str:
        return f"{self.steps}\n{self.conclusion}"


def conclusion(answer: int) -> str:
    """How every worked answer ends."""
    return f"The answer is {answer}.\n#### {answer}"


class _Domain(NamedTuple):
    nouns: tuple[tuple[str, str, str], ...]  # items, one container, containers
    phrases: dict[str, tuple[str, ...]]


class _Bank(NamedTuple):
    people: tuple[tuple[str, str], ...]
    domains: dict[str, _Domain]
    trained: tuple[Template, ...]
    held_out: tuple[Template, ...]


@lru_cache(maxsize=1)
def _bank() -> _Bank:
    raw = json.loads(_DATA.read_text())
    domains = {}
    for name in raw["templates"]:
        own = raw["domains"][name]
        inherited = raw["domains"].get(own.get("extends"), {})
        kinds = [kind for kind in {**inherited, **own} if kind in KINDS]
        domains[name] = _Domain(
            nouns=tuple(tuple(noun) for noun in own["nouns"]),
            phrases={kind: (*inherited.get(kind, ()), *own.get(kind, ())) for kind in kinds},
        )

    def templates(part: str) -> tuple[Template, ...]:
        return tuple(
            Template(domain, tuple(kinds.split()), part == "held_out")
            for domain, parts in raw["templates"].items()
            for kinds in parts[part]
        )

    people = tuple((name, pronoun) for name, pronoun in raw["people"])
    return _Bank(people, domains, templates("train"), templates("held_out"))


def trained_templates() -> tuple[Template, ...]:
    return _bank().trained


def held_out_templates() -> tuple[Template, ...]:
    return _bank().held_out


def is_held_out_tuple(numbers: tuple[int, ...]) -> bool:
    """Whether training never uses this tuple of given numbers: one in eight, by a fixed hash."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ number) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state % 8 == 0


def is_in_held_out_range(numbers: tuple[int, ...]) -> bool:
    """Whether any given number lies in a range that training never shows."""
    return any(low <= number <= high for number in numbers for low, high in HELD_OUT_RANGES)


def problem(rng: Random, split: Split = "train") -> Problem:
    """Draw one problem of a split. Uses nothing but `rng`, so equal states give equal problems."""
    bank = _bank()
    templates = bank.held_out if split == "template" else bank.trained
    while True:
        template = pick(rng, templates)
        for _ in range(64):
            candidate = _attempt(rng, bank, template)
            if candidate is not None and _belongs(candidate.numbers, split):
                return candidate


def _belongs(numbers: tuple[int, ...], split: Split) -> bool:
    if split == "template":
        return True
    in_range = is_in_held_out_range(numbers)
    if split == "range":
        return in_range
    return not in_range and is_held_out_tuple(numbers) == (split == "numbers")


def heldout_arithmetic(n: int, seed: int) -> list[Question]:
    """`n` distinct held-out questions: 40 % unseen templates, 40 % unseen number tuples of trained
    templates, 20 % numbers of unseen ranges; in a fixed rotation, so that any prefix is mixed."""
    rng = Random(f"held-out arithmetic {seed}")
    rotation: tuple[Split, ...] = ("template", "numbers", "range", "template", "numbers")
    questions: dict[str, Question] = {}
    while len(questions) < n:
        split = rotation[len(questions) % len(rotation)]
        drawn = problem(rng, split)
        questions.setdefault(
            drawn.question,
            Question("arithmetic", split, drawn.template.name, drawn.question, str(drawn.answer)),
        )
    return list(questions.values())


def sentences(rng: Random) -> Iterator[str]:
    """Each phrase of each setting with each of its nouns: all words that questions are made of."""
    bank = _bank()
    for domain in bank.domains.values():
        for kind, phrases in domain.phrases.items():
            for phrase in phrases:
                for noun in domain.nouns:
                    yield _Teller(rng, bank, noun, kind in _JOINT_STARTS).say(phrase, (2, 3, 4, 5))


# -- one attempt ---------------------------------------------------------------------------------


def _attempt(rng: Random, bank: _Bank, template: Template) -> Problem | None:
    """A problem of `template`, or None when the drawn numbers leave the allowed range."""
    run = Run()
    given: list[tuple[int, ...]] = []
    for kind in template.kinds:
        given.append(KINDS[kind](rng, run))
        if run.failed:
            return None
    if len(run.lines) > MAX_LINES:
        return None
    question = _tell(rng, bank, template, given)
    in_order = tuple(map(int, _NUMBER.findall(question)))
    return Problem(template, question, in_order, tuple(run.lines))


def _tell(rng: Random, bank: _Bank, template: Template, given: list[tuple[int, ...]]) -> str:
    domain = bank.domains[template.domain]
    teller = _Teller(rng, bank, pick(rng, domain.nouns), template.kinds[0] in _JOINT_STARTS)
    return " ".join(
        teller.say(pick(rng, domain.phrases[kind]), numbers)
        for kind, numbers in zip(template.kinds, given, strict=True)
    )


class _Teller:
    """Who takes part in one problem, what is counted, and how both are referred to."""

    def __init__(
        self, rng: Random, bank: _Bank, noun: tuple[str, str, str], is_joint: bool
    ) -> None:
        self._rng = rng
        items, box, boxes = noun
        (name, pronoun), (other, _), (third, _) = rng.sample(bank.people, 3)
        self._references = ("they",) if is_joint else (name, pronoun)
        self._words: dict[str, str | int] = {
            "N": name, "M": other, "K": third, "items": items, "box": box, "boxes": boxes,
        }  # fmt: skip

    def say(self, phrase: str, numbers: tuple[int, ...]) -> str:
        subject = pick(self._rng, self._references)
        words = self._words
        words["s"] = subject
        words["S"] = subject.capitalize()
        words["o"] = _OBJECTIVE.get(subject, subject)
        words.update(zip(_SLOTS, numbers, strict=False))
        return phrase.format_map(words)
