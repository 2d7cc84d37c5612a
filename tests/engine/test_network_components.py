"""Sublayers with the golden weights, against what their definition says in special cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ragged import Timeline, make_batch, run_alone

from engine.network import Network
from engine.network.attention import latent_and_window, output, queries, write_window
from engine.network.block import Residual, after_attention, attention_input, experts
from engine.network.weights import HyperWeights, LayerWeights, MoeWeights
from plugins.formats.rows import ValueRows
from plugins.linear import LinearWeight
from plugins.mega_attention import mega_attention
from plugins.mega_mhc import hc_expand, hc_mix
from plugins.moe import ExpertWeights

Golden = Callable[[bool], dict[str, torch.Tensor]]


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_mixing_columns_sum_to_one_and_rows_nearly(network64: Network) -> None:
    config = network64.config
    streams = random_rows(50, config.hc_mult, config.hidden_size)
    for layer in network64.weights.layers:
        weights = layer.attn_hc
        mix = hc_mix(
            streams,
            weights.fn,
            weights.base,
            weights.scale,
            sinkhorn_iters=config.hc_sinkhorn_iters,
            hc_eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )
        assert (mix.comb.sum(dim=1) - 1).abs().max() < 2e-6
        assert (mix.comb.sum(dim=2) - 1).abs().max() < 1e-2


def test_identity_mix_without_post_leaves_the_streams() -> None:
    streams, y = random_rows(5, 4, 8), random_rows(5, 8, seed=1)
    identity = torch.eye(4, dtype=torch.float64).expand(5, 4, 4)
    unchanged = hc_expand(streams, y, torch.zeros(5, 4, dtype=torch.float64), identity)
    assert torch.equal(unchanged, streams)


def test_the_carried_pre_is_the_expert_sublayers_own(network64: Network) -> None:
    """Shifted mixes: with a pre that depends on the sublayer alone (fn = 0), the layer hands on
    the expert sublayer's, and its own collapse used the attention's."""
    config = network64.config
    layer = network64.weights.layers[3]

    def constant(base: float) -> HyperWeights:
        return HyperWeights(
            fn=torch.zeros_like(layer.attn_hc.fn),
            base=torch.full_like(layer.attn_hc.base, base),
            scale=layer.attn_hc.scale,
        )

    layer = replace(layer, attn_hc=constant(-1.0), ffn_hc=constant(2.0))
    residual = Residual(
        random_rows(3, config.hc_mult, config.hidden_size), random_rows(3, config.hc_mult)
    )
    y = random_rows(3, config.hidden_size, seed=2)

    def through(before: Residual) -> Residual:
        entered = attention_input(before, layer, config)
        return after_attention(entered, y, layer, config, top_k=2, is_image=None).written()

    result = through(residual)
    expected = 1 / (1 + torch.exp(torch.tensor(-2.0, dtype=torch.float64))) + config.hc_eps
    assert (result.pre - expected).abs().max() < 1e-15
    # The residual's own pre was consumed by the attention's collapse, before this point.
    other = through(Residual(residual.streams, residual.pre + 1))
    assert torch.equal(result.streams, other.streams)


def one_expert(u: torch.Tensor, experts: ExpertWeights, limit: float) -> torch.Tensor:
    gate = (u @ experts.w1[0].T).clamp(max=limit)
    up = (u @ experts.w3[0].T).clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up) @ experts.w2[0].T


def equal_experts(moe: MoeWeights, count: int) -> MoeWeights:
    shared = moe.shared
    w1, w3, w2 = (w.expand(count, -1, -1) for w in (shared.w1, shared.w3, shared.w2))
    return replace(moe, routed=ExpertWeights(w1, w3, w2, quantized_input=False))


def test_equal_experts_give_route_scale_plus_one_times_the_expert(network64: Network) -> None:
    config = network64.config
    moe = network64.weights.layers[5].moe
    u = random_rows(9, config.hidden_size)
    got = experts(u, equal_experts(moe, config.n_routed_experts), config, 2, None)
    expected = (1.5 + 1.0) * one_expert(u, moe.shared, config.swiglu_limit)
    assert (got - expected).abs().max() < 1e-12


def test_one_chosen_expert_is_weighted_by_its_score(network64: Network) -> None:
    """Draft stages: with top-k 1 the weight is 1.5 · score, not 1.5."""
    config = network64.config
    assert network64.weights.draft is not None
    moe = network64.weights.draft.stages[0].moe
    u = random_rows(9, config.hidden_size)
    scores = torch.nn.functional.softplus(u @ moe.gate.T).sqrt()
    score = scores.gather(1, (scores + moe.bias).argmax(-1, keepdim=True))
    got = experts(u, equal_experts(moe, config.dspark_n_routed_experts), config, 1, None)
    expected = (1.5 * score + 1.0) * one_expert(u, moe.shared, config.swiglu_limit)
    assert (got - expected).abs().max() < 1e-12


def without_value(layer: LayerWeights) -> LayerWeights:
    engram = layer.engram
    if engram is None:
        return layer
    value = engram.wkv.value.clone()
    hidden = layer.attn_norm.shape[0]
    value[-hidden:] = 0.0
    wkv = LinearWeight(value, engram.wkv.quantized_input)
    return replace(layer, engram=replace(engram, wkv=wkv))


def test_engram_with_a_zero_value_projection_is_the_identity(
    network64: Network, golden_of: Golden
) -> None:
    weights = network64.weights
    tokens = golden_of(True)["tokens"].tolist()

    def run(layers: tuple[LayerWeights, ...]) -> torch.Tensor:
        request = Timeline(tokens)
        network = Network(network64.config, replace(weights, layers=layers))
        run_alone(network, request, quantize=False)
        return request.rows(0, len(tokens))

    zeroed = run(tuple(without_value(layer) for layer in weights.layers))
    removed = run(tuple(replace(layer, engram=None) for layer in weights.layers))
    assert (zeroed - removed).abs().max() < 1e-12
    assert (removed - golden_of(False)["logits_full"]).abs().max() > 1e-3


@pytest.mark.parametrize("changed", [0, 5, 20])
def test_engram_rows_depend_on_four_tokens_only(
    network64: Network, golden_of: Golden, changed: int
) -> None:
    golden = golden_of(True)
    tokens = golden["tokens"].tolist()
    # Another class, so that every n-gram over it hashes elsewhere.
    tokens[changed] = (tokens[changed] + 100) % 512
    batch_rows = engram_rows_of(network64, tokens)
    for layer in network64.config.engram_layer_ids:
        moved = (batch_rows[layer] != golden[f"engram_rows.{layer}"]).any(-1)
        assert moved.nonzero().flatten().tolist() == list(range(changed, changed + 4))


def engram_rows_of(network: Network, tokens: list[int]) -> dict[int, torch.Tensor]:
    batch = make_batch(network.config, [Timeline(tokens)], [len(tokens)])
    return network.engram_hash.rows(batch)


def lone_key(network: Network, sink: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output of layer 3 over one key at the query's own position, and that key before
    rotation."""
    config = network.config
    weights = network.weights.layers[3].attention
    positions = torch.tensor([0, 1, 77, 1000])
    inv_freq = torch.tensor(config.inv_freq(3), dtype=torch.float64)
    eps = config.rms_norm_eps
    u = random_rows(4, config.hidden_size)
    every = torch.arange(4)
    rows, unrotated = (ValueRows(torch.zeros(4, config.head_dim, dtype=u.dtype)) for _ in range(2))
    latent = latent_and_window(u, weights, positions, inv_freq, rows, every, eps)
    write_window(u, weights, torch.zeros_like(positions), inv_freq, unrotated, every, eps)
    o = mega_attention(
        queries(latent, weights, config),
        positions,
        inv_freq,
        rows,
        every.unsqueeze(1),
        None,
        None,
        torch.full_like(weights.sink, sink),
        scale=config.softmax_scale,
    )
    return o, unrotated.values


