"""What training runs on a CUDA device in place of the operators' references.

The references favour bits that do not depend on the batch; on a device that costs many passes over
memory and many launches. `install` registers faster equivalents, differentiable and float32 with
TF32 products, under the operators' names: the forward pass stays the same code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from triton import next_power_of_2

import plugins.mega_attention  # noqa: F401  registers the operator
from examples.tinyflash.training.device_attention import sparse_attention
from examples.tinyflash.training.device_kernels import (
    Collapse,
    Expand,
    Mix,
    Rotate,
    WeightedSwiglu,
)
from examples.tinyflash.training.device_rounding import RoundGroups
from examples.tinyflash.training.device_scores import index_scores
from examples.tinyflash.training.rows import FUSED_ROUNDING
from examples.tinyflash.training.selection import FUSED_SCORES
from plugins.linear import LinearWeight
from plugins.mega_gate import Routing
from plugins.mega_mhc import HcMix
from plugins.moe import ExpertWeights
from plugins.registry import OPERATORS

_MAX_POSITIONS = 1 << 14
_SQRT_FLOOR = 1e-6


def install() -> None:
    """Take over the operators on CUDA tensors, and the rounding of cache rows."""
    for name, kernel in {
        "hc_mix": hc_mix,
        "hc_collapse": Collapse.apply,
        "hc_expand": Expand.apply,
        "norm": rms_norm,
        "rope": Rope(),
        "linear": linear,
        "mega_gate": mega_gate,
        "moe": moe,
        "mega_attention": mega_attention,
        "engram_gate": engram_gate,
    }.items():
        OPERATORS[name].__dict__["kernel"] = kernel
    for record, group in (("window", 32), ("main", 16), ("index", 32)):
        FUSED_ROUNDING[record] = partial(_rounded, record, group)
    FUSED_SCORES[:] = [index_scores]


def _rounded(record: str, group: int, values: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = RoundGroups.apply(values, record, group)  # type: ignore[no-untyped-call]
    return result


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    # The input of a quantised linear is rounded as a window row is.
    inputs = _rounded("window", 32, x) if weight.quantized_input else x
    return torch.nn.functional.linear(inputs, weight.value)


class Rope:
    """Rotation with tables: cosines and sines of all positions, made once per frequency table."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        inv_freq: torch.Tensor,
        inverse: bool = False,
    ) -> torch.Tensor:
        if id(inv_freq) not in self._tables:
            every = torch.arange(_MAX_POSITIONS, device=x.device, dtype=torch.float64)
            angle = every.unsqueeze(1) * inv_freq
            # The frequencies are kept with their table so that their identity stays theirs.
            self._tables[id(inv_freq)] = (angle.cos().float(), angle.sin().float(), inv_freq)
        cos, sin, _ = self._tables[id(inv_freq)]
        per_head = x if x.dim() == 3 else x.unsqueeze(1)
        rotated: torch.Tensor = Rotate.apply(  # type: ignore[no-untyped-call]
            per_head, positions, cos, sin, -1.0 if inverse else 1.0
        )
        return rotated.view_as(x)


def hc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> HcMix:
    flat = streams.flatten(1)
    normed = torch.nn.functional.rms_norm(flat, (flat.shape[1],), None, norm_eps)
    z = torch.nn.functional.linear(normed, fn)
    return HcMix(*Mix.apply(z, base, scale, streams.shape[1], sinkhorn_iters, hc_eps))  # type: ignore[no-untyped-call]


def mega_gate(
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    bias_image: torch.Tensor | None,
    is_image: torch.Tensor | None,
    *,
    top_k: int,
    route_scale: float,
    gate_temp: float,
) -> Routing:
    logits = torch.nn.functional.linear(u, weight)
    scores = torch.nn.functional.softplus(logits / gate_temp).sqrt()
    ids = (scores.detach() + bias).topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(ids, weights * route_scale)


def moe(
    u: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    routed: ExpertWeights,
    shared: ExpertWeights,
    *,
    swiglu_limit: float,
) -> torch.Tensor:
    """All experts on all rows, weighted 0 where not chosen: at this size cheaper than sorting."""
    num_experts = routed.w1.shape[0]
    quantized = routed.quantized_input
    per_expert = u.new_zeros(len(u), num_experts).scatter(1, ids, weights)
    per_expert = torch.nn.functional.pad(per_expert, (0, shared.w1.shape[0]), value=1.0)
    experts = torch.cat([routed.w1, shared.w1, routed.w3, shared.w3]).flatten(0, 1)
    products = torch.nn.functional.linear(_rounded("window", 32, u) if quantized else u, experts)
    a = WeightedSwiglu.apply(products, per_expert, swiglu_limit)  # type: ignore[no-untyped-call]
    down = torch.cat([routed.w2, shared.w2]).transpose(0, 1).flatten(1)
    return torch.nn.functional.linear(_rounded("window", 32, a) if quantized else a, down)


def mega_attention(
    q: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    window: Any,
    window_slots: torch.Tensor,
    main: Any,
    main_slots: torch.Tensor | None,
    sink: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    rope = OPERATORS["rope"].kernel
    assert rope is not None, "install registers it"
    entries = None if main is None else main.values
    if main_slots is not None:
        padding = max(16, next_power_of_2(main_slots.shape[1])) - main_slots.shape[1]
        main_slots = torch.nn.functional.pad(main_slots, (0, padding), value=-1)
    rotated = rope(q, positions, inv_freq)
    o = sparse_attention(rotated, window.values, window_slots, entries, main_slots, sink, scale)
    result: torch.Tensor = rope(o, positions, inv_freq, inverse=True)
    return result


def engram_gate(
    streams: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    alive: torch.Tensor | None,
    *,
    norm_eps: float,
) -> torch.Tensor:
    width = streams.shape[-1]
    x = torch.nn.functional.rms_norm(streams, (width,), None, norm_eps)
    k = torch.nn.functional.rms_norm(keys, (width,), None, norm_eps)
    score = (x * k * (q_weight * k_weight)).sum(-1) * width**-0.5
    gate = torch.sigmoid(score.sign() * score.abs().clamp(min=_SQRT_FLOOR).sqrt())
    return torch.addcmul(streams, gate.unsqueeze(-1), value.unsqueeze(1))
