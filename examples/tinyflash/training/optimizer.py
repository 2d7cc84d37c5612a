"""Muon for the matrices of the network: steps of orthogonalised momentum.

The update of a matrix is its momentum with all singular values set to about one (K. Jordan et al.,
"Muon: an optimizer for hidden layers in neural networks", 2024; Newton–Schulz iteration with the
published coefficients). Matrices of one shape are orthogonalised together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Parameters [..., N, K]; leading dims are independent matrices."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "mu": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        grads = [p.grad for p in parameters]
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_lerp_(momenta, grads, 1.0 - group["mu"])
        ahead = torch._foreach_lerp(grads, momenta, group["mu"])
        torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
        by_shape: dict[tuple[int, int], list[int]] = {}
        for i, p in enumerate(parameters):
            by_shape.setdefault((p.shape[-2], p.shape[-1]), []).append(i)
        for (rows, columns), members in by_shape.items():
            stacked = torch.cat([ahead[i].reshape(-1, rows, columns) for i in members])
            updates = orthogonalised(stacked) * max(1.0, rows / columns) ** 0.5
            sizes = [parameters[i].numel() // (rows * columns) for i in members]
            torch._foreach_add_(
                [parameters[i] for i in members],
                [
                    part.view_as(parameters[i])
                    for i, part in zip(members, updates.split(sizes), strict=True)
                ],
                alpha=-group["lr"],
            )


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices [n, N, K] with their singular values brought to between about 0.7 and 1.2."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)
