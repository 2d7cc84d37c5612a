"""The sampling kernel: where each draw falls in the exact distribution that the limits leave."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_oracle import DEVICE, load_kernel, moved

from plugins.sample import uniform
from plugins.sample.cases import CASES, SampleCase

kernel = load_kernel("sample")

# Weights are float32 exponentials: of many tokens, top-p may keep one more or less.
SLACK = 3e-6


def kept(row: list[float], heat: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The tokens that may be drawn, in the order in which the draw walks them."""
    peak = max(row)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    order = [i for i in order if math.exp((row[i] - peak) / heat) >= min_p * (1 - 1e-12)]
    order = order[:top_k] if top_k else order
    if top_p < 1:
        total = math.fsum(math.exp((row[i] - peak) / heat) for i in order)
        mass, first = 0.0, order
        order = []
        for i in first:
            order.append(i)
            mass += math.exp((row[i] - peak) / heat)
            if mass >= top_p * total:
                break
    return order if top_k or top_p < 1 else sorted(order)


def check(operands: dict, tokens: torch.Tensor) -> None:
    u = uniform(operands["seed"], operands["output_index"]).tolist()
    settings = [operands[n].tolist() for n in ("temperature", "top_k", "top_p", "min_p")]
    rows = operands["logits"].double().tolist()
    assert tokens.dtype == torch.int64
    for t, (row, *setting) in enumerate(zip(rows, *settings, strict=True)):
        token, heat = int(tokens[t]), setting[0]
        if heat == 0:
            assert token == row.index(max(row)), t
            continue
        order = kept(row, *setting)
        peak = max(row)
        weights = [math.exp((row[i] - peak) / heat) for i in order]
        place = order.index(token)
        below, total = math.fsum(weights[:place]), math.fsum(weights)
        slack = SLACK * total + (min(weights) if len(row) > 10_000 else 0.0)
        assert below - slack <= u[t] * total, t
        assert u[t] * total <= below + weights[place] + slack, t


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_draw_falls_into_its_share(case: SampleCase) -> None:
    operands = {name: x[:2] for name, x in case.operands(torch.float32).items()}
    check(operands, kernel.sample(**moved(operands)))


@pytest.mark.parametrize("case", [CASES[4], CASES[6], CASES[8]], ids=lambda c: c.name)
def test_bfloat16_logits(case: SampleCase) -> None:
    operands = {name: x[2:3] for name, x in case.operands(torch.bfloat16).items()}
    check(operands, kernel.sample(**moved(operands)))


def mixed(rows: int, vocab: int, seed: int) -> dict[str, torch.Tensor]:
    """Every row has settings of its own; a quarter of the logits are equal, a few forbidden."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(rows, vocab, generator=draw)
    logits = torch.where(torch.rand(rows, vocab, generator=draw) < 0.25, 0.5, logits)
    logits[:, ::7] = -math.inf
    logits[:, 1] = torch.where(torch.arange(rows) % 2 == 0, -0.0, 0.0)
    return {
        "logits": logits,
        "temperature": torch.tensor([0.8, 0.0, 1.5, 30.0, 0.05, 1.0])[torch.arange(rows) % 6],
        "top_k": torch.tensor([0, 7, 3, 0, 40])[torch.arange(rows) % 5],
        "top_p": torch.tensor([0.9, 1.0, 0.3, 0.999])[torch.arange(rows) % 4],
        "min_p": torch.tensor([0.0, 0.0, 0.02])[torch.arange(rows) % 3],
        "seed": torch.randint(-(2**62), 2**62, (rows,), generator=draw),
        "output_index": torch.randint(0, 2**40, (rows,), generator=draw),
    }


def test_rows_of_several_tiles_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_CHUNK", 32), ("_GROUP", 4), ("_TILE", 32), ("_PAIRS", 16)):
        monkeypatch.setattr(kernel, name, size)
    operands = mixed(7, 70, 0)
    on_device = moved(operands)
    tokens = kernel.sample(**on_device)
    check(operands, tokens)
    some = torch.tensor([5, 1], device=DEVICE)
    alone = {name: x[some] for name, x in on_device.items()}
    wide = on_device["logits"].new_full((2, 140), math.inf)
    wide[:, ::2] = alone["logits"]
    assert torch.equal(kernel.sample(**{**alone, "logits": wide[:, ::2]}), tokens[some])


def test_intervals_that_miss_the_cut_or_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one bound a piece the estimate is poor: the whole row is listed then."""
    for name, size in (("_CHUNK", 64), ("_GROUP", 8), ("_LEVELS", 1), ("_FEW", 1), ("_PAIRS", 16)):
        monkeypatch.setattr(kernel, name, size)
    draw = torch.Generator().manual_seed(5)
    operands = mixed(8, 500, 1)
    operands["logits"] = 2.0 * torch.randn(8, 500, generator=draw)
    operands["temperature"] = torch.tensor([0.5, 1.0, 2.0, 40.0]).repeat(2)
    operands["top_k"] = torch.zeros(8, dtype=torch.int64)
    operands["top_p"] = torch.tensor([0.9, 0.5, 0.99, 0.95]).repeat(2)
    check(operands, kernel.sample(**moved(operands)))


def test_intervals_hold_the_cut_and_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of normal logits: where in a row the draw falls, near its best tokens too, and however flat
    it is. A row whose interval misses costs several times as much as any other."""
    states = []

    class Draw:
        def __getitem__(self, _grid: tuple) -> Callable[..., None]:
            return lambda *args, **_options: states.append(args[8].cpu().double())

    monkeypatch.setattr(kernel, "draw", Draw())
    rows, vocab, p = 18, 16_384, 0.95
    logits = 2.5 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(0))
    operands = {
        "logits": logits.repeat(rows, 1),
        "temperature": torch.tensor([0.8, 2.0, 50.0]).repeat_interleave(6),
        "top_k": torch.zeros(rows, dtype=torch.int64),
        "top_p": torch.full((rows,), p),
        "min_p": torch.zeros(rows),
        "seed": torch.tensor([36, 39, 14, 8, 3, 45]).repeat(3),
        "output_index": torch.zeros(rows, dtype=torch.int64),
    }
    kernel.sample(**moved(operands))
    (state,) = states
    u = uniform(operands["seed"], operands["output_index"])
    for t in range(rows):
        row = operands["logits"][t].double()
        weight = ((row - row.max()) / operands["temperature"][t].double()).exp()
        total = weight.sum()
        cut, draw = (1 - p) * total, (1 - u[t] * p) * total
        for at, mass in ((3, cut), (5, draw)):
            assert weight[row < state[t, at]].sum() <= mass, (t, at)
            assert weight[row < state[t, at + 1]].sum() >= mass, (t, at)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="slow where it is interpreted")
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_a_released_vocabulary(seed: int) -> None:
    operands = mixed(20, 129_280, seed)
    check(operands, kernel.sample(**moved(operands)))


def test_float64_runs_the_reference() -> None:
    operands = moved(CASES[4].operands(torch.float64))
    check({n: x.cpu() for n, x in operands.items()}, kernel.sample(**operands))
