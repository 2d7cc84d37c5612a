"""The greedy choice behind a token, and what the choice behind that one is made of."""

from __future__ import annotations

import torch

from plugins.registry import runs_kernels


def markov_choice(
    base: torch.Tensor, correction: torch.Tensor, embed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of base + correction [R, V] the first largest column of each row, int64 [R], NaN above all;
    and its row of embed [V, rank], [R, rank]. In two launches on a device."""
    known = base.dtype == correction.dtype == torch.float32
    if known and runs_kernels(base) and not torch.compiler.is_exporting():
        from plugins.device import markov

        made: tuple[torch.Tensor, torch.Tensor] = markov.markov_choice(base, correction, embed)
        return made
    token = (base + correction).argmax(dim=-1)
    return token, embed[token]
