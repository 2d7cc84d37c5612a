"""Sizes and hostile inputs of the Engram operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HashCase:
    """`rows` per request; request r has already run `before[r]` tokens."""

    name: str
    rows: tuple[int, ...]
    before: tuple[int, ...]
    reach: int = 3
    vocab: int = 512
    dead_token_id: int | None = None
    dead: float = 0.0

    def streams(self, seed: int = 0) -> list[torch.Tensor]:
        """Each request's token ids from position 0, int64 [before + rows]."""
        draw = torch.Generator().manual_seed(seed)
        result = []
        for rows, before in zip(self.rows, self.before, strict=True):
            tokens = torch.randint(self.vocab, (before + rows,), generator=draw)
            if self.dead_token_id is not None:
                dead = torch.rand(tokens.shape, generator=draw) < self.dead
                tokens = tokens.masked_fill(dead, self.dead_token_id)
            result.append(tokens)
        return result

    def operands(self, seed: int = 0) -> dict[str, torch.Tensor | int | None]:
        """Keyword operands of engram_rows without the layout; classes pair up ids."""
        streams = self.streams(seed)
        counts = torch.tensor(self.rows, dtype=torch.int64)
        history = torch.full((len(self.rows), self.reach), -1)
        for r, (stream, before) in enumerate(zip(streams, self.before, strict=True)):
            kept = min(before, self.reach)
            history[r, self.reach - kept :] = stream[before - kept : before]
        return {
            "tokens": torch.cat(
                [s[before:] for s, before in zip(streams, self.before, strict=True)]
                or [torch.empty(0, dtype=torch.int64)]
            ),
            "request": torch.repeat_interleave(torch.arange(len(self.rows)), counts),
            "query_start": torch.cat((counts.new_zeros(1), counts.cumsum(0))),
            "history": history,
            "token_class": torch.arange(self.vocab) // 2,
            "pad_class": 1,
            "dead_token_id": self.dead_token_id,
        }


@dataclass(frozen=True)
class InjectCase:
    name: str
    rows: int
    streams: int
    width: int
    dead: float | None = None
    stream_scale: float = 1.0
    key_scale: float = 1.0

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | float | None]:
        """Keyword operands and attributes of engram_gate, on the CPU."""
        draw = torch.Generator().manual_seed(seed)
        shape = (self.rows, self.streams, self.width)
        q_weight, k_weight = 1.0 + 0.1 * torch.randn(2, *shape[1:], generator=draw)
        alive = None
        if self.dead is not None:
            alive = torch.rand(self.rows, generator=draw) >= self.dead
        return {
            "streams": (self.stream_scale * torch.randn(shape, generator=draw)).to(dtype),
            "keys": (self.key_scale * torch.randn(shape, generator=draw)).to(dtype),
            "value": torch.randn(self.rows, self.width, generator=draw).to(dtype),
            "q_weight": q_weight.to(dtype),
            "k_weight": k_weight.to(dtype),
            "alive": alive,
            "norm_eps": 1e-20,
        }


HASH_CASES = (
    HashCase("no requests", (), ()),
    HashCase("one token", (1,), (0,)),
    HashCase("shorter than the reach", (2, 1, 3), (0, 0, 0)),
    HashCase("decode", (1, 1, 1, 1, 1), (0, 1, 2, 3, 100)),
    HashCase("chunks", (7, 1, 30), (5, 2, 64)),
    HashCase("image spans", (9, 9, 2), (0, 3, 7), dead_token_id=77, dead=0.3),
    HashCase("images only", (4,), (4,), dead_token_id=77, dead=1.0),
)

INJECT_CASES = (
    InjectCase("no rows", 0, 4, 32),
    InjectCase("one row", 1, 4, 32),
    InjectCase("odd width", 17, 2, 33),
    InjectCase("dead rows", 20, 4, 32, dead=0.5),
    InjectCase("all rows dead", 3, 4, 32, dead=1.0),
    InjectCase("zero streams", 3, 4, 32, stream_scale=0.0),
    InjectCase("zero keys", 3, 4, 32, key_scale=0.0),
    InjectCase("large streams", 3, 4, 32, stream_scale=1e12, key_scale=1e12),
    InjectCase("hidden size", 2, 4, 5120),
)
