"""The network against golden numbers that nothing in this repository produced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ragged import Timeline, run_alone, step

from engine.contiguous_cache import ContiguousCache
from engine.network import Network
from engine.network.run import ForwardMode, run_forward

TOLERANCE = 1e-9
MODES = [
    (ForwardMode.FULL, "logits_full", 0),
    (ForwardMode.DECODER_REPLAY, "logits_decoder_replay", 0),
    (ForwardMode.ENCODER_REPLAY, "logits_encoder_replay", 40),
    (ForwardMode.BOTH, "logits_both_replays", 40),
]


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("mode", "name", "hit"), MODES)
@pytest.mark.parametrize("chunk_rows", [512, 7])
def test_logits_of_every_mode(
    network64: Network,
    golden_of: Callable[[bool], dict[str, torch.Tensor]],
    quantize: bool,
    mode: ForwardMode,
    name: str,
    hit: int,
    chunk_rows: int,
) -> None:
    golden = golden_of(quantize)
    outputs = run_forward(
        network64,
        golden["tokens"].numpy(),
        mode,
        hit=hit,
        quantize_cache=quantize,
        chunk_rows=chunk_rows,
    )
    close(outputs["logits"], golden[name])


@pytest.mark.parametrize("quantize", [True, False])
def test_entries_engram_rows_and_draft(
    network64: Network, golden_of: Callable[[bool], dict[str, torch.Tensor]], quantize: bool
) -> None:
    golden = golden_of(quantize)
    outputs = run_forward(
        network64, golden["tokens"].numpy(), ForwardMode.FULL, quantize_cache=quantize
    )
    names = [n for n in golden if n.startswith(("main_kv.", "index_k."))]
    assert len(names) == 6
    for name in names:
        close(outputs[name], golden[name])
    for name in ("engram_rows.1", "engram_rows.4", "draft_tokens"):
        assert outputs[name].tolist() == golden[name].tolist(), name
    assert int(outputs["logits"][-1].argmax()) == int(golden["draft_anchor"])
    close(outputs["draft_confidence"], golden["draft_confidence"])


@pytest.mark.parametrize("quantize", [True, False])
def test_window_rows_and_draft_features(
    network64: Network, golden_of: Callable[[bool], dict[str, torch.Tensor]], quantize: bool
) -> None:
    golden = golden_of(quantize)
    request = Timeline(golden["tokens"].tolist())
    cache = run_alone(network64, request, quantize=quantize, chunks=[30, 31])
    last = cache.window_slots(torch.tensor(0), torch.arange(53, 61))
    for layer in (0, 2, 6, 11):
        rows = cache.window(layer).read(last, torch.float64)
        close(rows, golden[f"swa_last.{layer}"])
    features = torch.stack([request.features[p] for p in range(61)])
    close(features, golden["draft_features"])


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(
    ("name", "decoder_floor"), [("greedy_from_20", 0), ("greedy_from_20_replay", 12)]
)
def test_greedy_continuation(
    network64: Network,
    golden_of: Callable[[bool], dict[str, torch.Tensor]],
    quantize: bool,
    name: str,
    decoder_floor: int,
) -> None:
    golden = golden_of(quantize)
    request = Timeline(golden["tokens"][:20].tolist(), decoder_floor=decoder_floor)
    cache = ContiguousCache(network64.config, 1, 44, torch.float64, quantize=quantize)
    gaps = []
    for rows in [11, 9] + [1] * 23:
        step(network64, [request], [rows], cache)
        if request.position >= 20:
            best = request.logits[request.position - 1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            request.tokens.append(int(best.indices[0]))
    assert request.tokens[20:] == golden[name].tolist()
    close(torch.tensor(gaps, dtype=torch.float64), golden[f"{name}_gap"])


def test_float32_keeps_every_argmax(
    network_of: Callable[[torch.dtype], Network],
    golden_of: Callable[[bool], dict[str, torch.Tensor]],
) -> None:
    golden = golden_of(False)
    outputs = run_forward(
        network_of(torch.float32),
        golden["tokens"].numpy(),
        ForwardMode.FULL,
        quantize_cache=False,
    )
    assert outputs["logits"].dtype == torch.float32
    assert outputs["logits"].argmax(-1).tolist() == golden["logits_full"].argmax(-1).tolist()
    # The golden README's bound for a float32 run of the exact file.
    close(outputs["logits"].double(), golden["logits_full"], 1e-4)


def test_float32_with_cache_quantisation_moves_few_rows(
    network_of: Callable[[torch.dtype], Network],
    golden_of: Callable[[bool], dict[str, torch.Tensor]],
) -> None:
    """A value on a rounding boundary of a quantiser may flip one code, which moves a few rows."""
    golden = golden_of(True)
    outputs = run_forward(network_of(torch.float32), golden["tokens"].numpy(), ForwardMode.FULL)
    moved = (outputs["logits"] - golden["logits_full"]).abs().amax(-1) > 1e-4
    assert int(moved.sum()) <= 3, f"rows {moved.nonzero().flatten().tolist()} moved"


def test_bfloat16_runs_with_float32_logits(
    network_of: Callable[[torch.dtype], Network],
    golden_of: Callable[[bool], dict[str, torch.Tensor]],
) -> None:
    """TINY amplifies rounding, so the bound is the published one: half of the argmaxes."""
    golden = golden_of(True)
    outputs = run_forward(network_of(torch.bfloat16), golden["tokens"].numpy(), ForwardMode.FULL)
    assert outputs["logits"].dtype == torch.float32
    kept = outputs["logits"].argmax(-1) == golden["logits_full"].argmax(-1)
    assert int(kept.sum()) >= 25, f"{int(kept.sum())} of 61"
