"""Teacher-forced accuracy on fresh held-out conversations while training runs.

A conversation counts as right when every token that the model writes is its first choice; greedy
generation then writes exactly this text. The seeds are the monitor's own: no final evaluation uses
them.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np
import torch

from examples.tinyflash import arithmetic, dialogue, retrieval
from examples.tinyflash.dialogue import Conversation
from examples.tinyflash.mixture import Batch, tokenise

_SEED = "training monitor"
_PROBLEMS = 64
_DOCUMENTS = 12
_DOCUMENT_TOKENS = {"512": 512, "2K": 2048, "8K": 8000}
_SPLITS: tuple[arithmetic.Split, ...] = ("train", "numbers", "range", "template")


class Probe(NamedTuple):
    """Held-out conversations of one kind, one question each."""

    name: str
    batch: Batch


@cache
def probes() -> tuple[Probe, ...]:
    rng = Random(_SEED)
    result = []
    for split in _SPLITS:
        problems = [arithmetic.problem(rng, split) for _ in range(_PROBLEMS)]
        result.append(Probe(f"arithmetic {split}", _lay_out([_worked(p) for p in problems])))
    for name, length in _DOCUMENT_TOKENS.items():
        documents = [_asked(rng, length) for _ in range(_DOCUMENTS)]
        result.append(Probe(f"retrieval {name}", _lay_out(documents)))
    return tuple(result)


def share_right(right: torch.Tensor, batch: Batch) -> float:
    """Share of conversations all of whose written tokens are right; right [M] bool, in order."""
    request = np.repeat(np.arange(len(batch.tasks)), np.diff(batch.query_start))[batch.mask]
    wrong = np.unique(request[~right.cpu().numpy()])
    return 1.0 - len(wrong) / len(batch.tasks)


def _worked(problem: arithmetic.Problem) -> Conversation:
    answer = dialogue.worked("chat", problem.steps, problem.conclusion)
    return Conversation((dialogue.user(problem.question), answer))


def _asked(rng: Random, length: int) -> Conversation:
    text, (fact,) = retrieval.document(rng, length - 64, 1, held_out=True)
    question = f"{text.text}\n\n{retrieval.question(rng, fact)}"
    return Conversation((dialogue.user(question), dialogue.assistant("chat", fact.answer, "")))


def _lay_out(conversations: list[Conversation]) -> Batch:
    examples = [tokenise(conversation) for conversation in conversations]
    return Batch(
        np.concatenate([example.tokens for example in examples]),
        np.concatenate([example.mask for example in examples]),
        np.cumsum([0, *(len(example.tokens) for example in examples)], dtype=np.int32),
        tuple("arithmetic" for _ in examples),
    )
