"""What the symbolic dimensions of an exported segment may be, and the shapes that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config import ModelConfig
from engine.directory import BuildConfig
from engine.paged_cache import PoolLayout
from engine.segments import least_context
from plugins.graph_dims import evaluate
from plugins.tensorrt_library import TensorRtError

Shape = tuple[int, ...]
# The memory of a machine that may not be this one limits the pools; TensorRT counts in 32 bits.
_MOST_PAGES = 2**31 - 1
# What a plan is tuned for: decode steps of a full batch over contexts of this many tokens.
_USUAL_CONTEXT = 4096


@dataclass(frozen=True)
class Range:
    """`optimum` is what the library tunes for."""

    minimum: int
    optimum: int
    maximum: int


def shapes(
    name: str, dims: Sequence[int | str], ranges: Mapping[str, Range]
) -> tuple[Shape, Shape, Shape]:
    """The smallest, the tuned and the largest shape of input `name`.

    `dims` are sizes and formulas of the symbols that `ranges` has. Raises TensorRtError for
    another symbol.
    """
    bounds = ("minimum", "optimum", "maximum")
    sizes = [
        {symbol: getattr(given, bound) for symbol, given in ranges.items()} for bound in bounds
    ]
    try:
        smallest, tuned, largest = (
            tuple(dim if isinstance(dim, int) else evaluate(dim, known) for dim in dims)
            for known in sizes
        )
    except (KeyError, ValueError, SyntaxError) as error:
        raise TensorRtError(
            f"expected the dims {list(dims)} of input {name} to follow from the symbols "
            f"{', '.join(ranges)}, got {error}; export the segment again"
        ) from None
    return smallest, tuned, largest


def segment_ranges(
    segment: str, config: ModelConfig, build: BuildConfig, layout: PoolLayout
) -> dict[str, Range]:
    """The varying sizes of `segment` (engine/segments.py) within the limits of an engine.

    Rows that a step may lack altogether start from 0.
    """
    rows, requests = build.max_num_tokens, build.max_batch_size

    def at_most(largest: int, usual: int, smallest: int = 1) -> Range:
        return Range(smallest, max(smallest, min(usual, largest)), max(smallest, largest))

    def pages(tokens: int, of: int) -> int:
        return -(-tokens // of)

    window = config.sliding_window
    window_columns = pages(window - 1 + rows, layout.window_page_rows) + 1
    return {
        "rows": at_most(rows, requests),
        "requests": at_most(requests, requests),
        "decoder_rows": at_most(rows, requests, 0 if segment == "encoder" else 1),
        "logit_rows": at_most(rows, requests, 0),
        "context": at_most(build.max_seq_len, _USUAL_CONTEXT, least_context(config)),
        "global_columns": at_most(
            pages(build.max_seq_len, layout.global_page_tokens),
            pages(_USUAL_CONTEXT, layout.global_page_tokens),
        ),
        "window_columns": at_most(window_columns, pages(window, layout.window_page_rows) + 1),
        "num_global_pages": at_most(_MOST_PAGES, 4096),
        "num_window_pages": at_most(_MOST_PAGES, 4096),
        "num_slots": at_most(requests, requests),
        "context_rows": at_most(rows, requests),
        "anchors": at_most(requests, requests),
    }
