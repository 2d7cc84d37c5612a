"""Scoring answers: exact match, standard errors, paired comparison of two runs.

Knows nothing about how a question was made or how an answer was produced; needs only numpy, so
that a client can use it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Task = Literal["arithmetic", "retrieval"]

_FINAL_NUMBER = re.compile(r"####\s*(-?\d+)")
_STATED_VALUE = re.compile(r"\bis\s+([^.\n]+?)\s*(?:\.|\n|$)")


@dataclass(frozen=True)
class Question:
    """One held-out question: `prompt` is the user's message, `answer` the text that must match.

    `label` names the part of the held-out set it belongs to, `source` what it was made from (the
    template of a word problem, the entity of a retrieval question).
    """

    task: Task
    label: str
    source: str
    prompt: str
    answer: str


class Score(NamedTuple):
    """Share of right answers in [0, 1], its standard error, the number of questions."""

    accuracy: float
    stderr: float
    n: int

    def to_json(self) -> dict[str, float | int]:
        return {"accuracy": self.accuracy, "stderr": self.stderr, "n": self.n}


class PairedDifference(NamedTuple):
    """Mean of (b − a) over the same questions, its standard error, the number of questions."""

    difference: float
    stderr: float
    n: int

    @property
    def in_stderr(self) -> float:
        """The difference in standard errors; infinite when every question changed alike."""
        if not self.stderr:
            return math.copysign(math.inf, self.difference) if self.difference else 0.0
        return self.difference / self.stderr

    def to_json(self) -> dict[str, float | int]:
        return {"difference": self.difference, "stderr": self.stderr, "n": self.n}


def final_number(text: str) -> str | None:
    """The number after the last `####`, without leading zeros; None when there is none."""
    numbers = _FINAL_NUMBER.findall(text)
    return str(int(numbers[-1])) if numbers else None


def stated_value(text: str) -> str | None:
    """What the last sentence of the form "... is VALUE." states; None when there is none."""
    values: list[str] = _STATED_VALUE.findall(text)
    return values[-1] if values else None


def is_correct(question: Question, text: str) -> bool:
    """Whether `text`, the assistant's whole answer, matches the question's answer exactly."""
    found = final_number(text) if question.task == "arithmetic" else stated_value(text)
    return found == question.answer


def score(results: Sequence[bool] | npt.NDArray[np.bool_]) -> Score:
    """Accuracy with the standard error of the mean (sample variance, n − 1).

    Raises ValueError for fewer than two results: they have no standard error.
    """
    mean, stderr, n = _mean_and_stderr(np.asarray(results, np.float64))
    return Score(mean, stderr, n)


def compare(
    a: Sequence[bool] | npt.NDArray[np.bool_], b: Sequence[bool] | npt.NDArray[np.bool_]
) -> PairedDifference:
    """How much better `b` is than `a` on the same questions in the same order.

    The standard error is that of the per-question differences, so questions on which both agree
    add nothing to it. Raises ValueError when the lengths differ or are below two.
    """
    if len(a) != len(b):
        raise ValueError(
            f"expected two results per question, got {len(a)} and {len(b)} of them; "
            "run both settings on the same questions"
        )
    mean, stderr, n = _mean_and_stderr(np.asarray(b, np.float64) - np.asarray(a, np.float64))
    return PairedDifference(mean, stderr, n)


def score_by_label(
    questions: Sequence[Question], results: Sequence[bool] | npt.NDArray[np.bool_]
) -> dict[str, Score]:
    """One score per label, in order of first appearance, and one called "all"."""
    outcome = np.asarray(results, np.bool_)
    labels = [question.label for question in questions]
    parts = {
        label: score(outcome[[other == label for other in labels]])
        for label in dict.fromkeys(labels)
    }
    return {"all": score(outcome), **parts}


def _mean_and_stderr(values: npt.NDArray[np.float64]) -> tuple[float, float, int]:
    n = len(values)
    if n < 2:
        raise ValueError(f"expected at least two results, got {n}; raise the limit")
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(n)), n
