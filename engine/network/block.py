"""One layer: two sublayers around hyper-connected residual streams.

The mix of a sublayer is computed from the streams before it. Its `post` and `comb` write the
sublayer's output back; its `pre` collapses the streams for the NEXT sublayer, across layers too.
(Technical report, section on mHC; hyper-connections are arXiv 2409.19606.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from engine.config import ModelConfig
from engine.network.beside import Beside
from engine.network.precision import wide
from engine.network.weights import HyperWeights, LayerWeights, MoeWeights
from plugins.mega_gate import mega_gate
from plugins.mega_mhc import HcMix, hc_advance, hc_collapse, hc_expand, hc_mix, mega_mhc
from plugins.moe import moe
from plugins.norm import rms_norm
from plugins.registry import runs_kernels

# Up to this many rows, the most measured, a mix is made beside its sublayer, whose launches leave
# room for it then (docs/kernels/mega_mhc.md).
MOST_ROWS_BESIDE = 32


class Residual(NamedTuple):
    """The streams between two layers and the coefficients that collapse them for the next one."""

    streams: torch.Tensor  # [T, S, D] compute dtype
    pre: torch.Tensor  # [T, S] at least float32

    def rows(self, kept: torch.Tensor | slice) -> Residual:
        return Residual(self.streams[kept], self.pre[kept])


def embed(tokens: torch.Tensor, table: torch.Tensor, config: ModelConfig) -> Residual:
    """Every stream starts as the token's embedding; the first collapse takes stream 0."""
    streams = table[tokens].unsqueeze(1).expand(-1, config.hc_mult, -1)
    first = torch.arange(config.hc_mult, device=streams.device) == 0
    return Residual(streams, first.to(wide(streams.dtype)).expand(streams.shape[0], -1))


def collapse(residual: Residual, norm: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """What a sublayer (or the head) sees, [T, D]: the streams collapsed and normalised."""
    return rms_norm(hc_collapse(residual.streams, residual.pre), norm, config.rms_norm_eps)


class SublayerInput(NamedTuple):
    """The streams before a sublayer, its own mix of them, and what it sees of them."""

    streams: torch.Tensor  # [T, S, D]
    mix: HcMix | Beside[HcMix]
    u: torch.Tensor  # [T, D]


class SublayerOutput(NamedTuple):
    """What a sublayer made, not yet written back: the next one's input takes it from here, in one
    pass over the streams."""

    streams: torch.Tensor  # [T, S, D] before the sublayer
    y: torch.Tensor  # [T, D]
    mix: HcMix | Beside[HcMix]

    def written(self) -> Residual:
        mix = taken(self.mix)
        return Residual(hc_expand(self.streams, self.y, mix.post, mix.comb), mix.pre)


def taken(mix: HcMix | Beside[HcMix]) -> HcMix:
    return mix.take() if isinstance(mix, Beside) else mix


def written(before: Residual | SublayerOutput) -> Residual:
    return before.written() if isinstance(before, SublayerOutput) else before


def sublayer_input(
    before: Residual | SublayerOutput, hc: HyperWeights, norm: torch.Tensor, config: ModelConfig
) -> SublayerInput:
    """The input of the sublayer with mix weights `hc` and input norm [D]."""
    operands = hc.fn, hc.base, hc.scale
    sizes: dict[str, Any] = {
        "sinkhorn_iters": config.hc_sinkhorn_iters,
        "hc_eps": config.hc_eps,
        "norm_eps": config.rms_norm_eps,
    }
    if isinstance(before, Residual):
        mix = hc_mix(before.streams, *operands, **sizes)
        return SublayerInput(before.streams, mix, collapse(before, norm, config))
    last = taken(before.mix)
    pieces = before.streams, before.y, last.post, last.comb, last.pre
    if not _beside(before.streams):
        return SublayerInput(*mega_mhc(*pieces, *operands, norm, **sizes))
    streams, u = hc_advance(*pieces, norm, norm_eps=config.rms_norm_eps)
    beside = Beside("mix", lambda of: hc_mix(of, *operands, **sizes), streams)
    return SublayerInput(streams, beside, u)


def _beside(streams: torch.Tensor) -> bool:
    """Whether the next mix is made beside the sublayer. Not for a gradient, which would keep what
    the other stream reads, and free it in an order of its own."""
    if torch.is_grad_enabled() or not runs_kernels(streams):
        return False
    return streams.shape[0] <= MOST_ROWS_BESIDE


def attention_input(
    before: Residual | SublayerOutput, weights: LayerWeights, config: ModelConfig
) -> SublayerInput:
    return sublayer_input(before, weights.attn_hc, weights.attn_norm, config)


def after_attention(
    attention: SublayerInput,
    y: torch.Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    *,
    top_k: int,
    is_image: torch.Tensor | None,
) -> SublayerOutput:
    """The rest of a layer, given its attention's input and output y [T, D]."""
    before = SublayerOutput(attention.streams, y, attention.mix)
    ffn = sublayer_input(before, weights.ffn_hc, weights.ffn_norm, config)
    return SublayerOutput(
        ffn.streams, experts(ffn.u, weights.moe, config, top_k, is_image), ffn.mix
    )


def experts(
    u: torch.Tensor,
    weights: MoeWeights,
    config: ModelConfig,
    top_k: int,
    is_image: torch.Tensor | None,
) -> torch.Tensor:
    """The expert sublayer on u [T, D]: gate, chosen experts, shared expert."""
    routing = mega_gate(
        u,
        weights.gate,
        weights.bias,
        weights.bias_image,
        is_image,
        top_k=top_k,
        route_scale=config.routed_scaling_factor,
        gate_temp=config.gate_temp,
    )
    return moe(
        u,
        routing.ids,
        routing.weights,
        weights.routed,
        weights.shared,
        swiglu_limit=config.swiglu_limit,
    )
