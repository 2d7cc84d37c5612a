"""Sampled answers with drafts have the target's own joint distribution over all their tokens.

The target is a table: what comes next depends on the token before, and by the penalties on all
outputs. The drafter is certain of what is often wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from python_backend.drafting.verification import Verified, verify
from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Sampler
from python_backend.request import Delta, Request, SamplingParams

VOCAB, LENGTH, REQUESTS = 4, 3, 12_000
HEAT, PRESENCE, FREQUENCY = 0.9, 0.4, 0.3
TABLE = torch.tensor(
    [[1.0, 0.2, -0.5, 0.4], [-0.3, 0.9, 0.6, 0.1], [0.5, 0.5, 0.0, -1.0], [0.0, 1.2, 0.3, 0.7]]
)
DRAFTED = np.array([3, 0, 1, 2], dtype=np.int32)  # behind each token; the target's choice is rare
FIRST = 2  # the prompt's only token

Int32Array = npt.NDArray[np.int32]
# choices of the rows, drafts laid end to end and their number → what stays
Rule = Callable[[Int32Array, Int32Array, npt.NDArray[np.int64]], Verified]


def ignore(delta: Delta) -> None:
    del delta


def sampler_of(first_seed: int) -> Sampler:
    sampler = Sampler(REQUESTS, VOCAB)
    prompt = np.array([FIRST], dtype=np.int32)
    for slot in range(REQUESTS):
        sampling = SamplingParams(
            temperature=HEAT, seed=first_seed + slot,
            presence_penalty=PRESENCE, frequency_penalty=FREQUENCY,
        )  # fmt: skip
        asked = Request("r", prompt, LENGTH, sampling, end_ids=frozenset(), on_delta=ignore)
        sampler.begin(slot, asked, prompt)
    return sampler


def answers(sampler: Sampler, rule: Rule = verify) -> Int32Array:
    """LENGTH tokens of each request, in steps that verify two drafts or as many as fit."""
    made = np.full((REQUESTS, LENGTH + 3), -1, dtype=np.int32)
    count = np.zeros(REQUESTS, dtype=np.int64)
    while len(slots := np.flatnonzero(count < LENGTH)):
        last = np.where(count[slots] > 0, made[slots, count[slots] - 1], FIRST)
        drafts = np.stack([DRAFTED[last], DRAFTED[DRAFTED[last]]], axis=1)
        number = np.minimum(2, LENGTH - 1 - count[slots])
        flat = drafts[np.arange(2) < number[:, None]]
        rows = LogitRows.of_step(slots, count[slots], flat, number)
        before = np.concatenate([last[:, None], drafts], axis=1)
        logits = TABLE[before[np.arange(3) <= number[:, None]].astype(np.int64)]
        stays = rule(sampler.choose(logits, rows).tokens, flat, number)
        sampler.append(rows, stays.num_accepted, stays.tokens)
        for place in range(2):
            kept = np.flatnonzero(stays.num_accepted > place)
            made[slots[kept], count[slots[kept]] + place] = drafts[kept, place]
        made[slots, count[slots] + stays.num_accepted] = stays.tokens
        count[slots] += stays.num_accepted + 1
    return made[:, :LENGTH]


def distance(found: Int32Array) -> float:
    """Chi-square of the 64 possible answers against their probabilities, counted by hand."""
    chi = 0.0
    for answer in itertools.product(range(VOCAB), repeat=LENGTH):
        probability, last = 1.0, FIRST
        for place, token in enumerate(answer):
            outputs = answer[:place]
            weights = [
                math.exp((value - PRESENCE * (t in outputs) - FREQUENCY * outputs.count(t)) / HEAT)
                for t, value in enumerate(TABLE[last].tolist())
            ]
            probability *= weights[token] / sum(weights)
            last = token
        expected = REQUESTS * probability
        chi += ((found == answer).all(axis=1).sum() - expected) ** 2 / expected
    return chi


MOST = 115.0  # 63 degrees of freedom, p < 1e-4


def test_chi_square_of_answers_with_drafts() -> None:
    sampler = sampler_of(1)
    accepted = []

    def counted(choices: Int32Array, drafts: Int32Array, number: npt.NDArray[np.int64]) -> Verified:
        stays = verify(choices, drafts, number)
        accepted.append(stays.num_accepted)
        return stays

    assert distance(answers(sampler, counted)) < MOST
    numbers = np.bincount(np.concatenate(accepted), minlength=3)
    assert (numbers > REQUESTS / 50).all()  # none, one and two drafts stay often enough to tell


def test_the_chi_square_sees_wrong_residuals() -> None:
    """Two classical mistakes: behind a rejected draft the token is drawn from the target's whole
    distribution once more, draft included; and the draft is taken a little too often."""
    others = np.random.default_rng(0)

    def drawn_again(
        choices: Int32Array, drafts: Int32Array, number: npt.NDArray[np.int64]
    ) -> Verified:
        stays = verify(choices, drafts, number)
        if not len(drafts):
            return stays
        first = np.concatenate([[0], np.cumsum(number + 1)[:-1]])
        starts = np.concatenate([[0], np.cumsum(number)[:-1]])
        rejected = np.flatnonzero((number > 0) & (stays.num_accepted == 0))
        mine = drafts[starts[rejected]]
        # Of the requests that chose something else, those whose second draw were the draft.
        share = (choices[first[number > 0]] == drafts[starts[number > 0]]).mean()
        again = others.random(len(rejected)) < share
        stays.tokens[rejected[again]] = mine[again]
        return stays

    assert distance(answers(sampler_of(1), drawn_again)) > 5 * MOST

    def taken_too_often(
        choices: Int32Array, drafts: Int32Array, number: npt.NDArray[np.int64]
    ) -> Verified:
        judging = np.ones(len(choices), dtype=bool)
        judging[np.cumsum(number + 1) - 1] = False
        choices = choices.copy()
        at = np.flatnonzero(judging)
        taken = others.random(len(at)) < 0.05
        choices[at[taken]] = drafts[taken]
        return verify(choices, drafts, number)

    assert distance(answers(sampler_of(1), taken_too_often)) > MOST
