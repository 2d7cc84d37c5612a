"""Held-out questions asked, and the report on their answers: the same for a server and in process.

A report is a plain mapping that JSON holds: `accuracy`, `stderr` and `n` of all questions, the same
for each part of them, the settings, and one record per question. A paired comparison reads `asked`,
which names the questions, and `correct`, one digit per question, 1 where the answer was right.
Needs numpy and the tokenizer, no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.tinyflash.arithmetic import heldout_arithmetic
from examples.tinyflash.retrieval import heldout_retrieval
from examples.tinyflash.scoring import Question, Task, is_correct, score

TASKS: tuple[Task, ...] = ("arithmetic", "retrieval")
ANSWER_TOKENS = 256  # five worked lines are about 150
DOCUMENT_TOKENS = (4096, 8000)

Report = dict[str, Any]

_NORMAL_95 = 1.959964  # the standard normal's 97.5 % point

# What the labels of word problems are called in a report; all but the first are seen templates.
_PARTS = {"template": "unseen templates", "numbers": "unseen numbers", "range": "unseen range"}


class Answer(NamedTuple):
    """What came back for one question. Counts are tokens."""

    text: str
    finish_reason: str
    num_input_tokens: int
    cached_tokens: int
    num_output_tokens: int


def questions(
    task: Task, limit: int, seed: int, document_tokens: tuple[int, int] | None = None
) -> list[Question]:
    """`limit` held-out questions; documents of retrieval have from `document_tokens[0]` to `[1]`
    tokens, `DOCUMENT_TOKENS` when None.

    Raises ValueError for fewer than two questions, which have no standard error, for lengths that
    hold no document, and for lengths of word problems, which have none.
    """
    if limit < 2:
        raise ValueError(f"expected a limit of at least 2 questions, got {limit}; raise it")
    if task == "retrieval":
        return heldout_retrieval(limit, seed, *(document_tokens or DOCUMENT_TOKENS))
    if document_tokens is not None:
        raise ValueError(
            f"expected document tokens with the task retrieval only, got {list(document_tokens)} "
            f"with {task}; leave them out"
        )
    return heldout_arithmetic(limit, seed)


def report(
    asked: Sequence[Question],
    answers: Sequence[Answer],
    *,
    seed: int,
    settings: Mapping[str, Any],
    seconds: float,
) -> Report:
    """The report on `answers`, one per question in the same order."""
    records = [
        {
            "question": digest([question.prompt]),
            "label": question.label,
            "source": question.source,
            "expected": question.answer,
            "correct": is_correct(question, answer.text),
            **answer._asdict(),
        }
        for question, answer in zip(asked, answers, strict=True)
    ]
    total = score([record["correct"] for record in records])
    return {
        "task": asked[0].task,
        "seed": seed,
        "settings": dict(settings),
        **total.to_json(),
        "parts": {
            name: _part([record["correct"] for record in members])
            for name, members in _members(asked[0].task, records).items()
        },
        "num_cut_short": sum(record["finish_reason"] == "length" for record in records),
        "mean_input_tokens": float(np.mean([answer.num_input_tokens for answer in answers])),
        "mean_cached_tokens": float(np.mean([answer.cached_tokens for answer in answers])),
        "mean_output_tokens": float(np.mean([answer.num_output_tokens for answer in answers])),
        "seconds": round(seconds, 3),
        "asked": digest([question.prompt for question in asked]),
        "correct": "".join(str(int(record["correct"])) for record in records),
        "records": records,
    }


@contextmanager
def reading(path: Path, expected: str, remedy: str) -> Iterator[None]:
    """Raises ValueError, one sentence that names `path`, for whatever its content raises."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected {expected} in {path}, got {type(error).__name__}: {error}; {remedy}"
        ) from None


def digest(texts: Sequence[str]) -> str:
    """A short name of these texts in this order."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def table(made: Report) -> str:
    """All questions, then each part of them, one per line."""
    rows = [("part", "questions", "right", "± stderr")]
    for name, part in [("all", made), *made["parts"].items()]:
        rows.append((name, str(part["n"]), f"{100 * part['accuracy']:.2f} %", _uncertainty(part)))
    return "\n".join(
        [
            *aligned(rows),
            f"tokens of a question: {made['mean_input_tokens']:.0f} in, "
            f"{made['mean_cached_tokens']:.0f} of them cached, "
            f"{made['mean_output_tokens']:.0f} out; {made['num_cut_short']} cut short",
        ]
    )


def _uncertainty(part: Report) -> str:
    """The standard error. Equal results have none, which is not certainty: then the bound that
    their number allows, of Wilson's interval (1927), 95 %."""
    if part["stderr"]:
        return f"{100 * part['stderr']:.2f} %"
    share = part["n"] / (part["n"] + _NORMAL_95**2)
    if part["accuracy"]:
        return f"95 %: ≥ {100 * share:.1f} %"
    return f"95 %: ≤ {100 * (1 - share):.1f} %"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def _members(task: str, records: Sequence[Report]) -> dict[str, list[Report]]:
    """Records by part: by label, and by length where the lengths differ."""
    members: dict[str, list[Report]] = {}
    for record in records:
        label: str = record["label"]
        members.setdefault(_PARTS.get(label, label), []).append(record)
    members = dict(sorted(members.items(), reverse=task == "arithmetic"))
    if task == "arithmetic":
        seen = [record for record in records if record["label"] != "template"]
        members = {"seen templates": seen, **members} if seen else members
    lengths: dict[int, list[Report]] = {}
    for record in records:
        lengths.setdefault(record["num_input_tokens"].bit_length(), []).append(record)
    if len(lengths) > 1:
        for bits, group in sorted(lengths.items()):
            members[f"{2 ** (bits - 1)} to {2**bits - 1} tokens"] = group
    return members


def _part(correct: Sequence[bool]) -> Report:
    """As `Score.to_json`; one question alone has no standard error."""
    if len(correct) < 2:
        return {"accuracy": float(correct[0]), "stderr": None, "n": 1}
    return dict(score(correct).to_json())
