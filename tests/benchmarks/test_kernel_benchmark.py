"""The kernel benchmarks' cases and their table; nothing is timed here."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

from plugins.mega_mhc import mega_mhc

KERNELS = Path(__file__).parents[2] / "benchmarks" / "kernels"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """The scripts import each other by their own names."""
    monkeypatch.syspath_prepend(str(KERNELS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (KERNELS / f"{name}.py").exists():
            del sys.modules[name]


def row(harness: ModuleType, peers=None, num_bytes: float = 1e6, calls: int = 2):
    ours = [lambda i=i: i for i in range(calls)]
    return harness.Row("op", "case", num_bytes, 0.0, ours, lambda: 0.0, 0.0, 3, None, peers or {})


def test_a_row_is_cold_where_its_inputs_are_twice_the_cache(load) -> None:
    harness = load("harness")
    assert [row(harness, num_bytes=1e6, calls=n).state for n in (119, 120)] == ["L2", "cold"]
    one = row(harness, num_bytes=1e6)
    one.ours = one.ours[:1] * 200  # the same call again reads what it just read
    assert one.state == "L2"


def test_as_many_inputs_as_are_cold(load, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = load("harness")
    monkeypatch.setattr(harness, "DEVICE", "cuda")
    assert [harness.rotations(size) for size in (1e3, 1e6, 50e6, 1e9)] == [512, 120, 3, 1]


def test_a_peer_that_fails_costs_a_sentence(load, capsys: pytest.CaptureFixture[str]) -> None:
    harness = load("harness")

    def broken():
        raise RuntimeError("no kernel image\nand more")

    peers = {"broken": broken, "slow": lambda: ["slow"] * 2, "fast": lambda: ["fast"]}
    timed: list[str] = []

    def prepare(calls: list[str]):
        def once() -> dict[str, float]:
            timed.append(calls[0])
            return {"us": {"slow": 9.0, "fast": 3.0 + timed.count("fast")}[calls[0]]}

        return once

    assert harness._fastest(row(harness, peers), prepare) == ("fast", 4.5)
    assert timed == ["slow", "fast", "fast"]
    assert capsys.readouterr().err == "op case: broken does not run here: no kernel image\n"
    assert harness._fastest(row(harness, {"broken": broken}), prepare) is None


def test_a_dry_row_says_what_was_compared(load) -> None:
    harness = load("harness")
    result = harness.run(row(harness), harness.Ceilings(), dry=True)
    assert result == {"op": "op", "case": "case", "error": 0.0, "correct": True, "compared": 3}


def test_a_row_is_compared_in_poisoned_memory(load) -> None:
    harness = load("harness")
    given = row(harness)
    given.error = lambda: float(
        torch.empty(2).isnan().sum() + (torch.empty(3, dtype=torch.int64) == 2**63 - 1).sum()
    )
    assert harness.run(given, harness.Ceilings(), dry=True)["error"] == 5
    assert not torch.are_deterministic_algorithms_enabled()


def test_few_tokens_choose_as_many_experts_as_the_target_assumes(
    load, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = load("experts")
    monkeypatch.setattr(experts, "EXPERTS", 48)
    monkeypatch.setattr(experts, "TOP_K", 6)
    monkeypatch.setattr(experts, "HIT", {8: 30})
    ids = experts.choices(8)
    assert ids.shape == (8, 6)
    assert len(ids.unique()) == 30
    assert all(len(set(chosen)) == 6 for chosen in ids.tolist())
    assert experts.choices(64).shape == (64, 6)


def test_a_product_is_held_against_the_ceiling_of_its_operands(load) -> None:
    linear = load("linear")
    units = {stored.name: linear.operand_unit(stored) for stored in linear.PackedFormat}
    assert units == {
        "FP8_BLOCKS": "float8",
        "MXFP8": "float8",
        "FP4_ROWS": "float8",
        "NVFP4": "bf16",
    }


def test_slots_of_the_masked_experts(load, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products in float32 the peer's chain is the reference but for its two roundings."""
    monkeypatch.setattr(torch, "compile", lambda **kwargs: lambda function: function)
    peers = ModuleType("peers")

    def product(codes, step, weight, scale, used, expected, out) -> None:
        x = codes.float() * step.repeat_interleave(128, -1)
        for e, count in enumerate(used.tolist()):
            out[e, :count] = (x[e, :count] @ (weight[e] * scale[e]).T).bfloat16()

    peers.grouped_fp8_masked = product
    peers.quant_blocks = lambda w: (w.float(), torch.ones(()))
    experts, experts_peers = load("experts"), load("experts_peers")
    given: list[torch.Tensor] = []

    def inputs(*shape: int) -> torch.Tensor:
        given.append(torch.randn(*shape).bfloat16())
        return given[-1]

    monkeypatch.setattr(experts_peers, "inputs", inputs)
    torch.manual_seed(0)
    made = experts_peers.ExpertPeers(peers, experts.experts(4, experts.PackedFormat.FP4_ROWS))
    ids, share = torch.rand(9, 4).argsort(1)[:, :2], torch.full((9, 2), 0.5)
    ours = made.deep_gemm(ids, share)[0]()
    (up, _), (last, _) = made._fp8()
    x = next(one for one in given if one.shape == (9, 256)).float()
    expected = torch.zeros_like(x)
    for token in range(9):
        for expert in ids[token].tolist():
            gate, linear = (up[expert] @ x[token]).chunk(2)
            h = torch.nn.functional.silu(gate.clamp(max=10)) * linear.clamp(-10, 10)
            expected[token] += 0.5 * last[expert] @ h
    assert (ours.float() - expected).norm() / expected.norm() < 0.05


