"""What the symbolic dimensions of an exported segment may be, and the shapes that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plugins.graph_dims import evaluate
from plugins.tensorrt_library import TensorRtError

Shape = tuple[int, ...]


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
