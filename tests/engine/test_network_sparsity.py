"""Selection of compressed entries inside the network, against brute force over the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ragged import Timeline, run_alone

import engine.network.attention
import engine.network.select
from engine.config import ModelConfig
from engine.contiguous_cache import ContiguousCache
from engine.network import Network, NetworkWeights
from plugins.mega_attention import mega_attention
from plugins.topk_select import candidate_blocks, topk_select

Golden = Callable[[bool], dict[str, torch.Tensor]]
LENGTH = 61


def with_changes(network: Network, **changes: Any) -> Network:
    """The same weights under another configuration."""
    return Network(network.config.with_changes(**changes), network.weights)


def logits(network: Network, tokens: list[int], *, quantize: bool = True) -> torch.Tensor:
    request = Timeline(tokens)
    run_alone(network, request, quantize=quantize)
    return request.rows(0, len(tokens))


@pytest.fixture
def tokens(golden_of: Golden) -> list[int]:
    return golden_of(True)["tokens"].tolist()


def dense_attention(
    q: torch.Tensor, layer: int, sink: torch.Tensor, cache: ContiguousCache, config: ModelConfig
) -> torch.Tensor:
    """Row by row in float64: the window and ALL visible entries, one softmax with a sink.

    q [T, H, d] before RoPE, positions 0 … T − 1.
    """
    freq = torch.tensor(config.inv_freq(layer), dtype=torch.float64)
    rotated_dims = 2 * len(freq)
    ratio, source = config.ratio(layer), config.kv_source(layer)

    def turn(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x[..., -rotated_dims:].reshape(*x.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle))
        return torch.cat([x[..., :-rotated_dims], turned.flatten(-2)], dim=-1)

    outputs = []
    for p in range(len(q)):
        first = max(0, p - config.sliding_window + 1)
        keys = cache.window(layer).read(torch.arange(first, p + 1), torch.float64)
        if source is not None:
            visible = torch.arange((p + 1) // ratio)
            keys = torch.cat([keys, cache.main(source).read(visible, torch.float64)])
        scores = turn(q[p], p * freq) @ keys.T * config.head_dim**-0.5
        weights = torch.softmax(torch.cat([scores, sink.unsqueeze(1)], dim=1), dim=1)[:, :-1]
        outputs.append(turn(weights @ keys, -p * freq))
    return torch.stack(outputs)


@pytest.mark.parametrize("quantize", [True, False])
def test_topk_of_all_entries_is_dense_attention_in_every_layer(
    network64: Network, tokens: list[int], quantize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = with_changes(network64, index_topk=64)
    original = mega_attention
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def record(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        o = original(q, *args, **kwargs)
        seen.append((q, args[-1], o))
        return o

    monkeypatch.setattr(engine.network.attention, "mega_attention", record)
    cache = run_alone(network, Timeline(tokens), quantize=quantize)
    assert len(seen) == network.config.num_hidden_layers
    for layer, (q, sink, o) in enumerate(seen):
        expected = dense_attention(q, layer, sink, cache, network.config)
        assert (o - expected).abs().max() < 1e-12, f"layer {layer}"


def test_sparse_attention_is_not_dense(network64: Network, tokens: list[int]) -> None:
    """Otherwise the test above would say nothing about the selection."""
    dense = logits(with_changes(network64, index_topk=64), tokens)
    sparse = logits(network64, tokens)
    rows = (dense - sparse).abs().amax(-1)
    assert rows[:4].max() < 1e-12
    assert rows[20:].min() > 1e-3


def test_candidates_covering_everything_equal_no_candidate_source(
    network64: Network, tokens: list[int]
) -> None:
    covering = logits(with_changes(network64, candidate_topk_blocks=31), tokens)
    without = logits(with_changes(network64, candidate_source_layer_id=99), tokens)
    assert (covering - without).abs().max() < 1e-12
    assert (logits(network64, tokens) - without).abs().max() > 1e-3


def test_candidate_blocks_hold_the_newest_and_never_an_unreachable_one(
    network64: Network, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = candidate_blocks
    listed: list[torch.Tensor] = []

    def record(*args: Any, **kwargs: Any) -> torch.Tensor:
        listed.append(original(*args, **kwargs))
        return listed[-1]

    monkeypatch.setattr(engine.network.select, "candidate_blocks", record)
    run_alone(network64, Timeline(tokens), quantize=True)
    (blocks,) = listed
    for p in range(LENGTH):
        row = [block for block in blocks[p].tolist() if block >= 0]
        assert p // 2 in row, f"row {p} lost the block of its own entry"
        assert max(row) <= p // 2, f"row {p} sees blocks of the future"
        assert len(row) == min(p // 2 + 1, 4)


def test_the_source_finds_its_entries_among_its_blocks(
    network64: Network, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more blocks than entries to select, the blocks hold what the whole row would give."""
    changed = with_changes(network64, index_topk=2, candidate_topk_blocks=3)
    calls: list[tuple[int, ...]] = []

    def whole(scores: torch.Tensor, blocks: torch.Tensor, *, k: int, block_size: int) -> Any:
        calls.append(tuple(blocks.shape))
        return topk_select(scores, k)

    among_blocks = logits(changed, tokens)
    monkeypatch.setattr(engine.network.select, "topk_of_blocks", whole)
    assert torch.equal(logits(changed, tokens), among_blocks)
    assert calls == [(LENGTH, 3)]


def with_other_indexers(weights: NetworkWeights) -> NetworkWeights:
    """Index queries of every source replaced by noise; keys untouched."""
    generator = torch.Generator().manual_seed(5)
    layers = []
    for layer in weights.layers:
        indexer = layer.attention.indexer
        if indexer is not None:
            value = indexer.wq_b.value
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            indexer = replace(indexer, wq_b=replace(indexer.wq_b, value=noise))
            layer = replace(layer, attention=replace(layer.attention, indexer=indexer))
        layers.append(layer)
    return replace(weights, layers=tuple(layers))


def test_indexer_has_no_influence_while_everything_fits_but_keys_are_written(
    network64: Network, golden_of: Golden, tokens: list[int]
) -> None:
    other = Network(network64.config, with_other_indexers(network64.weights))
    request = Timeline(tokens)
    cache = run_alone(other, request, quantize=True)
    difference = (request.rows(0, LENGTH) - golden_of(True)["logits_full"]).abs().amax(-1)
    topk = network64.config.index_topk
    assert difference[:topk].max() < 1e-9
    assert difference[topk:].max() > 1e-3
    # Entries of the first source do not depend on any selection.
    keys = cache.index(2).read(torch.arange(30), torch.float64)
    assert (keys - golden_of(True)["index_k.2"]).abs().max() < 1e-9


def test_scoring_in_a_longer_batch_selects_what_skipping_it_selects(
    network64: Network, tokens: list[int]
) -> None:
    """A short context beside a long one is scored, alone it is not: the result is the same."""
    short = logits(network64, tokens[:4])
    assert (logits(network64, tokens)[:4] - short).abs().max() < 1e-12
