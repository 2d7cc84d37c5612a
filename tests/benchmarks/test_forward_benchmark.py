"""The forward benchmark: its grammar, the steps that it makes, and one run of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.forward import show, steps
from benchmarks.forward.cases import (
    Case,
    Request,
    jittered,
    num_global_pages,
    parse,
    prompt_steps,
    step_of,
)
from benchmarks.forward.floor import draft_bytes
from benchmarks.forward.routing import balanced
from benchmarks.forward.run import limits_for, rank_config, spread_warning
from benchmarks.forward.steps import filled_pools
from benchmarks.forward.weights import random_network
from builder import commands
from builder.cli import main
from engine.network import Network, block
from plugins.formats.rows import PackedRows


def test_the_grammar() -> None:
    assert parse("decode=32*1@8192").requests == (Request(1, 8192, 0, False),) * 32
    assert parse("verify=16*6@131072:5").requests == (Request(6, 131072, 5, False),) * 16
    assert parse("hit=2048@10240").requests == (Request(2048, 10240, 0, False),)
    mixed = parse("mix=8192,2*1@8192,64@100c").requests
    assert mixed[0] == Request(8192, 8192, 0, False)
    assert mixed[3] == Request(64, 100, 0, True)
    assert [r.decodes for r in mixed] == [False, True, True, False]


@pytest.mark.parametrize("text", ["1@2", "x=", "x=1@", "x=3@2", "x=0", "x=5:5", "x=a", "=1"])
def test_what_the_grammar_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse(text)


def test_steps_are_those_of_a_scheduler() -> None:
    """TINY has a window of 8 and pages of 16 tokens."""
    case = parse("mix=40,1@100,4@200:3,32@96,20@50c")
    limits = limits_for([case], rank_config("tiny"), replay=True, draft=True)
    plan = step_of(case, limits)
    arrays = plan.arrays
    # The hit of 64 tokens brings its window of replayed rows along.
    assert arrays.first_position.tolist() == [0, 99, 196, 56, 30]
    assert (arrays.query_start[1:] - arrays.query_start[:-1]).tolist() == [40, 1, 4, 40, 20]
    assert arrays.encoder_floor.tolist() == [0, 0, 0, 56, 0]
    assert arrays.write_floor.tolist() == [0, 0, 0, 64, 0]
    assert arrays.decoder_floor.tolist() == [32, 91, 188, 88, 42]
    assert plan.num_drafts.tolist() == [0, 0, 3, 0, 0]
    # 3 + 7 + 13 + 6 + 4 pages of 16 and the null page.
    assert num_global_pages(case, 16) == 34
    pages = plan.tables.global_pages[plan.tables.global_pages > 0]
    assert sorted(pages.tolist()) == list(range(1, 34))


def test_every_row_runs_through_the_decoder_without_replay() -> None:
    case = parse("cold=40")
    config = rank_config("tiny")
    floors = [
        step_of(case, limits_for([case], config, replay=replay, draft=False)).arrays.decoder_floor
        for replay in (True, False)
    ]
    assert [floor.tolist() for floor in floors] == [[32], [0]]


def test_a_rank_has_its_share_of_the_experts() -> None:
    config = rank_config("full", experts=48, engram_rows=100_000)
    assert (config.n_routed_experts, config.num_experts_per_tok) == (48, 6)
    assert (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok) == (16, 3)
    assert config.hidden_size == 5120


def test_no_two_pages_of_the_caches_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of a few pages. Equal keys would score equally."""
    monkeypatch.setattr(steps, "_ROWS_AT_ONCE", 24)
    config = rank_config("tiny")
    network = random_network(config, torch.bfloat16, "cpu")
    limits = limits_for([parse("x=1*1@200")], config, replay=True, draft=False)
    pools = filled_pools(network, limits, "cpu")
    rows = pools.index(config.kv_source_layer_ids[-1])
    assert isinstance(rows, PackedRows)
    pages = rows.data.flatten(1)
    assert len(pages.unique(dim=0)) == len(pages) == limits.num_global_pages
    slots = torch.arange(rows.data.shape[0] * rows.data.shape[1])
    assert rows.read(slots, torch.float32).std() == pytest.approx(1, rel=0.1)


def test_what_more_requests_add_to_the_floor_of_a_draft_pass() -> None:
    """TINY: two stages, four FP4 experts of which a row takes one, blocks of three, a window of
    eight MXFP8 rows of 66 bytes."""
    config = rank_config("tiny")
    weights = random_network(config, torch.bfloat16, "cpu").weights
    expert = 3 * (64 * 128 // 2 + 64 * 128 // 32)
    shares = [1 - 0.75**rows for rows in (3, 6)]
    floors = [draft_bytes(parse(f"x={n}*4@64:3"), config, weights) for n in (1, 2)]
    chosen = [int(4 * expert * share) for share in shares]
    assert floors[1] - floors[0] == 2 * (chosen[1] - chosen[0] + 8 * 66)
    in_turn = [draft_bytes(parse(f"x={n}*4@64:3"), config, weights, in_turn=True) for n in (1, 2)]
    # Three rows meet three of the four, six all.
    assert in_turn[1] - in_turn[0] == 2 * (expert + 8 * 66)
    assert floors[0] > 2 * (chosen[0] + 8 * 66) + config.vocab_size * config.hidden_size * 2


def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    cases = ["mix=16@48,1@60", "decode=4*1@64", "verify=2*4@100:3", "hit=32@96"]
    options = [*cases, "--config", "tiny", "--device", "cpu", "--out", str(out)]
    assert main(["bench", "forward", *options]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in rows] == cases
    assert [(row["rows"], row["decoder_rows"]) for row in rows] == [
        (25, 9),
        (4, 4),
        (8, 8),
        (40, 8),
    ]
    for row in rows:
        assert (row["jitter"], row["routing"]) == (True, "balanced")
        assert row["served_ms"] > 0
        assert row["bytes"] > 1e6


@pytest.mark.parametrize("case", ["decode=32*1@8192", "hit=2048@10240"])
def test_a_context_beyond_the_model_is_one_sentence(
    case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "forward", case, "--config", "tiny"])
    assert end.value.code == 2
    got = case.partition("@")[2]
    said = f"error: expected contexts of at most 1024 tokens, got {got}\n"
    assert capfd.readouterr().err.endswith(said)


