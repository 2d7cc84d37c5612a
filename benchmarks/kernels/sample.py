"""Sampling from a released vocabulary; the peer is a composition of torch operators that sorts."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from harness import DEVICE, Row, rotations

from plugins.registry import OPERATORS
from plugins.sample.kernel import sample

VOCAB = 129_280
# temperature, top-k, top-p, min-p
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "min-p": (0.8, 0, 1.0, 0.05),
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-p 0.95": (0.8, 0, 0.95, 0.0),
    "both": (0.8, 50, 0.95, 0.0),
    "flat, top-p 0.95": (50.0, 0, 0.95, 0.0),
}


def operands(rows: int, setting: tuple[float, int, float, float]) -> dict[str, torch.Tensor]:
    temperature, top_k, top_p, min_p = (torch.tensor(x, device=DEVICE) for x in setting)
    return {
        "logits": 2.5 * torch.randn(rows, VOCAB, device=DEVICE),
        "temperature": temperature.float().repeat(rows),
        "top_k": top_k.repeat(rows),
        "top_p": top_p.float().repeat(rows),
        "min_p": min_p.float().repeat(rows),
        "seed": torch.arange(rows, device=DEVICE),
        "output_index": torch.arange(rows, device=DEVICE),
    }


def by_sorting(given: dict[str, torch.Tensor]) -> Any:
    """Sort, add up, cut, draw: no host synchronisation, all settings at once."""
    logits, heat = given["logits"], given["temperature"][:, None]
    sorted_logits, ids = logits.sort(dim=-1, descending=True)
    probabilities = torch.softmax(sorted_logits / heat.clamp(min=1e-6), dim=-1)
    mass = probabilities.cumsum(-1)
    rank = torch.arange(VOCAB, device=logits.device)
    k = torch.where(given["top_k"] > 0, given["top_k"], VOCAB)[:, None]
    kept = (rank < k) & (mass - probabilities < given["top_p"][:, None])
    mass = torch.where(kept, probabilities, 0.0).cumsum(-1)
    drawn = torch.searchsorted(mass, 0.5 * mass[:, -1:]).clamp(max=VOCAB - 1)
    return ids.gather(1, drawn)


def rows(peers: ModuleType | None) -> Iterator[Row]:
    reference = OPERATORS["sample"].reference
    for name, setting in SETTINGS.items():
        for count in (1, 64):
            cost = 4.0 * count * VOCAB
            sets = [operands(count, setting) for _ in range(rotations(cost))]
            # It takes so long that where its inputs are does not matter: a few of them do.
            others = {"torch sort": lambda s=sets[:32]: [lambda g=g: by_sorting(g) for g in s]}
            if name == "greedy":
                others = {
                    "torch argmax": lambda s=sets: [lambda g=g: g["logits"].argmax(-1) for g in s]
                }
            yield Row(
                "sample", f"{name} {count}", cost, 0.0,
                [lambda g=given: sample(**g) for given in sets],
                # A draw at the border of two tokens may name the other one.
                lambda g=sets[0]: float((sample(**g) != reference(**g)).float().mean()), 0.02,
                count, None, others,
            )  # fmt: skip
