"""Values that no network can compute with, found while a tensor is copied."""

from __future__ import annotations

import math

import torch

from engine.tensor_source import FLOAT_DTYPES, CheckpointError
from plugins.formats.rounding import E8M0_BIAS, E8M0_NAN

# No trained weight comes near it, and a sum of such products leaves float32's range.
HUGE = 2.0**100
_HUGE_E8M0 = 100 + E8M0_BIAS
_E4M3_NAN = 0x7F
_CHUNK_VALUES = 4 << 20


def check_values(name: str, stored: torch.Tensor, dtype: str, first_row: int = 0) -> bool:
    """Whether a magnitude is HUGE or larger, of floats or of E8M0 scales.

    `stored` are rows of the tensor `name` from `first_row` on, `dtype` is its stored dtype. Raises
    CheckpointError naming the tensor and the row for a NaN or an infinity; FP4 codes have none.
    """
    rows = stored if stored.dim() > 1 else stored.view(-1, 1)
    step = max(1, _CHUNK_VALUES // max(1, rows[:1].numel()))
    huge = False
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step].flatten(1)
        if chunk.numel():
            huge |= _check(name, chunk, dtype, first_row + start)
    return huge


def _check(name: str, rows: torch.Tensor, dtype: str, first_row: int) -> bool:
    if dtype in FLOAT_DTYPES:
        largest = float(rows.abs().amax())  # of a NaN, NaN
        if not math.isfinite(largest):
            _refuse(name, ~torch.isfinite(rows), first_row)
        return largest >= HUGE
    codes = rows.view(torch.uint8)
    if dtype == "F8_E4M3":
        wrong = codes.bitwise_and(_E4M3_NAN) == _E4M3_NAN
    elif dtype == "F8_E8M0" or (dtype == "U8" and name.endswith(".weight_scale")):  # ModelOpt's
        largest = int(codes.max())
        if largest < E8M0_NAN:
            return largest >= _HUGE_E8M0
        wrong = codes == E8M0_NAN
    else:
        return False
    if bool(wrong.any()):
        _refuse(name, wrong, first_row)
    return False


def _refuse(name: str, wrong: torch.Tensor, first_row: int) -> None:
    row = first_row + int(wrong.any(1).nonzero()[0])
    raise CheckpointError(f"{name} holds a NaN or an infinity in row {row}; repair the checkpoint")


def huge_warning(name: str) -> str:
    return (
        f"{name} holds magnitudes of {HUGE:.2g} or more, whose products may overflow; look at the "
        "checkpoint"
    )