def test_contexts_are_spread_evenly_around_their_mean() -> None:
    case = jittered(parse("x=4*1@65,64,2*6@206:5"), 1024)
    contexts = [request.context for request in case.requests]
    # 64 tokens before the row, of which half are 32: 3/4 and 1/4 of that to either side.
    assert sorted(contexts[:4]) == [65 - 24, 65 - 8, 65 + 8, 65 + 24]
    assert contexts[4] == 64
    assert sorted(contexts[5:]) == [206 - 50, 206 + 50]
    assert all(request.decodes for request in case.requests[:4])
    assert jittered(parse("x=4*1@65,64,2*6@206:5"), 1024) == case
    assert jittered(parse("x=1@65"), 1024) == parse("x=1@65")
    assert max(r.context for r in jittered(parse("x=9*1@1000"), 1024).requests) <= 1024


def test_rows_choose_the_experts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """TINY: four experts of which a row takes one; its draft stages are no part of this step."""
    network = random_network(rank_config("tiny"), torch.bfloat16, "cpu")
    config, layers = network.config, network.weights.layers
    chosen = []
    moe = block.moe
    monkeypatch.setattr(
        block,
        "moe",
        lambda u, ids, *rest, **more: (chosen.append(ids), moe(u, ids, *rest, **more))[1],
    )
    gate = block.mega_gate
    u = torch.randn(6, config.hidden_size, dtype=torch.bfloat16)

    def run(some) -> None:
        for layer in some:
            block.experts(u, layer.moe, config, config.num_experts_per_tok, None)

    with balanced(network, 8):
        run(layers)
    count, per_row = config.n_routed_experts, config.num_experts_per_tok
    expected = [[(r * per_row + j) % count for j in range(per_row)] for r in range(6)]
    assert [ids.tolist() for ids in chosen] == [expected] * len(layers)
    assert block.mega_gate is gate
    said = f"expected balanced routing in {len(layers)} layers, 1 had none"
    with pytest.raises(RuntimeError, match=said), balanced(network, 8):
        run(layers[1:])
    with pytest.raises(RuntimeError, match="at most 4 rows, got 6"), balanced(network, 4):
        run(layers)


def test_a_spread_is_warned_of() -> None:
    case = parse("decode=1@64")
    assert spread_warning(case, 0.005) is None
    assert "decode=1@64: samples spread by 1.2%" in str(spread_warning(case, 0.012))


def test_a_bad_case_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "forward", "x=1@", "--config", "tiny"])
    assert end.value.code == 2
    assert "dsv41-build bench forward: error: expected" in capfd.readouterr().err


def test_an_installation_without_benchmarks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "builder" / "commands.py"))
    assert main(["bench", "forward", "decode=1@64"]) == 1
    assert "only a checkout has benchmarks" in capsys.readouterr().err


def test_a_prompt_behind_a_hit_in_chunks() -> None:
    """TINY replays a window of 8 behind the hit; only the last chunk's tail runs the decoder."""
    limits = limits_for([parse("hit=32@96")], rank_config("tiny"), replay=True, draft=False)
    plans = prompt_steps(96, limits, chunk=32, hit=32)
    arrays = [plan.arrays for plan in plans]
    assert [a.first_position.tolist() for a in arrays] == [[24], [64]]
    assert [a.query_start.tolist() for a in arrays] == [[0, 40], [0, 32]]
    assert [a.write_floor.tolist() for a in arrays] == [[32], [0]]
    assert [a.decoder_floor.tolist() for a in arrays] == [[88], [88]]
    assert [a.wants_logits.tolist() for a in arrays] == [[False], [True]]


def test_every_step_is_timed_before_the_first_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler stays attached to its process, which then launches slower."""
    done = []
    network = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=4))

    def measure(case: Case, *_: object, **__: object) -> dict[str, Any]:
        done.append(f"time {case.name}")
        return {"case": case.text, "gpu_ms": 8.0 + len(done), "served_ms": 18.0 + 2 * len(done)}

    def launched(case: Case, *_: object) -> dict[str, Any]:
        done.append(f"profile {case.name}")
        return {"launches": 10}

    monkeypatch.setattr(show, "measure", measure)
    monkeypatch.setattr(show, "launched", launched)
    monkeypatch.setattr(show, "limits_for", lambda *_, **__: None)
    monkeypatch.setattr(show, "filled_pools", lambda *_: None)
    rows = list(show.decode_rows(cast(Network, network), "cuda"))
    names = ["64K", "128K", "256K", "512K", "855K", "one", "drafts", "verify"]
    assert done == [f"{what} {name}" for what in ("time", "profile") for name in names]
    assert [row["row"] for row in rows] == ["decode"] * 8 + ["launches"] * 8
    assert [row["case"].partition("=")[0] for row in rows] == 2 * names
    assert [row.get("growth") for row in rows[:6]] == [0.0, 0.1111, 0.2222, 0.3333, 0.4444, None]
    assert [row.get("served_growth") for row in rows[:6]] == [0.0, 0.1, 0.2, 0.3, 0.4, None]
    assert {row["launches_per_layer"] for row in rows[8:]} == {2.5}
