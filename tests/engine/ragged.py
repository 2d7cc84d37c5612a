"""Steps of several requests for tests: tokens, floors, caches, and pages with a hostile past."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.batch import Int64Array, RaggedBatch, StepArrays
from engine.cache_view import CacheView
from engine.config import ModelConfig
from engine.contiguous_cache import ContiguousCache
from engine.network import Network
from engine.paged_cache import CachePools, PagedCache, StepTables


@dataclass
class Timeline:
    """One request: its tokens, how far it has come, its floors, and the logits it has got."""

    tokens: list[int]
    position: int = 0
    encoder_floor: int = 0
    decoder_floor: int = 0
    write_floor: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # by position
    features: dict[int, torch.Tensor] = field(default_factory=dict)

    def rows(self, first: int, stop: int) -> torch.Tensor:
        return torch.stack([self.logits[p] for p in range(first, stop)])


def make_batch(
    config: ModelConfig, requests: Sequence[Timeline], rows: Sequence[int]
) -> RaggedBatch:
    """The next rows[i] rows of requests[i], every decoder row's logits wanted."""
    reach = config.engram_max_ngram_size - 1
    history = np.full((len(requests), reach), -1, dtype=np.int32)
    tokens: list[int] = []
    for i, (request, count) in enumerate(zip(requests, rows, strict=True)):
        first = request.position
        assert first + count <= len(request.tokens), "the test asks for rows beyond the tokens"
        tokens += request.tokens[first : first + count]
        for back in range(1, min(reach, first) + 1):
            history[i, reach - back] = request.tokens[first - back]

    def per_request(name: str) -> Int64Array:
        return np.array([getattr(r, name) for r in requests], dtype=np.int64)

    return StepArrays(
        tokens=np.array(tokens, dtype=np.int32),
        query_start=np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
        first_position=per_request("position"),
        encoder_floor=per_request("encoder_floor"),
        decoder_floor=per_request("decoder_floor"),
        write_floor=per_request("write_floor"),
        history=history,
        wants_logits=np.ones(len(requests), dtype=bool),
    ).to_torch(all_logits=True)


@torch.no_grad()
def step(
    network: Network,
    requests: Sequence[Timeline],
    rows: Sequence[int],
    cache: CacheView,
    *,
    store_context: bool = True,
) -> None:
    """Run the next rows of each request and keep logits and draft features by position."""
    batch = make_batch(network.config, requests, rows)
    output = network.forward(batch, cache)
    kept = batch.decoder_rows
    where = zip(batch.request[kept].tolist(), batch.positions[kept].tolist(), strict=True)
    for row, (request, position) in enumerate(where):
        requests[request].logits[position] = output.logits[row]
        requests[request].features[position] = output.draft_features[row]
    if store_context:
        network.store_draft_context(
            output.draft_features, batch.request[kept], batch.positions[kept], cache
        )
    for request, count in zip(requests, rows, strict=True):
        request.position += count


def run_alone(
    network: Network, request: Timeline, *, quantize: bool, chunks: Sequence[int] = ()
) -> ContiguousCache:
    """Run all of a request's tokens in a cache of its own: in one step, or in `chunks`."""
    cache = ContiguousCache(
        network.config, 1, len(request.tokens), network.dtype, quantize=quantize
    )
    for count in chunks or [len(request.tokens) - request.position]:
        step(network, [request], [count], cache)
    return cache


class PoisonedPages:
    """Pools whose every byte starts as NaN, with shuffled pages; freed pages are NaN again.

    Anything that a step reads without having the right to shows up as NaN logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        quantize: bool,
        num_slots: int,
        max_length: int,
        max_rows: int,
        global_page_tokens: int,
        window_page_rows: int,
        seed: int,
    ) -> None:
        self._window = config.sliding_window
        self._columns = -(-(self._window + max_rows) // window_page_rows) + 1
        global_columns = -(-max_length // global_page_tokens)
        self.pools = CachePools(
            config,
            num_global_pages=1 + num_slots * global_columns,
            num_window_pages=1 + num_slots * self._columns,
            num_slots=num_slots,
            global_page_tokens=global_page_tokens,
            window_page_rows=window_page_rows,
            dtype=dtype,
            quantize=quantize,
        )
        for memory in (self.pools.global_pages, self.pools.window_pages, self.pools.tails):
            poison(memory)
        shuffle = random.Random(seed).sample
        self._free_global = shuffle(
            range(1, len(self.pools.global_pages)), num_slots * global_columns
        )
        self._free_window = shuffle(
            range(1, len(self.pools.window_pages)), num_slots * self._columns
        )
        self.global_tables = torch.zeros(num_slots, global_columns, dtype=torch.int32)
        self.window_tables = torch.zeros(num_slots, self._columns, dtype=torch.int32)
        self._retired = [0] * num_slots

    def view(self, slots: Sequence[int]) -> PagedCache:
        index = torch.tensor(slots)
        return PagedCache(
            self.pools,
            StepTables(index, self.global_tables[index], self.window_tables[index]),
        )

    def extend(self, slot: int, first: int, stop: int) -> None:
        """Pages for rows first … stop − 1, after freeing those wholly below the window."""
        rows = self.pools.layout.window_page_rows
        for page in range(self._retired[slot], max(0, first - self._window + 1) // rows):
            self._free_window_page(slot, page % self._columns)
            self._retired[slot] = page + 1
        for page in range(first // rows, -(-stop // rows)):
            if not self.window_tables[slot, page % self._columns]:
                self.window_tables[slot, page % self._columns] = self._free_window.pop()
        for page in range(-(-stop // self.pools.layout.global_page_tokens)):
            if not self.global_tables[slot, page]:
                self.global_tables[slot, page] = self._free_global.pop()

    def adopt(self, slot: int, owner: int, hit: int, first: int) -> None:
        """Give `slot` the global pages of the first `hit` tokens of `owner`; it starts at
        `first`, with no window page and a foreign tail."""
        pages = -(-hit // self.pools.layout.global_page_tokens)
        self.global_tables[slot, :pages] = self.global_tables[owner, :pages]
        self._retired[slot] = first // self.pools.layout.window_page_rows

    def release_private(self, slot: int) -> None:
        """Free the window pages and poison the tail: what preemption leaves of a slot."""
        for column in range(self._columns):
            self._free_window_page(slot, column)
        poison(self.pools.tails[slot])
        self._retired[slot] = 0

    def _free_window_page(self, slot: int, column: int) -> None:
        page = int(self.window_tables[slot, column])
        if page:
            poison(self.pools.window_pages[page])
            self._free_window.insert(0, page)
            self.window_tables[slot, column] = 0


def poison(memory: torch.Tensor) -> None:
    """NaN in every value; 0xFF is NaN as an E4M3 code and as an E8M0 scale."""
    memory.fill_(0xFF if memory.dtype == torch.uint8 else float("nan"))
