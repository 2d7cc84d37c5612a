"""Diagnostics of evaluation: one mechanism of the network switched off in this process.

An operator that the network calls is swapped for one that leaves the mechanism out. No server has
such an option.

    with ablated("engram"):
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from engine.network import attention, encoder, select
from plugins.indexer.slots import KeySlots, pages_of
from plugins.topk_select import topk_select
from plugins.topk_select.reference import within_blocks


class _Swap(NamedTuple):
    module: ModuleType
    name: str
    replacement: Callable[[Any], Callable[..., Any]]  # of the original operator


def _without_engram(original: Any) -> Callable[..., torch.Tensor]:
    def inject(streams: torch.Tensor, *_: Any) -> torch.Tensor:
        return streams

    return inject


def _random_scores(original: Any) -> Callable[..., torch.Tensor]:
    """Independent uniform scores for all that a row sees: a selection that knows nothing."""
    generators: dict[torch.device, torch.Generator] = {}

    def index_scores(*arguments: Any, **options: Any) -> torch.Tensor:
        scores: torch.Tensor = original(*arguments, **options)
        device = scores.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(0)
        drawn = torch.rand(scores.shape, generator=generators[device], device=device)
        return torch.where(scores.isneginf(), scores, drawn.to(scores.dtype))

    return index_scores


def _random_candidates(original: Any) -> Callable[..., torch.Tensor]:
    """The same among a row's candidates, which are never scored otherwise."""
    generators: dict[torch.device, torch.Generator] = {}

    def candidate_topk(
        queries: Any, head_weights: Any, keys: Any, key_slots: KeySlots, request: Any,
        num_visible: torch.Tensor, blocks: torch.Tensor, *, k: int, block_size: int,
    ) -> torch.Tensor:  # fmt: skip
        device = num_visible.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(1)
        shape = len(num_visible), pages_of(key_slots).count
        scores = torch.rand(shape, generator=generators[device], device=device)
        inside = within_blocks(blocks, shape[1], block_size)
        seen = torch.arange(shape[1], device=device) < num_visible.unsqueeze(1)
        return topk_select(scores.masked_fill(~(inside & seen), -torch.inf), k)

    return candidate_topk


def _window_only(original: Any) -> Callable[..., torch.Tensor]:
    def mega_attention(
        q: Any, positions: Any, inv_freq: Any, window: Any, keys: Any, main: Any, slots: Any,
        sink: Any, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        attended: torch.Tensor = original(
            q, positions, inv_freq, window, keys, None, None, sink, **options
        )
        return attended

    return mega_attention


ABLATIONS = {
    "engram": (_Swap(encoder, "inject", _without_engram),),
    "indexer": (
        _Swap(select, "index_scores", _random_scores),
        _Swap(select, "candidate_topk", _random_candidates),
    ),
    "global": (_Swap(attention, "mega_attention", _window_only),),
}


@contextmanager
def ablated(name: str | None) -> Iterator[None]:
    """Without Engram ("engram"), with random selection ("indexer"), or with the windows alone
    ("global"), for every network of this process; None changes nothing."""
    swaps = () if name is None else ABLATIONS[name]
    originals = [getattr(module, operator) for module, operator, _ in swaps]
    for (module, operator, replacement), original in zip(swaps, originals, strict=True):
        setattr(module, operator, replacement(original))
    try:
        yield
    finally:
        for (module, operator, _), original in zip(swaps, originals, strict=True):
            setattr(module, operator, original)
