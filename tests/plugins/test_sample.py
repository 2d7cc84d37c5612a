"""Sampling: known random numbers, exact support sets, the distribution, independence."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.sample import sample, uniform
from plugins.sample.cases import CASES, SampleCase
from plugins.sample.philox import philox_4x32_10


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known-answer tests published with the generator
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox_4x32_10(
        tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key)
    )
    assert tuple(w.item() for w in words) == expected


def test_uniform_is_open_and_uses_all_64_bits_of_the_seed() -> None:
    seeds = torch.tensor([0, 1, -1, 1 << 32, (1 << 62) + 1, -(1 << 63)])
    u = uniform(seeds, torch.zeros_like(seeds))
    assert len(set(u.tolist())) == 6
    # Seed 0, index 0: the first two words of the published zero vector.
    assert u[0].item() == ((0x6627E8D5 << 20 | 0xE169C58D >> 12) + 0.5) / 2**52
    many = uniform(torch.full((100_000,), 9), torch.arange(100_000))
    assert many.min() > 0
    assert many.max() < 1
    counts = np.histogram(many.numpy(), bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 94.0  # chi-square, 49 degrees, p = 1e-4


def draws(
    logits: list[float], n: int, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> np.ndarray:
    rows = torch.tensor(logits, dtype=torch.float64).expand(n, -1)
    tokens = sample(
        rows,
        torch.full((n,), temperature, dtype=torch.float64),
        torch.full((n,), top_k),
        torch.full((n,), top_p, dtype=torch.float64),
        torch.full((n,), min_p, dtype=torch.float64),
        torch.full((n,), 1234),
        torch.arange(n),
    )
    return np.bincount(tokens.numpy(), minlength=len(logits))


def oracle(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> list[float]:
    """Exact kept distribution, by sorting and adding in Python."""
    peak = max(logits)
    weight = [math.exp((v - peak) / temperature) for v in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if weight[i] >= min_p]  # the largest weight is 1
    if top_k:
        order = order[:top_k]
    total = math.fsum(weight[i] for i in order)
    if top_p < 1:
        mass, kept = 0.0, []
        for i in order:
            kept.append(i)
            mass += weight[i]
            if mass >= top_p * total:
                break
        order = kept
    total = math.fsum(weight[i] for i in order)
    return [weight[i] / total if i in order else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 5, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.5, 6, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (2.0, 7, 0.9, 0.3),
    ],
)
def test_draws_follow_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = [1.0, -0.5, 2.0, 0.25, 0.25, -3.0, 1.5, -math.inf, 0.0, 0.9]
    n = 40_000
    observed = draws(logits, n, temperature, top_k, top_p, min_p)
    expected = n * np.array(oracle(logits, temperature, top_k, top_p, min_p))
    assert (observed[expected == 0] == 0).all()
    support = expected > 0
    chi = ((observed - expected)[support] ** 2 / expected[support]).sum()
    assert chi < 34.0  # at most 9 degrees of freedom, p < 1e-4


@settings(deadline=None, max_examples=60)
@given(
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=8),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.0, 0.1, 0.33, 0.5, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
)
def test_support_equals_a_brute_force_selection(
    logits: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    """Small integers make ties common; every kept token has at least 0.2 percent of the mass."""
    values = [0.5 * v for v in logits]
    expected = oracle(values, 1.0, top_k, top_p, min_p)
    observed = draws(values, 6000, 1.0, top_k, top_p, min_p)
    assert {i for i, p in enumerate(expected) if p > 0} == set(np.flatnonzero(observed).tolist())


def test_limits_at_their_edges() -> None:
    logits = [0.0, 0.0, 0.0, 0.0]
    assert set(np.flatnonzero(draws(logits, 500, 1.0, 2, 1.0))) == {0, 1}
    assert set(np.flatnonzero(draws(logits, 500, 1.0, 0, 0.5))) == {0, 1}  # exactly half is enough
    assert set(np.flatnonzero(draws(logits, 500, 1.0, 0, 0.51))) == {0, 1, 2}
    assert set(np.flatnonzero(draws(logits, 500, 1.0, 0, 0.0))) == {0}
    # After top-k 2 the mass is renormalised, so 0.4 of it is one token.
    assert set(np.flatnonzero(draws(logits, 500, 1.0, 2, 0.4))) == {0}


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.zeros(3, 2000)
    logits[0, [700, 1500]] = 1.0
    logits[1] = 5.0
    logits[2, 1999] = 0.5
    off = torch.zeros(3)
    got = sample(logits, off, off.long(), off + 1, off, off.long(), off.long())
    assert got.tolist() == [700, 0, 1999]
    assert got.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_case_yields_an_allowed_token(case: SampleCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    tokens = sample(**operands)
    assert tokens.shape == (case.rows,)
    for row, token in zip(operands["logits"].double().tolist(), tokens.tolist(), strict=True):
        if case.temperature == 0:
            assert token == row.index(max(row))
        else:
            top_p = operands["top_p"][0].item()
            min_p = operands["min_p"][0].item()
            assert oracle(row, case.temperature, case.top_k, top_p, min_p)[token] > 0


@pytest.mark.parametrize("vocab", [1, 7, 513, 4099])
def test_a_row_does_not_depend_on_the_batch(vocab: int) -> None:
    draw = torch.Generator().manual_seed(8)
    rows = 24
    operands = (
        torch.randn(rows, vocab, generator=draw),
        torch.tensor([0.0, 0.3, 1.0, 2.0]).repeat(6),
        torch.tensor([0, 0, 5]).repeat(8),
        torch.tensor([1.0, 0.9, 1.0, 0.5, 1.0, 1.0]).repeat(4),
        torch.tensor([0.0, 0.0, 0.1, 0.0]).repeat(6),
        torch.randint(-(2**62), 2**62, (rows,), generator=draw),
        torch.randint(0, 1 << 20, (rows,), generator=draw),
    )
    alone = torch.cat([sample(*(o[i : i + 1] for o in operands)) for i in range(rows)])
    assert torch.equal(sample(*operands), alone)
    for size in (2, 5, 13):
        order = torch.randperm(rows, generator=draw)[:size]
        assert torch.equal(sample(*(o[order] for o in operands)), alone[order])


def test_the_same_seed_and_index_repeat_and_others_differ() -> None:
    n = 64
    logits = torch.zeros(n, 1 << 16)
    one, off = torch.ones(n), torch.zeros(n, dtype=torch.int64)
    first = sample(logits, one, off, one, one - 1, off + 5, torch.arange(n))
    assert torch.equal(first, sample(logits, one, off, one, one - 1, off + 5, torch.arange(n)))
    assert len(set(first.tolist())) > 60
    other = sample(logits, one, off, one, one - 1, off + 6, torch.arange(n))
    assert (other == first).sum() <= 2
