"""Bytes of cache per page and per slot, as plain integers: the one formula that sizes and admits.

Imports no torch, so the scheduler can use it. `value_bytes` is None for packed records (cache
quantisation on) and the bytes of one plain value otherwise.
"""

from __future__ import annotations

import math

from engine.config import ModelConfig
from plugins.formats.sizes import index_row_bytes, main_row_bytes, window_row_bytes

MIN_TAIL_CAPACITY = 8


def page_granule(config: ModelConfig) -> int:
    """Global pages are a multiple of this many tokens, so that no entry straddles two."""
    return math.lcm(2, config.max_ratio)


def default_global_page_tokens(config: ModelConfig) -> int:
    """Two windows: the granule of prefix hits."""
    granule = page_granule(config)
    return -(-2 * config.sliding_window // granule) * granule


def default_window_page_rows(config: ModelConfig) -> int:
    """A quarter of the window."""
    return max(1, config.sliding_window // 4)


def tail_capacity(config: ModelConfig) -> int:
    """Compressor rows that a request keeps per ratio-2 source.

    A verify step of k drafts writes k + 1 rows; rolling all but one of them back must still leave
    the row that opened the pair: k + 2 rows, as the next power of two.
    """
    needed = config.dspark_block_size + 2
    return max(MIN_TAIL_CAPACITY, 1 << (needed - 1).bit_length())


def tail_bytes(config: ModelConfig, *, value_bytes: int = 4) -> int:
    """Bytes of one slot's compressor tails: rows (a, b), never quantised, over the sources."""
    sources = len(config.pair_source_layer_ids)
    return sources * tail_capacity(config) * 2 * config.head_dim * value_bytes


def entry_bytes(config: ModelConfig, *, value_bytes: int | None = None) -> tuple[int, int]:
    """Bytes of one main entry and of one index key."""
    if value_bytes is not None:
        return config.head_dim * value_bytes, config.index_head_dim * value_bytes
    return main_row_bytes(config.head_dim), index_row_bytes(config.index_head_dim)


def global_page_bytes(
    config: ModelConfig, page_tokens: int, *, value_bytes: int | None = None
) -> int:
    """Bytes of one global page: main entries and index keys of every source for `page_tokens`.

    890 bytes a token at the released dims. Raises ValueError when a pair would straddle pages.
    """
    if page_tokens < 1 or page_tokens % config.max_ratio:
        raise ValueError(
            f"expected a global page of a positive multiple of {config.max_ratio} tokens, "
            f"got {page_tokens}; entries must not straddle pages"
        )
    main, index = entry_bytes(config, value_bytes=value_bytes)
    entries = sum(page_tokens // config.ratio(source) for source in config.kv_source_layer_ids)
    return entries * (main + index)


def window_page_bytes(
    config: ModelConfig, page_rows: int, *, value_bytes: int | None = None
) -> int:
    """Bytes of one window page: `page_rows` rows of every layer, draft stages included."""
    if page_rows < 1:
        raise ValueError(f"expected a window page of at least one row, got {page_rows}")
    row = (
        window_row_bytes(config.head_dim) if value_bytes is None else config.head_dim * value_bytes
    )
    return config.num_layers_total * page_rows * row
