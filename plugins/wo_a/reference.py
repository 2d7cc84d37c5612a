"""Each group of heads is projected by its own block of rows of the weight."""

from __future__ import annotations

import torch

from plugins.linear import LinearWeight, row_tiled
from plugins.registry import operator
from plugins.wo_a.schema import SCHEMA


@operator(SCHEMA)
def wo_a(o: torch.Tensor, weight: LinearWeight, groups: int) -> torch.Tensor:
    """o [T, H, d], weight [G·N, H/G·d] → [T, G·N].

    Group g is heads g·H/G … (g+1)·H/G − 1, concatenated; it meets weight rows g·N … (g+1)·N − 1.
    """
    rows, heads, dim = o.shape
    value = weight.value  # read once: a packed weight decodes on every read
    out_features, group_width = value.shape
    if heads % groups or out_features % groups or group_width != heads // groups * dim:
        raise ValueError(
            f"expected a weight [G·N, H/G·d] for {groups} groups of {heads} heads of {dim}, got "
            f"{tuple(value.shape)}; check o_groups and o_lora_rank"
        )
    x = weight.round_input(o.reshape(rows, heads * dim))
    per_group = value.view(groups, out_features // groups, group_width).transpose(1, 2)

    def project(tile: torch.Tensor) -> torch.Tensor:
        grouped = tile.reshape(tile.shape[0], groups, group_width).transpose(0, 1)
        return torch.bmm(grouped, per_group).transpose(0, 1).reshape(tile.shape[0], out_features)

    return row_tiled(x, project)
