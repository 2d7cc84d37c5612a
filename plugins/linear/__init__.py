"""The linear layer and the row tiling that makes CPU results independent of the batch."""

from plugins.linear.reference import linear, linear_pair, wide_linear, wide_linear_pair
from plugins.linear.tiles import ROW_TILE, row_tiled
from plugins.linear.weight import (
    LinearWeight,
    Matrix,
    PackedFormat,
    PackedLinearWeight,
    PackedMatrix,
)

__all__ = [
    "ROW_TILE",
    "LinearWeight",
    "Matrix",
    "PackedFormat",
    "PackedLinearWeight",
    "PackedMatrix",
    "linear",
    "linear_pair",
    "row_tiled",
    "wide_linear",
    "wide_linear_pair",
]
