"""Bounded replay: what it may change, what it must not, and when it is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ragged import PoisonedPages, Timeline, make_batch, poison, run_alone, step

from engine.contiguous_cache import ContiguousCache
from engine.network import Network
from engine.network.run import ForwardMode, run_forward
from engine.paged_cache import CachePools

Golden = Callable[[bool], dict[str, torch.Tensor]]
LENGTH = 61
WINDOW = 8
EXACT = 1e-12


def entry_bytes(pools: CachePools, page: int) -> bytes:
    return pools.global_pages[page].numpy().tobytes()


@pytest.fixture
def tokens(golden_of: Golden) -> list[int]:
    return golden_of(True)["tokens"].tolist()


def make_pages(network: Network, *, num_slots: int = 2, page_tokens: int = 4) -> PoisonedPages:
    return PoisonedPages(
        network.config,
        network.dtype,
        quantize=True,
        num_slots=num_slots,
        max_length=LENGTH,
        max_rows=LENGTH,
        global_page_tokens=page_tokens,
        window_page_rows=2,
        seed=3,
    )


def advance(
    network: Network, pages: PoisonedPages, slot: int, request: Timeline, chunks: list[int]
) -> None:
    for rows in chunks:
        pages.extend(slot, request.position, request.position + rows)
        step(network, [request], [rows], pages.view([slot]))


@pytest.mark.parametrize("hit", [1, 7, 8])
@pytest.mark.parametrize("quantize", [True, False])
def test_hit_not_longer_than_the_replay_equals_a_cold_run(
    network64: Network, golden_of: Golden, hit: int, quantize: bool
) -> None:
    golden = golden_of(quantize)
    outputs = run_forward(
        network64,
        golden["tokens"].numpy(),
        ForwardMode.ENCODER_REPLAY,
        hit=hit,
        quantize_cache=quantize,
    )
    difference = outputs["logits"] - golden["logits_full"][hit:]
    assert difference.abs().max() < EXACT


@pytest.mark.parametrize("hit", [16, 17, 40, 41])
def test_replay_never_changes_cached_entries_and_writes_the_straddling_one(
    network64: Network, tokens: list[int], hit: int
) -> None:
    """Bitwise, on packed pages, for even and odd hits and chunk borders inside the replay."""
    pages = make_pages(network64, page_tokens=2)
    advance(network64, pages, 0, Timeline(tokens[:hit]), [hit])
    shared = pages.global_tables[0, : -(-hit // 2)].tolist()
    before = [entry_bytes(pages.pools, page) for page in shared]
    start = hit - WINDOW
    pages.adopt(1, owner=0, hit=hit, first=start)
    request = Timeline(tokens, start, encoder_floor=start, decoder_floor=start, write_floor=hit)
    advance(network64, pages, 1, request, [3, 6, LENGTH - start - 9])
    assert torch.isfinite(request.rows(start, LENGTH)).all()
    closed = hit // 2  # whole pages of two tokens: one pair, two ratio-1 entries
    after = [entry_bytes(pages.pools, page) for page in shared]
    assert after[:closed] == before[:closed]
    if hit % 2:
        assert after[closed] != before[closed], "the entry that closes at the hit is new"
        pair = pages.view([1]).entry_slots(2, torch.tensor(0), torch.tensor([closed]))
        row = pages.pools.main(2).read(pair, torch.float64)
        assert torch.isfinite(row).all()


def test_window_rows_below_the_replay_start_are_never_read(
    network64: Network, golden_of: Golden
) -> None:
    """vLLM PR 57906: a backend that did not bound the window read rows that replay never made.

    Every window row starts as NaN, so one read below the start would spoil the golden logits.
    """
    golden = golden_of(True)
    all_tokens = golden["tokens"].tolist()
    pages = make_pages(network64)
    advance(network64, pages, 0, Timeline(all_tokens[:40]), [40])
    pages.adopt(1, owner=0, hit=40, first=32)
    request = Timeline(all_tokens, 32, encoder_floor=32, decoder_floor=32, write_floor=40)
    # Pages below the start exist and hold NaN: a ring column is simply not empty there.
    pages.extend(1, 16, 32)
    poison(pages.pools.window_pages)
    advance(network64, pages, 1, request, [5, 24])
    difference = request.rows(40, LENGTH) - golden["logits_encoder_replay"]
    assert difference.abs().max() < 1e-9


def test_reused_slot_never_reads_its_previous_owner(network64: Network, golden_of: Golden) -> None:
    """ATOM 1417, SGLang PR 30339: a hit read the ring rows of the slot's previous request.

    Two prompts through one slot that nobody cleans, then the first one again with a hit.
    """
    golden = golden_of(True)
    all_tokens = golden["tokens"].tolist()
    pages = make_pages(network64)
    advance(network64, pages, 0, Timeline(all_tokens[:40]), [40])
    other = Timeline([(7 * token + 3) % 512 for token in all_tokens])
    advance(network64, pages, 1, other, [LENGTH])
    pages.global_tables[1] = 0
    pages.adopt(1, owner=0, hit=40, first=32)
    request = Timeline(all_tokens, 32, encoder_floor=32, decoder_floor=53, write_floor=40)
    advance(network64, pages, 1, request, [29])
    difference = request.rows(53, LENGTH) - golden["logits_both_replays"]
    assert difference.abs().max() < 1e-9


@pytest.mark.parametrize(("replay_length", "exact"), [(42, True), (41, False)])
def test_encoder_replay_of_six_windows_makes_every_new_entry_exact(
    network64: Network, golden_of: Golden, replay_length: int, exact: bool
) -> None:
    """L_enc·(W − 1) = 6·7 = 42 rows are needed; one less shows, once rounding does not hide it."""
    golden = golden_of(False)
    hit = 55
    outputs = run_forward(
        network64,
        golden["tokens"].numpy(),
        ForwardMode.ENCODER_REPLAY,
        hit=hit,
        replay_length=replay_length,
        quantize_cache=False,
    )
    worst = 0.0
    for source in network64.config.kv_source_layer_ids:
        for kind in ("main_kv", "index_k"):
            first = hit // network64.config.ratio(source)
            difference = outputs[f"{kind}.{source}"] - golden[f"{kind}.{source}"]
            assert difference[:first].abs().max() < EXACT
            worst = max(worst, float(difference[first:].abs().max()))
    assert (worst < EXACT) if exact else (1e-7 < worst < 1e-5)


def test_exact_replay_length_makes_a_hit_exact(network64: Network, golden_of: Golden) -> None:
    """L·(W − 1) = 12·7 = 84 rows: what replay off uses. Shorter prompts replay whole."""
    assert network64.config.exact_replay_length == 84
    prompt = (golden_of(False)["tokens"].tolist() * 2)[:110]
    cold = Timeline(prompt)
    run_alone(network64, cold, quantize=False)
    outputs = run_forward(
        network64,
        torch.tensor(prompt).numpy(),
        ForwardMode.ENCODER_REPLAY,
        hit=100,
        replay_length=84,
        quantize_cache=False,
    )
    assert (outputs["logits"] - cold.rows(100, 110)).abs().max() < EXACT


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("replay_length", [61, 100])
def test_decoder_tail_as_long_as_the_prompt_equals_the_full_run(
    network64: Network, golden_of: Golden, quantize: bool, replay_length: int
) -> None:
    golden = golden_of(quantize)
    outputs = run_forward(
        network64,
        golden["tokens"].numpy(),
        ForwardMode.DECODER_REPLAY,
        replay_length=replay_length,
        quantize_cache=quantize,
    )
    assert (outputs["logits"] - golden["logits_full"]).abs().max() < EXACT


@pytest.mark.parametrize(("replay_length", "exact"), [(43, True), (42, False)])
def test_decoder_tail_of_six_windows_makes_the_last_row_exact(
    network64: Network, golden_of: Golden, replay_length: int, exact: bool
) -> None:
    """L_dec·(W − 1) + 1 = 43 rows are needed; one less shows, once rounding does not hide it."""
    golden = golden_of(False)
    outputs = run_forward(
        network64,
        golden["tokens"].numpy(),
        ForwardMode.DECODER_REPLAY,
        replay_length=replay_length,
        quantize_cache=False,
    )
    assert len(outputs["logits"]) == replay_length
    difference = float((outputs["logits"][-1] - golden["logits_full"][-1]).abs().max())
    assert (difference < EXACT) if exact else (1e-10 < difference < 1e-5)


def test_decoder_replay_leaves_the_encoder_and_all_entries_alone(
    network64: Network, tokens: list[int]
) -> None:
    """Bitwise. Decoder layers hold window rows of the tail only: the first decoder layer too."""
    config = network64.config
    full = run_alone(network64, Timeline(tokens), quantize=True)
    trimmed = run_alone(network64, Timeline(tokens, decoder_floor=53), quantize=True)
    positions = trimmed.window_slots(torch.tensor(0), torch.arange(LENGTH))
    for layer in range(config.num_layers_total):
        rows = trimmed.window(layer).read(positions, torch.float64)
        if layer < config.decoder_start:
            assert torch.equal(rows, full.window(layer).read(positions, torch.float64))
        else:
            assert rows[:53].abs().max() == 0, f"layer {layer} wrote rows below the tail"
            assert rows[53:].abs().amax(-1).min() > 0
    for source in config.kv_source_layer_ids:
        entries = torch.arange(LENGTH // config.ratio(source))
        for kind in ("main", "index"):
            got = getattr(trimmed, kind)(source).read(entries, torch.float64)
            assert torch.equal(got, getattr(full, kind)(source).read(entries, torch.float64))


@pytest.mark.parametrize("chunks", [[20], [19, 1], [12, 8], [13, 7], [3] * 6 + [2], [1] * 20])
def test_absolute_tail_does_not_depend_on_chunks_and_neither_does_decoding(
    network64: Network, golden_of: Golden, chunks: list[int]
) -> None:
    """The per-chunk rule of other engines fails this: it keeps each chunk's own last rows."""
    golden = golden_of(True)
    expected = golden["greedy_from_20_replay"].tolist()
    prompt = golden["tokens"][:20].tolist()
    request = Timeline(prompt + expected[:5], decoder_floor=12)
    run_alone(network64, request, quantize=True, chunks=[*chunks, 1, 1, 3])
    got = request.rows(19, 25)
    assert got.argmax(-1).tolist() == expected[:6]
    best = got.topk(2).values
    gap = golden["greedy_from_20_replay_gap"][:6]
    assert (best[:, 0] - best[:, 1] - gap).abs().max() < 1e-9


