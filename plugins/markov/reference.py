"""The greedy choice among logits that the token before corrects."""

from __future__ import annotations

import torch

from plugins.markov.schema import SCHEMA
from plugins.registry import operator


@operator(SCHEMA)
def markov_choice(
    base: torch.Tensor, correction: torch.Tensor, embed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of base + correction [R, V] the first largest column of each row, int64 [R], NaN above all;
    and its row of embed [V, rank], [R, rank]. In two launches on a device."""
    token = (base + correction).argmax(dim=-1)
    return token, embed[token]
