"""DSpark drafting: the block, its context, and what verification leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ragged import Timeline, run_alone, step

from engine.batch import DraftBatch
from engine.cache_view import CacheView
from engine.config import ConfigError
from engine.contiguous_cache import ContiguousCache
from engine.network import Network

Golden = Callable[[bool], dict[str, torch.Tensor]]
Propose = Callable[[int, int], list[int]]  # (anchor, its position) → drafts
BLOCK = 3


def draft(
    network: Network, cache: CacheView, anchors: list[int], positions: list[int], floor: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        output = network.draft(
            DraftBatch(
                anchors=torch.tensor(anchors),
                positions=torch.tensor(positions),
                request=torch.arange(len(anchors)),
                floor=torch.full((len(anchors),), floor),
            ),
            cache,
        )
    return output.tokens, output.confidence


def speculate(
    network: Network, request: Timeline, cache: CacheView, propose: Propose, count: int
) -> tuple[list[int], int]:
    """`count` greedy tokens after the prompt by draft and verify; also how many steps it took."""
    prompt = len(request.tokens)
    step(network, [request], [prompt], cache)
    anchor, steps = int(request.logits[prompt - 1].argmax()), 0
    made = [anchor]
    while len(made) < count:
        first, steps = request.position, steps + 1
        drafts = propose(anchor, first)
        request.tokens += [anchor, *drafts]
        step(network, [request], [1 + len(drafts)], cache, store_context=False)
        choices = [int(request.logits[first + i].argmax()) for i in range(1 + len(drafts))]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            accepted += 1
        made += choices[: accepted + 1]
        request.position = first + 1 + accepted
        del request.tokens[request.position :]
        features = torch.stack([request.features[p] for p in range(first, request.position)])
        confirmed = torch.arange(first, request.position)
        with torch.no_grad():
            network.store_draft_context(features, torch.zeros_like(confirmed), confirmed, cache)
        anchor = made[-1]
    return made[:count], steps


@pytest.mark.parametrize(
    ("kind", "name", "decoder_floor"),
    [
        ("own", "greedy_from_20", 0),
        ("own", "greedy_from_20_replay", 12),
        ("random", "greedy_from_20", 0),
        ("partly correct", "greedy_from_20_replay", 12),
        ("right", "greedy_from_20_replay", 12),
    ],
)
def test_speculative_output_equals_plain_greedy(
    network64: Network, golden_of: Golden, kind: str, name: str, decoder_floor: int
) -> None:
    golden = golden_of(True)
    expected = golden[name].tolist()
    request = Timeline(golden["tokens"][:20].tolist(), decoder_floor=decoder_floor)
    cache = ContiguousCache(network64.config, 1, 20 + 24 + BLOCK + 1, torch.float64, quantize=True)
    draw = random.Random(7)

    def propose(anchor: int, position: int) -> list[int]:
        right = (expected + [0] * BLOCK)[position - 19 : position - 19 + BLOCK]
        if kind == "own":
            tokens, _ = draft(network64, cache, [anchor], [position], decoder_floor)
            return tokens[0].tolist()
        if kind == "right":
            return right
        correct = draw.randrange(BLOCK) if kind == "partly correct" else 0
        return right[:correct] + [draw.randrange(512) for _ in range(BLOCK - correct)]

    made, steps = speculate(network64, request, cache, propose, 24)
    assert made == expected
    if kind == "right":
        assert steps == 6, "23 tokens in steps of 4"


def test_a_draft_pass_writes_nothing_and_a_rejected_draft_leaves_no_context(
    network64: Network, golden_of: Golden
) -> None:
    tokens = golden_of(True)["tokens"].tolist()
    config = network64.config
    request = Timeline(tokens[:30])
    cache = ContiguousCache(config, 1, 40, torch.float64, quantize=True)
    step(network64, [request], [30], cache)

    def context() -> torch.Tensor:
        slots = cache.window_slots(torch.tensor(0), torch.arange(40))
        return torch.stack([cache.window(layer).read(slots, torch.float64) for layer in (12, 13)])

    before = context()
    assert before[:, :30].abs().amax(-1).min() > 0
    assert before[:, 30:].abs().max() == 0, "context holds confirmed positions only"
    everything = [cache.window(layer).values.clone() for layer in range(14)]
    draft(network64, cache, [tokens[30]], [30])
    assert all(torch.equal(cache.window(i).values, rows) for i, rows in enumerate(everything))
    request.tokens += [tokens[30], 1, 2, 3]
    step(network64, [request], [4], cache, store_context=False)
    assert torch.equal(context(), before)


def test_draft_of_a_batch_equals_each_alone(network64: Network, golden_of: Golden) -> None:
    golden = golden_of(True)
    tokens = golden["tokens"].tolist()
    prompts = [tokens, tokens[5:], tokens[:3]]
    batch = ContiguousCache(network64.config, 3, 61, torch.float64, quantize=True)
    requests = [Timeline(prompt) for prompt in prompts]
    step(network64, requests, [len(prompt) for prompt in prompts], batch)
    anchors = [int(r.logits[r.position - 1].argmax()) for r in requests]
    together, confidence = draft(network64, batch, anchors, [r.position for r in requests])
    assert together[0].tolist() == golden["draft_tokens"].tolist()
    for i, prompt in enumerate(prompts):
        cache = run_alone(network64, Timeline(prompt), quantize=True)
        alone, alone_confidence = draft(network64, cache, [anchors[i]], [len(prompt)])
        assert together[i].tolist() == alone[0].tolist()
        assert (confidence[i] - alone_confidence[0]).abs().max() < 1e-12


def test_context_below_the_floor_is_not_read(network64: Network, golden_of: Golden) -> None:
    """With a replay shorter than the window, the draft's window reaches below the stored rows."""
    tokens = golden_of(True)["tokens"].tolist()
    results = []
    for stale in (0.0, float("nan")):
        cache = ContiguousCache(network64.config, 1, 61, torch.float64, quantize=True)
        for layer in range(14):
            cache.window(layer).values.fill_(stale)
        request = Timeline(tokens, decoder_floor=58)
        step(network64, [request], [61], cache)
        results.append(draft(network64, cache, [9], [61], floor=58)[1])
    assert torch.equal(results[0], results[1])
    assert torch.isfinite(results[0]).all()