def test_a_chunk_below_every_decoder_floor_gives_no_rows(
    network64: Network, tokens: list[int]
) -> None:
    batch = make_batch(network64.config, [Timeline(tokens, decoder_floor=53)], [40])
    cache = ContiguousCache(network64.config, 1, LENGTH, torch.float64, quantize=True)
    with torch.no_grad():
        output = network64.forward(batch, cache)
    assert output.logits.shape == (0, 512)
    assert output.draft_features.shape == (0, 256)


def test_no_hit_is_a_cold_run(network64: Network, tokens: list[int], golden_of: Golden) -> None:
    """Both replays without a hit are the decoder's alone, whose logits are golden."""
    outputs = run_forward(network64, torch.tensor(tokens).numpy(), ForwardMode.BOTH, hit=0)
    assert (outputs["logits"] - golden_of(True)["logits_decoder_replay"]).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("mode", "arguments", "message"),
    [
        (ForwardMode.FULL, {"hit": 4}, "hit: mode full starts cold, got 4"),
        (ForwardMode.BOTH, {"hit": 61}, "takes a cached prefix of 0 … 60 tokens, got 61"),
        (ForwardMode.FULL, {"chunk_rows": 0}, "chunk_rows: expected at least 1, got 0"),
        (ForwardMode.DECODER_REPLAY, {"replay_length": 0}, "expected at least 1 row, got 0"),
    ],
)
def test_arguments_that_cannot_run_are_refused(
    network64: Network,
    tokens: list[int],
    mode: ForwardMode,
    arguments: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        run_forward(network64, torch.tensor(tokens).numpy(), mode, **arguments)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "got shape"), ([3, 512], "ids 0 … 511, got 3 … 512"), ([-1], "got -1 … -1")],
)
def test_tokens_that_cannot_run_are_refused(
    network64: Network, ids: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_forward(network64, torch.tensor(ids, dtype=torch.int64).numpy(), ForwardMode.FULL)
