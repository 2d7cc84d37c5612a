"""Engram: which table rows a token's n-grams hash to, and how the rows enter the streams."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from plugins.elementwise import sigmoid
from plugins.engram.layout import EngramLayout
from plugins.engram.schema import ENGRAM_GATE, ENGRAM_LOOKUP, ENGRAM_ROWS
from plugins.registry import operator

if TYPE_CHECKING:
    from plugins.formats.rows import RowStore

# The square root's argument is kept off zero, where its slope has no bound.
_SQRT_FLOOR = 1e-6


@operator(ENGRAM_ROWS)
def engram_rows(
    tokens: torch.Tensor,
    request: torch.Tensor,
    query_start: torch.Tensor,
    history: torch.Tensor,
    token_class: torch.Tensor,
    layout: EngramLayout,
    *,
    pad_class: int,
    dead_token_id: int | None = None,
) -> torch.Tensor:
    """Table rows of each token, int64 [T, columns].

    tokens int64 [T]; request int64 [T] and query_start int64 [R + 1] give each row's request and
    the requests' first rows; history int64 [R, n − 1] holds the token ids before a request's first
    row, nearest last, −1 before position 0; token_class int64 [vocab] maps ids to hash classes.
    An n-gram that reaches before position 0 or over a token `dead_token_id` (image placeholder)
    takes `pad_class` from there on.
    """
    reach = layout.max_ngram_size - 1
    device = tokens.device
    row = torch.arange(tokens.shape[0], device=device)
    first = query_start[request]
    usable = torch.ones_like(tokens, dtype=torch.bool)
    hashes = torch.zeros_like(tokens)
    ngram_hashes = []
    for back, multiplier in enumerate(layout.multipliers.tolist()):
        token = tokens[(row - back).clamp(min=0)]
        if back:
            offset = row - first - back
            before = history[request, (reach + offset).clamp(0, reach - 1)]
            token = torch.where(offset >= 0, token, before)
        usable = usable & (token >= 0)
        if dead_token_id is not None:
            usable = usable & (token != dead_token_id)
        token_hash = torch.where(usable, token_class[token.clamp(min=0)], pad_class) * multiplier
        hashes = hashes ^ token_hash
        if back:
            ngram_hashes.append(hashes)
    sections = _sections if device.type == "cpu" else _kept_sections
    primes, offsets = sections(layout, device)
    return (torch.stack(ngram_hashes, 1).unsqueeze(-1) % primes + offsets).flatten(1)


def _sections(layout: EngramLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Primes and offsets by n-gram size and head."""
    shape = (layout.max_ngram_size - 1, -1)
    primes, offsets = (torch.from_numpy(a).to(device) for a in (layout.primes, layout.offsets))
    return primes.view(shape), offsets.view(shape)


# Uploaded once: a copy in every step would wait for the device.
_kept_sections = functools.lru_cache(maxsize=64)(_sections)


@operator(ENGRAM_LOOKUP)
def engram_lookup(table: RowStore, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The table's rows at int64 rows [T, columns], side by side: [T, columns·width] in `dtype`."""
    return table.read(rows, dtype).flatten(1)


@operator(ENGRAM_GATE)
def engram_gate(
    streams: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    alive: torch.Tensor | None,
    *,
    norm_eps: float,
) -> torch.Tensor:
    """streams[t, s] + gate[t, s] · value[t], [T, S, D] in the streams' dtype.

    The gate is a sigmoid of the signed square root of the scaled dot product between the stream
    and its key, both RMS-normalised. streams and keys [T, S, D], value [T, D], q_weight and
    k_weight [S, D]. Rows that are not `alive` [T] keep their streams unchanged.
    """
    acc = torch.promote_types(streams.dtype, torch.float32)
    x, k = streams.to(acc), keys.to(acc)
    weight = q_weight.to(acc) * k_weight.to(acc)
    dot = (x * weight * k).sum(-1)
    inverse_rms = torch.rsqrt(x.square().mean(-1) + norm_eps) * torch.rsqrt(
        k.square().mean(-1) + norm_eps
    )
    score = dot * inverse_rms * streams.shape[-1] ** -0.5
    gate = sigmoid(score.sign() * score.abs().clamp(min=_SQRT_FLOOR).sqrt())
    injected = (x + gate.unsqueeze(-1) * value.to(acc).unsqueeze(1)).to(streams.dtype)
    if alive is None:
        return injected
    return torch.where(alive.view(-1, 1, 1), injected, streams)
