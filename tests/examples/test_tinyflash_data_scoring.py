"""Scoring against numbers worked out by hand."""

import math

import numpy as np
import pytest

from examples.tinyflash import scoring
from examples.tinyflash.scoring import Question

SUM = Question("arithmetic", "numbers", "farm: have gain now", "How many?", "42")
CODE = Question("retrieval", "depth 1/4", "access code of Harbor Lamp", "What code?", "4729")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("40 + 2 = 42, which gives 42.\nThe answer is 42.\n#### 42", True),
        ("#### 42", True),
        ("####42", True),
        ("#### 042", True),
        ("#### 41\nNo: #### 42", True),
        ("The answer is 42.", False),
        ("#### 421", False),
        ("#### -42", False),
        ("#### forty-two", False),
        ("", False),
    ],
)
def test_arithmetic_answers(text: str, right: bool) -> None:
    assert scoring.is_correct(SUM, text) is right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The access code for Harbor Lamp is 4729.", True),
        ("The access code for Harbor Lamp is 4729", True),
        ("I think it is late. The access code is 4729.", True),
        ("The access code for Harbor Lamp is 47290.", False),
        ("The access code for Harbor Lamp is 4729 or 4728.", False),
        ("4729", False),
        ("This 4729.", False),
        ("", False),
    ],
)
def test_retrieval_answers(text: str, right: bool) -> None:
    assert scoring.is_correct(CODE, text) is right


def test_score() -> None:
    # 3 of 4: sample variance (3 * 0.0625 + 0.5625) / 3 = 0.25, standard error sqrt(0.25 / 4).
    result = scoring.score([True, True, False, True])
    assert result == (0.75, 0.25, 4)
    assert result.to_json() == {"accuracy": 0.75, "stderr": 0.25, "n": 4}


def test_score_agrees_with_the_binomial_formula() -> None:
    results = np.arange(1319) % 10 != 0
    p = 1187 / 1319
    result = scoring.score(results)
    assert math.isclose(result.accuracy, p)
    assert math.isclose(result.stderr, math.sqrt(p * (1 - p) / 1318))


def test_paired_comparison() -> None:
    a = [True, True, False, False, True, True, True, True]
    b = [True, True, True, False, True, False, True, True]
    # Differences 0 0 1 0 0 -1 0 0: mean 0, sample variance 2/7, standard error sqrt(2/7/8).
    result = scoring.compare(a, b)
    assert result.difference == 0
    assert math.isclose(result.stderr, math.sqrt(2 / 56))
    assert result.n == 8
    assert scoring.compare(a, a) == (0, 0, 8)
    assert math.isclose(scoring.compare([False, False, True], [True, True, True]).difference, 2 / 3)


def test_scores_by_label() -> None:
    questions = [SUM, CODE, SUM, CODE, SUM]
    scores = scoring.score_by_label(questions, [True, False, True, False, False])
    assert list(scores) == ["all", "numbers", "depth 1/4"]
    assert [scores[name].n for name in scores] == [5, 3, 2]
    assert scores["all"].accuracy == 0.4
    assert math.isclose(scores["numbers"].accuracy, 2 / 3)
    assert scores["depth 1/4"] == (0, 0, 2)


def test_too_few_or_unequal_results_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two results, got 1"):
        scoring.score([True])
    with pytest.raises(ValueError, match="got 2 and 3 of them"):
        scoring.compare([True, True], [True, True, False])
