"""Balanced routing: rows choose the experts in turn, whatever random gates would have chosen.

Random weights do not route as trained ones do, and one seed's favourites would be timed instead of
the products. The gate still runs, and its weights of the choice are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import engine.network.block
from engine.network.network import Network
from plugins.mega_gate import Routing


@contextmanager
def balanced(network: Network, most_rows: int) -> Iterator[None]:
    """Steps of at most `most_rows` rows route so; RuntimeError where a layer of the network, its
    draft stages apart, met no gate."""
    config, layers = network.config, network.weights.layers
    device = network.weights.embed.device
    turns: dict[tuple[int, int], torch.Tensor] = {}
    # Made before any graph: captured calls read them where they lie.
    for experts, chosen in (
        (config.n_routed_experts, config.num_experts_per_tok),
        (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok),
    ):
        turn = torch.arange(most_rows * chosen, device=device).view(most_rows, chosen)
        turns[experts, chosen] = turn % experts
    gate = engine.network.block.mega_gate
    met: set[int] = set()

    def routed(u: torch.Tensor, weight: torch.Tensor, *args: object, **kwargs: object) -> Routing:
        made = gate(u, weight, *args, **kwargs)  # type: ignore[arg-type]
        turn = turns[len(weight), made.ids.shape[1]]
        if len(turn) < len(u):
            raise RuntimeError(f"expected steps of at most {len(turn)} rows, got {len(u)}")
        met.add(weight.data_ptr())
        return Routing(turn[: len(u)], made.weights)

    engine.network.block.mega_gate = routed
    try:
        yield
    finally:
        engine.network.block.mega_gate = gate
    missed = sum(layer.moe.gate.data_ptr() not in met for layer in layers)
    if missed:
        raise RuntimeError(f"expected balanced routing in {len(layers)} layers, {missed} had none")
