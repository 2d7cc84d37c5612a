"""Expert weights as the kernels see them: a table of addresses, and formats known to compilers.

The table is made when experts are first used on a device, and kept with them: an expert's matrices
may lie anywhere, and a captured graph keeps the addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from plugins.device.launch import limits
from plugins.device.weights import MXFP4, device_weight
from plugins.linear.weight import Matrix, PackedFormat, PackedMatrix
from plugins.moe.reference import ExpertWeights

# Beside the numbers of plugins/device/weights.py.
VALUES = 8  # in the compute dtype
FLOAT8 = 9  # released FP4 whose groups' powers are near enough for E4M3: kernel_float8.py
# Powers of two between the groups of a row, at most: of FP4, exact as E4M3, and of MXFP8, whose
# rows' small values lose bits as E4M3 with one power a row.
SPREAD = 11
MXFP8_SPREAD = 8
_KEPT_AS = "_on_device"


class Stored(NamedTuple):
    """A number of plugins/device/weights.py or one of the above; whether scales are read in words
    of four."""

    stored: int
    words: bool


class DeviceExperts(NamedTuple):
    """`table` int64 [E, 9]: addresses of codes, scales and global scale of w1, w3 and w2; of values
    the first alone. Exponents uint8 [E, 2, I] and [E, D]: the largest scale byte of each row of w1
    and w3, and of w2, for FLOAT8, and of MXFP8 where `many`: kernel_hopper.py takes them. `kept`
    holds what the table points to."""

    num_experts: int
    inter: int
    quantized: bool
    gate_up: Stored
    down: Stored
    table: torch.Tensor
    gate_up_exponents: torch.Tensor
    down_exponents: torch.Tensor
    many: bool
    kept: tuple[torch.Tensor, ...]


def device_experts(experts: ExpertWeights, dtype: torch.dtype) -> DeviceExperts | None:
    """None for experts that kernels do not take: several formats, groups that are not whole,
    calibrated NVFP4 inputs, or another dtype than the rows'."""
    known = vars(experts).get(_KEPT_AS)
    if known is None or known[0] != dtype:
        known = dtype, _make(experts, dtype)
        object.__setattr__(experts, _KEPT_AS, known)
    made: DeviceExperts | None = known[1]
    return made


def _make(experts: ExpertWeights, dtype: torch.dtype) -> DeviceExperts | None:
    if experts.input_scale is not None:
        return None
    w1, w3, w2 = experts.matrices()
    kept: list[torch.Tensor] = []
    addresses: list[list[int]] = []
    formats: list[set[Stored]] = [set(), set()]
    for matrices in zip(w1, w3, w2, strict=True):
        addresses.append([])
        for place, matrix in enumerate(matrices):
            one = _stored(matrix, dtype)
            if one is None:
                return None
            stored, tensors = one
            formats[place // 2].add(stored)
            addresses[-1] += [x.data_ptr() for x in tensors]
            kept += tensors
    if not addresses:
        device = experts.w1.device
        none = torch.zeros(1, 9, dtype=torch.int64, device=device)
        value = Stored(VALUES, False)
        return DeviceExperts(
            0, experts.w1.shape[1], False, value, value, none, none, none, False, ()
        )
    if any(len(group) > 1 for group in formats):
        return None
    gate_up, down = (next(iter(group)) for group in formats)
    table = torch.tensor(addresses, dtype=torch.int64, device=kept[0].device)
    exponents: list[torch.Tensor] = [table, table]
    many = False
    inter, hidden = _shape(w1[0])
    if dtype == torch.bfloat16 and experts.quantized_input and limits(table.device).float8:
        many_up, both = _examined([m for pair in zip(w1, w3, strict=True) for m in pair])
        many_down, last = _examined(list(w2))
        many = many_up and many_down and gate_up == down
        if both is not None:
            gate_up, exponents[0] = _as_float8(gate_up), both.view(-1, 2, inter)
        if last is not None:
            down, exponents[1] = _as_float8(down), last.view(-1, hidden)
    return DeviceExperts(
        len(addresses), inter, experts.quantized_input, gate_up, down, table, exponents[0],
        exponents[1], many, tuple(kept),
    )  # fmt: skip


def _shape(matrix: Matrix) -> tuple[int, int]:
    rows, columns = matrix.shape if isinstance(matrix, torch.Tensor | PackedMatrix) else (0, 0)
    return rows, columns


def _stored(matrix: Matrix, dtype: torch.dtype) -> tuple[Stored, list[torch.Tensor]] | None:
    """A matrix's format and the tensors of its codes, scales and global scale."""
    if isinstance(matrix, torch.Tensor):
        if matrix.dtype != dtype:
            return None
        values = matrix.contiguous()
        return Stored(VALUES, False), [values, values, values]
    if not isinstance(matrix, PackedMatrix) or matrix.dtype != dtype:
        return None
    weight = device_weight(matrix)
    if weight is None:
        return None
    tensors = [_aligned(x) for x in (weight.codes, weight.scale, weight.global_scale)]
    return Stored(weight.stored, weight.words), tensors


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy: addresses out of a table are taken to be multiples of 16."""
    return x.clone() if x.data_ptr() % 16 else x


def _as_float8(stored: Stored) -> Stored:
    return Stored(FLOAT8, True) if stored.stored == MXFP4.value else stored


def _examined(matrices: Sequence[Matrix]) -> tuple[bool, torch.Tensor | None]:
    """Whether kernel_hopper.py may take them, and if so, uint8 [M, N]: the largest scale byte of
    each row, of groups that are not all zeros; NVFP4 has none.

    It takes NVFP4, and released FP4 and MXFP8 without NaN whose rows' groups lie within SPREAD or
    MXFP8_SPREAD of each other."""
    rows: list[torch.Tensor] = []
    within = []
    for matrix in matrices:
        if not isinstance(matrix, PackedMatrix) or matrix.shape[1] % 128:
            return False, None
        scale, codes = matrix.scale.view(torch.uint8), matrix.codes.view(torch.uint8)
        if matrix.format is PackedFormat.NVFP4:
            continue
        if matrix.format is PackedFormat.FP4_ROWS:
            spread, codes = SPREAD, codes & 0x77
        elif matrix.format is PackedFormat.MXFP8:
            spread, codes = MXFP8_SPREAD, codes & 0x7F
            within.append((codes < 0x7F).all(1))
        else:
            return False, None
        used = (codes != 0).view(*scale.shape, -1).any(-1)
        high = scale.masked_fill(~used, 0).amax(1)
        low = scale.masked_fill(~used, 255).amin(1)
        within.append((high < 255) & (high.int() - low.int() <= spread))
        rows.append(high)
    if within and not bool(torch.cat(within).all()):
        return False, None
    return True, torch.stack(rows) if rows else None
