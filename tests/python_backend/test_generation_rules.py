"""Sampling rules against a float64 oracle in plain Python, the distribution, seeds, drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Choice, Sampler
from python_backend.request import Delta, Request, SamplingParams

VOCAB = 12
END = 1


def ignore(delta: Delta) -> None:
    del delta


def request(prompt: Sequence[int], ends: Sequence[int] = (END,), **options: Any) -> Request:
    return Request(
        request_id="r",
        input_ids=np.array(prompt, dtype=np.int32),
        max_tokens=100,
        sampling=SamplingParams(**options),
        end_ids=frozenset(ends),
        on_delta=ignore,
    )


def changed(logits: list[float], asked: Request, outputs: Sequence[int]) -> list[float]:
    """The oracle: the rules of one row, token by token."""
    sampling, prompt = asked.sampling, asked.input_ids.tolist()
    bias = dict(sampling.logit_bias)
    new = []
    for token, value in enumerate(logits):
        if token in prompt or token in outputs:
            r = sampling.repetition_penalty
            value = value / r if value > 0 else value * r
        number = list(outputs).count(token)
        value -= sampling.frequency_penalty * number + sampling.presence_penalty * (number > 0)
        value += bias.get(token, 0.0)
        if len(outputs) < sampling.min_tokens and token in asked.end_ids:
            value = -math.inf
        for word in sampling.bad_words:
            before = list(word[:-1])
            if token == word[-1] and list(outputs)[len(outputs) - len(before) :] == before:
                value = -math.inf
        new.append(value)
    return new


def begun(requests: Sequence[Request], outputs: Sequence[Sequence[int]]) -> Sampler:
    sampler = Sampler(len(requests), VOCAB)
    for slot, (asked, made) in enumerate(zip(requests, outputs, strict=True)):
        tokens = np.concatenate([asked.input_ids, np.array(made, dtype=np.int32)])
        sampler.begin(slot, asked, tokens.astype(np.int32))
    return sampler


def rows_of(
    slots: Sequence[int], index: Sequence[int], drafts: Sequence[Sequence[int]] | None = None
) -> LogitRows:
    drafts = drafts or [()] * len(slots)
    return LogitRows.of_step(
        np.array(slots, dtype=np.int64),
        np.array(index, dtype=np.int64),
        np.array([t for d in drafts for t in d], dtype=np.int32),
        np.array([len(d) for d in drafts], dtype=np.int64),
    )


def choose(sampler: Sampler, logits: torch.Tensor, rows: LogitRows) -> Choice:
    before = logits.clone()
    choice = sampler.choose(logits, rows)
    assert torch.equal(logits, before)
    return choice


tokens = st.integers(0, VOCAB - 1)
options = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-0.75, 0.6]),
        "frequency_penalty": st.sampled_from([-0.3, 0.45]),
        "logit_bias": st.lists(
            st.tuples(tokens, st.sampled_from([-3.0, 1.5])), max_size=3, unique_by=lambda b: b[0]
        ).map(tuple),
        "bad_words": st.lists(
            st.lists(tokens, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
        ).map(tuple),
        "min_tokens": st.integers(0, 6),
    },
)


@settings(deadline=None, max_examples=150)
@given(
    asked=st.lists(
        st.tuples(options, st.lists(tokens, min_size=1, max_size=5), st.lists(tokens, max_size=5)),
        min_size=1,
        max_size=5,
    ),
    more=st.lists(tokens, min_size=15, max_size=15),
    seed=st.integers(0, 1 << 30),
)
def test_greedy_choices_follow_the_rules_also_behind_drafts(
    asked: list[Any], more: list[int], seed: int
) -> None:
    """Every row of a batch, behind 0 … 3 drafts, and again after some of them became output."""
    requests = [request(prompt, **given) for given, prompt, _ in asked]
    outputs = [list(made) for _, _, made in asked]
    drafts = [more[3 * i : 3 * i + i % 4] for i in range(len(asked))]
    sampler = begun(requests, outputs)
    draw = torch.Generator().manual_seed(seed)
    slots = list(range(len(asked)))
    for _ in range(2):
        rows = rows_of(slots, [len(o) for o in outputs], drafts)
        logits = 2 * torch.randn(len(rows.slots), VOCAB, generator=draw, dtype=torch.float64)
        found = choose(sampler, logits, rows).tokens.tolist()
        for row, token in enumerate(found):
            slot, behind = int(rows.slots[row]), int(rows.behind[row])
            expected = changed(
                logits[row].tolist(), requests[slot], outputs[slot] + drafts[slot][:behind]
            )
            if max(expected) == -math.inf:
                continue
            assert expected[token] == pytest.approx(max(expected), abs=1e-12)
        kept = [[*d[: (slot + 1) % 3], 3] for slot, d in zip(slots, drafts, strict=True)]
        outputs = [made + new for made, new in zip(outputs, kept, strict=True)]
        accepted = np.array([len(new) - 1 for new in kept])
        sampler.append(rows, accepted, np.full(len(asked), 3, dtype=np.int32))


@pytest.mark.parametrize("given", [{}, {"min_p": 0.05}, {"top_p": 0.92, "top_k": 8, "min_p": 0.02}])
def test_chi_square_over_output_indices(given: dict[str, Any]) -> None:
    asked = request(
        [2, 3, 3], ends=(), temperature=0.8, seed=77, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((4, 0.7), (9, -1.0)),
        bad_words=((5, 6),), **given,
    )  # fmt: skip
    outputs = [2, 7, 7, 5]
    logits = torch.tensor([1.0, 3.0, 0.5, 2.0, 0.1, -1.0, 2.5, 1.4, 0.0, 1.9, 0.9, -4.0])
    values = changed(logits.double().tolist(), asked, outputs)
    weight = np.array([math.exp((v - max(values)) / 0.8) for v in values])
    order = sorted(range(VOCAB), key=lambda i: (-values[i], i))
    order = [i for i in order if weight[i] >= given.get("min_p", 0.0)][: given.get("top_k", 99)]
    mass = np.cumsum(weight[order])
    order = order[: int(np.searchsorted(mass, given.get("top_p", 1.0) * mass[-1])) + 1]
    n = 30_000
    expected = np.zeros(VOCAB)
    expected[order] = n * weight[order] / weight[order].sum()
    sampler = begun([asked], [outputs])
    zeros = np.zeros(n, dtype=np.int64)
    rows = LogitRows(zeros, np.arange(n), zeros, np.zeros((n, 0), dtype=np.int32))
    observed = np.bincount(
        choose(sampler, logits.expand(n, -1).contiguous(), rows).tokens, minlength=VOCAB
    )
    assert observed[6] == 0  # 5 6 is a bad word
    support = expected > 0
    assert (observed[~support] == 0).all()
    chi = ((observed - expected)[support] ** 2 / expected[support]).sum()
    assert chi < 37.0  # at most 11 degrees of freedom, p < 1e-4


def test_equal_seeds_agree_whatever_the_slot_and_the_batch() -> None:
    """The bug of the TensorRT-LLM backend (468, 237): a seed that belonged to the slot."""
    draw = torch.Generator().manual_seed(5)
    row = torch.randn(1, VOCAB, generator=draw)
    mine = request([4, 5], temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=8)
    answers = []
    for slot, size in ((0, 1), (3, 7), (6, 7), (2, 5)):
        others = [request([2], temperature=1.3, seed=90 + i) for i in range(size)]
        others[slot] = mine
        sampler = begun(others, [[]] * size)
        logits = torch.randn(size, VOCAB, generator=draw)
        logits[slot] = row
        answers.append(
            [
                int(choose(sampler, logits, rows_of(range(size), [i] * size)).tokens[slot])
                for i in range(12)
            ]
        )
    assert answers.count(answers[0]) == 4
    assert len(set(answers[0])) > 1


def test_seeds_one_to_eight_differ() -> None:
    asked = [request([4], temperature=1.0, seed=seed) for seed in range(1, 9)]
    sampler = begun(asked, [[]] * 8)
    logits = torch.zeros(8, VOCAB)
    found = [choose(sampler, logits, rows_of(range(8), [i] * 8)).tokens for i in range(6)]
    assert len({tuple(column) for column in np.array(found).T.tolist()}) == 8


def test_log_probs_are_those_of_the_model_before_any_rule() -> None:
    asked = [
        request([2], logprobs=2, logit_bias=((3, 50.0),)),
        request([2]),
        request([2], logprobs=0, temperature=1.0, seed=1),
    ]
    sampler = begun(asked, [[]] * 3)
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5] + [-9.0] * 8).expand(5, -1).contiguous()
    rows = rows_of([0, 1, 2], [0, 0, 0], [[3, 3], [], []])
    choice = choose(sampler, logits, rows)
    total = math.log(1 + math.e + math.e**2 + math.exp(0.5) + 8 * math.exp(-9))
    assert set(choice.logprobs) == {0, 2}
    first = choice.logprobs[0]
    assert choice.tokens[:3].tolist() == [3, 3, 3]
    assert first.chosen == pytest.approx([0.5 - total] * 3, abs=1e-6)
    assert first.top_ids.tolist() == [[2, 1]] * 3
    assert first.top[0] == pytest.approx([2 - total, 1 - total], abs=1e-6)
    assert choice.logprobs[2].top.shape == (1, 0)
    token = int(choice.tokens[4])
    assert choice.logprobs[2].chosen[0] == pytest.approx(float(logits[0, token]) - total, abs=1e-6)


def test_a_slot_forgets_its_last_request() -> None:
    strict = request(
        [2, 3], repetition_penalty=9.0, logit_bias=((4, 99.0),), bad_words=((5,),), min_tokens=9
    )
    sampler = begun([strict], [[7]])
    plain = request([2, 3])
    sampler.begin(0, plain, plain.input_ids)
    for best in range(VOCAB):
        logits = torch.zeros(1, VOCAB)
        logits[0, best] = 5.0
        assert choose(sampler, logits, rows_of([0], [0])).tokens.tolist() == [best]
