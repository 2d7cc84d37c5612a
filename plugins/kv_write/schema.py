"""Contracts of the cache write, alone and behind what makes a row of a projection."""

from plugins.schema import OperatorSchema, TensorSpec

SCHEMA = OperatorSchema(
    name="kv_write",
    inputs=(
        TensorSpec("values", ("n", "width")),
        TensorSpec("rows", ("slots", "width"), kind="rows", aliased=True),
        TensorSpec("slots", ("n",), kind="int64"),
    ),
    outputs=(),
    attributes=(),
    ties="rounding to the record's format is to nearest, ties to the even code",
    deterministic="a stored row depends on that row only; non-negative slots must be distinct",
    source="technical report, cache section; the released inference code",
)

_PLACES = (
    TensorSpec("positions", ("n",), kind="int64"),
    TensorSpec("inv_freq", ("R/2",), kind="float64"),
    TensorSpec("rows", ("slots", "width"), kind="rows", aliased=True),
    TensorSpec("slots", ("n",), kind="int64"),
)

ROTATED_WRITE = OperatorSchema(
    name="rotated_write",
    inputs=(
        TensorSpec("x", ("n", "width")),
        TensorSpec("norm", ("width",), optional=True),
        *_PLACES,
    ),
    outputs=(),
    attributes=("eps",),
    ties=SCHEMA.ties,
    deterministic="a stored row depends on that row, its position and the norm only; non-negative "
    "slots must be distinct",
    source=SCHEMA.source,
    composite=True,
)

NORM_AND_WRITE = OperatorSchema(
    name="norm_and_write",
    inputs=(
        TensorSpec("latent", ("n", "K")),
        TensorSpec("latent_norm", ("K",)),
        TensorSpec("x", ("n", "width")),
        TensorSpec("norm", ("width",)),
        *_PLACES,
    ),
    outputs=(TensorSpec("normed", ("n", "K")),),
    attributes=("eps",),
    ties=SCHEMA.ties,
    deterministic=ROTATED_WRITE.deterministic,
    source=SCHEMA.source,
    composite=True,
)
