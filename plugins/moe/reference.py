"""Mixture of experts: clamped SwiGLU experts, routed ones weighted before the down projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plugins.elementwise import silu
from plugins.formats import mxfp8, nvfp4
from plugins.linear.tiles import row_tiled
from plugins.linear.weight import Matrix
from plugins.moe.schema import MOE
from plugins.registry import operator


@dataclass(frozen=True)
class ExpertWeights:
    """E experts of one layer; w1 is the gated projection, w3 the linear one, w2 leads back.

    quantized_input: the experts were trained on MXFP8 activations (groups of 32), so their inputs
    are rounded to it before both products. With `input_scale` [E, 2] float32, of the inputs of w1
    and w3 and of w2, they are rounded to NVFP4 under that scale instead (W4A4).
    """

    w1: torch.Tensor  # [E, I, D]
    w3: torch.Tensor  # [E, I, D]
    w2: torch.Tensor  # [E, D, I]
    quantized_input: bool
    input_scale: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return self.w1.shape[0]

    def matrices(self) -> tuple[Sequence[Matrix], Sequence[Matrix], Sequence[Matrix]]:
        """w1, w3 and w2 expert by expert."""
        # unbind, not indexing: its gradient is one stack, not one full-size tensor per expert.
        return self.w1.unbind(0), self.w3.unbind(0), self.w2.unbind(0)


class PackedExpertWeights(ExpertWeights):
    """The same experts at rest as packed bytes; an expert is decoded when rows choose it.

    Each matrix stands alone, so that mapped files need not be copied. `w1`, `w3` and `w2` decode
    the whole stack anew each time they are read: for tests and tools, not for steps.
    """

    def __init__(
        self,
        w1: Sequence[Matrix],
        w3: Sequence[Matrix],
        w2: Sequence[Matrix],
        dtype: torch.dtype,
        quantized_input: bool,
        input_scale: torch.Tensor | None = None,
    ) -> None:
        object.__setattr__(self, "_matrices", (tuple(w1), tuple(w3), tuple(w2)))
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "quantized_input", quantized_input)
        object.__setattr__(self, "input_scale", input_scale)

    _matrices: tuple[Sequence[Matrix], Sequence[Matrix], Sequence[Matrix]]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return len(self._matrices[0])

    def matrices(self) -> tuple[Sequence[Matrix], Sequence[Matrix], Sequence[Matrix]]:
        return self._matrices

    def _stack(self, index: int) -> torch.Tensor:
        return torch.stack([matrix.to(self.dtype) for matrix in self._matrices[index]])

    @property
    def w1(self) -> torch.Tensor:
        return self._stack(0)

    @property
    def w3(self) -> torch.Tensor:
        return self._stack(1)

    @property
    def w2(self) -> torch.Tensor:
        return self._stack(2)


@operator(MOE)
def moe(
    u: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    routed: ExpertWeights,
    shared: ExpertWeights,
    *,
    swiglu_limit: float,
) -> torch.Tensor:
    """Σ over the chosen experts plus all shared ones (weight 1; there may be none), [T, D] in u's
    dtype.

    u [T, D]; ids [T, k] int64, distinct within a row and in 0 … E − 1; weights [T, k]. Sums are
    kept in at least float32 and cast once. Experts that no row chose do no work.
    """
    if u.shape[0] == 0:
        return torch.zeros_like(u)
    acc = torch.promote_types(u.dtype, torch.float32)
    # MXFP8 inputs are rounded here once for all experts, NVFP4 ones under each expert's own scale.
    rounds = {_takes_mxfp8(experts) for experts in (routed, shared)}
    inputs = {mx: mxfp8.ACTIVATION.round(u) if mx else u for mx in rounds}
    # Pairs (row, expert), grouped by expert; within a row they ascend, which fixes the sum's order.
    ids, by_id = ids.sort(dim=1)
    pair_weights = weights.to(acc).gather(1, by_id).flatten()
    grouped = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=routed.count).tolist()
    x = inputs[_takes_mxfp8(routed)][grouped // ids.shape[1]]
    y = _experts(x, pair_weights[grouped].unsqueeze(-1), counts, routed, swiglu_limit)
    pairs = y[grouped.argsort()].view(*ids.shape, -1)
    total = pairs[:, 0]
    for column in range(1, ids.shape[1]):
        total = total + pairs[:, column]
    num_shared = shared.count
    if num_shared == 0:
        return total.to(u.dtype)
    x = inputs[_takes_mxfp8(shared)].repeat(num_shared, 1)
    one = total.new_ones(())
    y = _experts(x, one, [u.shape[0]] * num_shared, shared, swiglu_limit)
    for expert_y in y.view(num_shared, *u.shape):
        total = total + expert_y
    return total.to(u.dtype)


def _takes_mxfp8(experts: ExpertWeights) -> bool:
    return experts.quantized_input and experts.input_scale is None


def _experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    experts: ExpertWeights,
    swiglu_limit: float,
) -> torch.Tensor:
    """Rows x [P, D] grouped by expert, counts[e] rows of expert e: [P, D] in at least float32.

    x is rounded where experts take MXFP8.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    hit = [expert for expert, count in enumerate(counts) if count]
    sizes = [counts[expert] for expert in hit]
    w1, w3, w2 = experts.matrices()
    scale = experts.input_scale
    if scale is not None:
        scale = scale.repeat_interleave(torch.tensor(counts, device=x.device), 0)  # [P, 2]
        x = nvfp4.round_input(x, scale[:, :1])
    a = torch.cat(
        [
            _swiglu(rows, w1[expert].to(acc), w3[expert].to(acc), swiglu_limit)
            for expert, rows in zip(hit, torch.split(x, sizes), strict=True)
        ]
    )
    a = (a * weight).to(x.dtype)
    if scale is not None:
        a = nvfp4.round_input(a, scale[:, 1:])
    elif experts.quantized_input:
        a = mxfp8.ACTIVATION.round(a)
    return torch.cat(
        [
            _product(rows, w2[expert].to(acc))
            for expert, rows in zip(hit, torch.split(a, sizes), strict=True)
        ]
    )


def _swiglu(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(x·w1ᵀ, limit)) · clamp(x·w3ᵀ, ±limit), [n, I] in the weights' dtype."""

    def rows(tile: torch.Tensor) -> torch.Tensor:
        tile = tile.to(w1.dtype)
        return silu((tile @ w1.T).clamp(max=limit)) * (tile @ w3.T).clamp(-limit, limit)

    return row_tiled(x, rows)


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return row_tiled(x, lambda tile: tile.to(w.dtype) @ w.T)
