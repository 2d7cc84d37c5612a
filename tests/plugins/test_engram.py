"""Engram layouts and row ids against published numbers and a big-integer oracle; the gate."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.engram import EngramLayout, engram_gate, engram_layout, engram_rows
from plugins.engram.cases import HASH_CASES, INJECT_CASES, HashCase, InjectCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2**-7}

RELEASED = engram_layout(
    [1, 14], max_ngram_size=4, n_heads=8, vocab_size=16_000_000, compressed_vocab_size=99_092
)
TINY = engram_layout([1, 4], max_ngram_size=4, n_heads=2, vocab_size=101, compressed_vocab_size=256)


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def test_released_multipliers_and_table_sizes() -> None:
    assert RELEASED[1].multipliers.tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert RELEASED[14].multipliers.tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]
    assert [RELEASED[layer].num_rows for layer in (1, 14)] == [384006168, 384016682]
    ends = [(RELEASED[layer].primes[0], RELEASED[layer].primes[-1]) for layer in (1, 14)]
    assert ends == [(16000057, 16000463), (16000477, 16000889)]


def test_tiny_layout() -> None:
    assert TINY[1].primes.tolist() == [101, 103, 107, 109, 113, 127]
    assert TINY[4].primes.tolist() == [131, 137, 139, 149, 151, 157]
    assert TINY[1].offsets.tolist() == [0, 101, 204, 311, 420, 533]
    assert [TINY[layer].num_rows for layer in (1, 4)] == [660, 864]
    assert TINY[1].multipliers.tolist() == [
        29662608052400909,
        1873410163432121,
        13919202536988139,
        28638879857136817,
    ]
    assert TINY[4].multipliers.tolist() == [
        31841131192811251,
        1950019090429101,
        28509641033320619,
        7337012813361983,
    ]


@pytest.mark.parametrize("start", [0, 3, 24_990])
def test_the_prime_search_misses_none(start: int) -> None:
    """Over several segments of its sieve; from 3 on, one begins at the prime 32771."""
    layout = engram_layout(
        [3], max_ngram_size=4, n_heads=2000, vocab_size=start, compressed_vocab_size=256
    )[3]
    expected, n = [], start
    while len(expected) < 6000:
        if is_prime(n):
            expected.append(n)
        n += 1
    assert layout.primes.tolist() == expected


def test_released_primes_are_consecutive() -> None:
    primes = np.concatenate([RELEASED[1].primes, RELEASED[14].primes]).tolist()
    assert primes == [n for n in range(16_000_000, primes[-1] + 1) if is_prime(n)]


def test_the_layout_is_fast() -> None:
    start = time.perf_counter()
    engram_layout(
        [1, 14], max_ngram_size=4, n_heads=8, vocab_size=16_000_000, compressed_vocab_size=99_092
    )
    assert time.perf_counter() - start < 0.5


RELEASED_ROWS = {
    (1, 0): [10901611, 27678486, 35451145, 52207838, 77928373, 83457983, 102652193, 126724473],
    (1, 1): [
        134977998,
        159653774,
        164146791,
        188607916,
        207614220,
        220982320,
        229865345,
        247893686,
    ],
    (1, 2): [
        270535205,
        273203102,
        298049212,
        311438555,
        326056134,
        340519127,
        361741990,
        371671110,
    ],
    (14, 0): [6647556, 18679250, 44900111, 63703437, 73501924, 91201981, 100192886, 120724185],
    (14, 2): [
        270405286,
        280336306,
        302426166,
        308312266,
        324312874,
        337186291,
        367863848,
        378234402,
    ],
}


@pytest.mark.parametrize(("layer", "ngram"), RELEASED_ROWS)
def test_released_row_ids_of_three_classes(layer: int, ngram: int) -> None:
    """Classes 100, 2000, 30000, the query at the third, pad class 2."""
    rows = engram_rows(
        torch.tensor([100, 2000, 30000]),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([0, 3]),
        torch.full((1, 3), -1),
        torch.arange(99_092),
        RELEASED[layer],
        pad_class=2,
    )
    assert rows[2].view(3, 8)[ngram].tolist() == RELEASED_ROWS[layer, ngram]


def tiny_rows(tokens: list[int], history: list[int], layer: int) -> list[list[int]]:
    return engram_rows(
        torch.tensor(tokens),
        torch.zeros(len(tokens), dtype=torch.int64),
        torch.tensor([0, len(tokens)]),
        torch.tensor([history]),
        torch.arange(512) // 2,
        TINY[layer],
        pad_class=1,
    ).tolist()


def test_tiny_row_ids() -> None:
    tokens = [5, 17, 300, 300, 2, 499]
    expected = [
        [41, 120, 225, 371, 423, 606],
        [66, 111, 268, 380, 492, 546],
        [38, 138, 212, 385, 519, 634],
        [93, 179, 254, 368, 429, 659],
        [65, 139, 290, 360, 433, 628],
        [72, 183, 242, 346, 495, 536],
    ]
    assert tiny_rows(tokens, [-1, -1, -1], 1) == expected
    assert tiny_rows(tokens, [-1, -1, -1], 4)[-1] == [95, 162, 305, 413, 576, 783]
    # The same rows when the sequence is continued after one, two and four tokens.
    assert tiny_rows(tokens[1:], [-1, -1, 5], 1) == expected[1:]
    assert tiny_rows(tokens[2:], [-1, 5, 17], 1) == expected[2:]
    assert tiny_rows(tokens[4:], [17, 300, 300], 1) == expected[4:]


def oracle_rows(stream: list[int], p: int, layout: EngramLayout, dead: int | None) -> list[int]:
    """Position p of a whole sequence, in Python integers; classes are id // 2, pad class 1."""
    classes, usable = [], True
    for s in range(4):
        usable = usable and p - s >= 0 and stream[p - s] != dead
        classes.append(stream[p - s] // 2 if usable else 1)
    multipliers, primes = layout.multipliers.tolist(), layout.primes.tolist()
    result, base, h = [], 0, classes[0] * multipliers[0]
    heads = len(primes) // 3
    for n in range(1, 4):
        h ^= classes[n] * multipliers[n]
        for head in range(heads):
            prime = primes[(n - 1) * heads + head]
            result.append(h % prime + base)
            base += prime
    return result


def check_rows(case: HashCase, seed: int = 0) -> None:
    for layout in (TINY[1], TINY[4], RELEASED[14]):
        rows = engram_rows(layout=layout, **case.operands(seed)).tolist()
        expected = [
            oracle_rows(stream.tolist(), before + i, layout, case.dead_token_id)
            for stream, before, count in zip(
                case.streams(seed), case.before, case.rows, strict=True
            )
            for i in range(count)
        ]
        assert rows == expected


@pytest.mark.parametrize("case", HASH_CASES, ids=lambda case: case.name)
def test_row_ids_match_big_integers(case: HashCase) -> None:
    check_rows(case)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5),
    st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=40)
