"""Sizes and hostile inputs of the hyper-connection pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.linear.tiles import ROW_TILE


@dataclass(frozen=True)
class MhcCase:
    """`scale` multiplies the streams, `logit_scale` the learned scales."""

    name: str
    rows: int
    streams: int
    width: int
    scale: float = 1.0
    logit_scale: float = 1.0
    strided: bool = False

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
        """Keyword operands of hc_mix without its attributes, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        S, D = self.streams, self.width
        streams = self.scale * torch.randn(self.rows, S, 2 * D, generator=draw)
        streams = streams[..., ::2] if self.strided else streams[..., :D].contiguous()
        fn = 2.0 * (S * D) ** -0.5 * torch.randn(S * (2 + S), S * D, generator=draw)
        base = 0.5 * torch.randn(S * (2 + S), generator=draw)
        scale = self.logit_scale * (0.5 + 0.3 * torch.randn(3, generator=draw))
        wide = torch.promote_types(dtype, torch.float32)
        return {
            "streams": streams.to(dtype),
            "fn": fn.to(wide),
            "base": base.to(wide),
            "scale": scale.to(wide),
        }

    def output(self, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        """A sublayer's output y [T, D] for hc_expand."""
        draw = torch.Generator().manual_seed(seed + 1)
        return torch.randn(self.rows, self.width, generator=draw).to(dtype)


ATTRIBUTES = {"sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}

CASES = (
    MhcCase("no rows", 0, 4, 32),
    MhcCase("one row", 1, 4, 32),
    MhcCase("one below a tile", ROW_TILE - 1, 4, 48),
    MhcCase("a tile", ROW_TILE, 4, 48),
    MhcCase("one above a tile", ROW_TILE + 1, 4, 48),
    MhcCase("two streams, odd width", 5, 2, 33),
    MhcCase("zero streams", 2, 4, 32, scale=0.0),
    MhcCase("tiny streams", 2, 4, 32, scale=1e-8),
    MhcCase("large streams", 2, 4, 32, scale=1e15),
    MhcCase("saturated logits", 3, 4, 32, logit_scale=300.0),
    MhcCase("strided columns", 5, 4, 32, strided=True),
    MhcCase("hidden size", 2, 4, 5120),
)