def test_a_block_needs_its_later_rows(network64: Network, golden_of: Golden) -> None:
    """The block is bidirectional: a shorter one gives its first draft another confidence."""
    tokens = golden_of(True)["tokens"].tolist()
    cache = run_alone(network64, Timeline(tokens), quantize=True)
    shorter = Network(network64.config.with_changes(dspark_block_size=2), network64.weights)
    _, full = draft(network64, cache, [495], [61])
    _, cut = draft(shorter, cache, [495], [61])
    assert cut.shape == (1, 2)
    assert (full[0, 0] - cut[0, 0]).abs() > 1e-6


def test_markov_rows_are_widened_for_their_products(
    network_of: Callable[[torch.dtype], Network], golden_of: Golden
) -> None:
    """Kept as the compute dtype, they give what an embedding of float32 gives."""
    network = network_of(torch.bfloat16)
    stages = network.weights.draft
    assert stages is not None
    widened = replace(stages, markov_embed=stages.markov_embed.float())
    cache = run_alone(network, Timeline(golden_of(True)["tokens"].tolist()), quantize=True)
    expected = Network(network.config, replace(network.weights, draft=widened))
    tokens, confidence = draft(expected, cache, [495], [61])
    assert confidence.dtype == torch.float32
    got_tokens, got_confidence = draft(network, cache, [495], [61])
    assert torch.equal(got_tokens, tokens)
    assert torch.equal(got_confidence, confidence)


def test_a_model_without_draft_stages_says_so(network64: Network) -> None:
    network = Network(network64.config, replace(network64.weights, draft=None))
    assert not network.drafts
    with pytest.raises(ConfigError, match="no draft stages"):
        draft(
            network, ContiguousCache(network.config, 1, 4, torch.float64, quantize=True), [1], [1]
        )