def test_four_pieces_are_the_operator(load, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the product in three parts, as DeepGEMM leaves it, on 128 channels."""
    monkeypatch.setattr(torch, "compile", lambda **kwargs: lambda function: function)
    peers = ModuleType("peers")
    peers.hc_splits = lambda rows: 3
    cuts = (0, 100, 300, 512)

    def hc_prenorm(x, fn, splits):
        parts = [(x[:, a:b].float(), fn[:, a:b]) for a, b in pairwise(cuts)]
        sums = torch.stack([part @ weight.T for part, weight in parts])
        return sums, torch.stack([part.square().sum(-1) for part, _ in parts])

    peers.hc_prenorm = hc_prenorm
    torch.manual_seed(0)
    given = {
        "streams": torch.randn(5, 4, 128).bfloat16(), "y": torch.randn(5, 128).bfloat16(),
        "post": 2 * torch.rand(5, 4), "comb": torch.randn(5, 4, 4).softmax(-2),
        "pre": torch.rand(5, 4), "fn": 0.05 * torch.randn(24, 512), "base": torch.randn(24),
        "scale": torch.rand(3), "norm": torch.rand(128).bfloat16() + 0.5,
    }  # fmt: skip
    streams, mix, u = load("hyper_peers").four_pieces(peers, [given])[0]()
    sizes = {"sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
    expected = mega_mhc(**given, **sizes)
    named = [(streams, expected[0]), (u, expected[2])]
    for ours, theirs in [*named, *zip(mix, expected[1], strict=True)]:
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs.double()).norm() / theirs.double().norm() < 5e-3


RECORDS = [
    {"device": "NVIDIA H200", "commit": "abc1234", "bytes_per_us": 4.2e6,
     "bf16_per_us": 790e6, "float8_per_us": 1490e6},
    {"op": "gate", "case": "1", "us": 5.0, "state": "cold", "spread": 0.0213, "floor_us": 1.0,
     "peer": "BLAS", "peer_us": 10.0, "target_us": 8.0, "correct": True, "compared": 1},
    {"op": "norm", "case": "64", "us": 2000.0, "state": "L2", "spread": 0.0, "floor_us": 1.0,
     "peer": None, "peer_us": None, "target_us": None, "correct": False, "compared": 16},
]  # fmt: skip


def test_the_table_by_hand(load) -> None:
    head, *rows = load("table").lines(RECORDS)
    assert "NVIDIA H200 at commit abc1234: 4.20 TB/s copied, 790 TFLOP/s" in head
    assert rows == [
        "| gate | 1 | cold | 5.0 | 2.1% | 1.00 | 0.20 | BLAS | 10.0 | 2.00 | 8.0 | 1.60 "
        "| yes (1) |",
        "| norm | 64 | L2 | 2,000.0 | 0.0% | 1.00 | 0.00 |  |  |  |  |  | no (16) |",
    ]
    columns = head.splitlines()[-2].count("|")
    assert [one.count("|") for one in rows] == [columns, columns]