def test_inverse_rope_returns_a_lone_key_unrotated(network64: Network) -> None:
    o, unrotated = lone_key(network64, -torch.inf)
    assert (o - unrotated.unsqueeze(1)).abs().max() < 1e-12


def test_infinite_sink_silences_attention(network64: Network) -> None:
    o, _ = lone_key(network64, torch.inf)
    assert o.abs().max() == 0
    attention = network64.weights.layers[3].attention
    assert output(o, attention, network64.config).abs().max() == 0


def test_image_tokens_take_their_own_bias_and_are_dead_in_engram(network64: Network) -> None:
    """`bias_vl` routes image positions, drafts excepted; other positions do not notice."""
    config = network64.config.with_changes(image_token_id=500)
    generator = torch.Generator().manual_seed(1)
    layers = tuple(
        replace(
            layer,
            moe=replace(
                layer.moe,
                bias_image=5 * torch.randn(8, generator=generator, dtype=torch.float64),
            ),
        )
        for layer in network64.weights.layers
    )
    network = Network(config, replace(network64.weights, layers=layers))
    tokens = [7, 300, 41, 9, 500, 500, 12, 80, 81]

    def run(model: Network) -> torch.Tensor:
        request = Timeline(tokens)
        run_alone(model, request, quantize=False)
        return request.rows(0, len(tokens))

    difference = (run(network) - run(network64)).abs().amax(-1)
    assert difference[:4].max() < 1e-12
    assert difference[4] > 1e-3
    rows, plain = engram_rows_of(network, tokens), engram_rows_of(network64, tokens)
    for layer in config.engram_layer_ids:
        moved = (rows[layer] != plain[layer]).any(-1)
        assert moved.tolist() == [False] * 4 + [True] * 5