def test_row_ids_of_ragged_batches(requests: list[tuple[int, int]], seed: int) -> None:
    rows, before = zip(*requests, strict=True)
    check_rows(HashCase("ragged", rows, before, dead_token_id=77, dead=0.2), seed)


def test_row_ids_depend_on_three_previous_tokens_only() -> None:
    tokens = torch.randint(512, (40,), generator=torch.Generator().manual_seed(9)).tolist()
    changed = [*tokens[:20], (tokens[20] + 2) % 512, *tokens[21:]]
    before, after = (tiny_rows(t, [-1, -1, -1], 1) for t in (tokens, changed))
    differing = [p for p in range(40) if before[p] != after[p]]
    assert differing == [20, 21, 22, 23]


def test_the_largest_class_does_not_overflow() -> None:
    for layout in RELEASED.values():
        assert max(layout.multipliers.tolist()) * 99_091 < 2**63


@pytest.mark.parametrize("case", INJECT_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_matches_the_per_stream_oracle(case: InjectCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    result = engram_gate(**operands)
    assert result.dtype == dtype
    X, K, V, qw, kw = (
        operands[name].double().numpy()
        for name in ("streams", "keys", "value", "q_weight", "k_weight")
    )
    for t in range(case.rows):
        alive = operands["alive"] is None or bool(operands["alive"][t])
        for s in range(case.streams):
            x, k = X[t, s], K[t, s]
            norm = math.sqrt(np.mean(x**2) + 1e-20) * math.sqrt(np.mean(k**2) + 1e-20)
            score = float(np.sum(x * qw[s] * k * kw[s])) / norm / math.sqrt(case.width)
            root = math.copysign(math.sqrt(max(abs(score), 1e-6)), score) if score else 0.0
            gate = 1.0 / (1.0 + math.exp(-root)) if alive else 0.0
            expected = x + gate * V[t]
            scale = max(1.0, np.abs(expected).max())
            np.testing.assert_allclose(
                result[t, s].double().numpy(), expected, rtol=0, atol=TOLERANCE[dtype] * scale * 4
            )


@pytest.mark.parametrize(("weight", "root"), [(1e-8, 1e-3), (-1e-8, -1e-3), (0.0, 0.0), (4.0, 2.0)])
def test_hand_computed_gate(weight: float, root: float) -> None:
    """One channel, stream and key 1: the score is the weight, its root is kept off zero."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    result = engram_gate(one, one, one[0], weight * one[0], one[0], None, norm_eps=1e-20)
    assert result.item() == pytest.approx(1.0 + 1.0 / (1.0 + math.exp(-root)), abs=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_value_and_dead_rows_leave_the_streams(dtype: torch.dtype) -> None:
    operands = InjectCase("identity", 6, 4, 32).operands(dtype)
    streams = operands["streams"]
    no_value = {**operands, "value": torch.zeros_like(operands["value"])}
    assert torch.equal(engram_gate(**no_value), streams)
    alive = torch.tensor([True, False, True, False, False, True])
    result = engram_gate(**{**operands, "alive": alive})
    assert torch.equal(result[~alive], streams[~alive])
    assert torch.equal(result[alive], engram_gate(**operands)[alive])


@pytest.mark.parametrize("rows", [1, 2, 17])
def test_a_row_does_not_depend_on_the_batch(rows: int) -> None:
    operands = InjectCase("batch", 41, 4, 130).operands(torch.float32)
    whole = engram_gate(**operands)
    for start in range(41):
        part = slice(start, start + rows)
        alone = {name: operands[name][part].clone() for name in ("streams", "keys", "value")}
        assert torch.equal(engram_gate(**{**operands, **alone}), whole[part])


def test_gradients() -> None:
    operands = InjectCase("gradient", 2, 2, 5, dead=0.3).operands(torch.float64)
    names = ("streams", "keys", "value", "q_weight", "k_weight")
    inputs = [operands.pop(name).requires_grad_() for name in names]

    def run(*args):
        return engram_gate(*args, **operands)

    assert torch.autograd.gradcheck(run, inputs)
