"""The optimizer: Muon for the matrices of the network, Adam for the rest.

Muon's update of a matrix is its momentum with all singular values set to about one (K. Jordan,
"Muon: an optimizer for hidden layers in neural networks", 2024; Newton–Schulz iteration with the
published coefficients). Matrices of one shape are orthogonalised together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

# Tables, heads, routers and mixes are no maps between activations: Adam's.
_ADAM = (
    "embed", "head.value", "engram.table", "moe.gate", "_hc.fn", "_weight", "weights_proj.value",
    "markov_head.value", "confidence.value",
)  # fmt: skip
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Optimizer:
    """Muon and Adam over the trained leaves, stepped and scheduled together.

    The learning rates are tensors and nothing waits for the device, so that a captured graph may
    hold a step. Gradients are left to the caller to clear.
    """

    def __init__(self, trained: Mapping[str, torch.Tensor], matrix_lr: float, adam_lr: float):
        matrices = [t for path, t in trained.items() if _is_matrix(path, t)]
        rest = [t for path, t in trained.items() if not _is_matrix(path, t)]
        self._trained = [*matrices, *rest]
        self._peaks = (matrix_lr, adam_lr)
        on_device = rest[0].is_cuda
        self._rates = [torch.tensor(peak, device=rest[0].device) for peak in self._peaks]
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, self._rates[0]),
            torch.optim.AdamW(
                rest, lr=self._rates[1], betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0,
                fused=on_device, capturable=on_device,
            ),
        )  # fmt: skip

    def set_share(self, share: float) -> None:
        """Learn at `share` of the peak rates from now on."""
        for rate, peak in zip(self._rates, self._peaks, strict=True):
            rate.fill_(peak * share)

    def step(self) -> torch.Tensor:
        """One step; returns the gradient's norm."""
        norm = torch.nn.utils.clip_grad_norm_(self._trained, 1.0, foreach=True)
        for part in self._parts:
            part.step()
        return norm

    def clear(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        for part, saved, rate in zip(self._parts, state, self._rates, strict=True):
            part.load_state_dict(saved)
            part.param_groups[0]["lr"] = rate


def _is_matrix(path: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and not path.endswith(_ADAM)


class Muon(torch.optim.Optimizer):
    """Parameters [..., N, K]; leading dims are independent matrices. `lr` is a scalar tensor."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: torch.Tensor,
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
            rate = -group["lr"] * max(1.0, rows / columns) ** 0.5
            updates = orthogonalised(stacked) * rate
            sizes = [parameters[i].numel() // (rows * columns) for i in members]
            torch._foreach_add_(
                [parameters[i] for i in members],
                [
                    part.view_as(parameters[i])
                    for i, part in zip(members, updates.split(sizes), strict=True)
                ],
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
