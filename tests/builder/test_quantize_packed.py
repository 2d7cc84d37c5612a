"""Packed weights: bytes at rest, and the same bits as weights that are decoded at load."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from builder.layout import all_weights
from builder.presets import FULL
from engine.directory import Engine
from engine.network import Network
from engine.network.device import moved
from engine.network.run import ForwardMode, run_forward
from plugins.formats.nvfp4 import dequantize_weight, quantize_weight
from plugins.formats.records import nvfp4_engram_record
from plugins.formats.released import (
    dequantize_fp4_rows,
    dequantize_fp8_blocks,
    dequantize_fp8_rows,
    quantize_fp4_rows,
    quantize_fp8_blocks,
    quantize_fp8_rows,
)
from plugins.formats.rows import PackedRows
from plugins.linear import LinearWeight, PackedFormat, PackedLinearWeight, PackedMatrix, linear
from plugins.moe import ExpertWeights, PackedExpertWeights, moe
from plugins.registry import OPERATORS
from plugins.wo_a import wo_a

FORMATS = tuple(PackedFormat)
# Bytes of one value in each format, worked out by hand: codes plus a share of a scale.
BYTES_PER_VALUE = {
    PackedFormat.FP8_BLOCKS: 1 + 1 / 1024,
    PackedFormat.FP4_ROWS: 1 / 2 + 1 / 32,
    PackedFormat.MXFP8: 1 + 1 / 32,
    PackedFormat.NVFP4: 1 / 2 + 1 / 16,
}


def pack(values: torch.Tensor, kind: PackedFormat, dtype: torch.dtype) -> PackedMatrix:
    global_scale = None
    if kind is PackedFormat.NVFP4:
        codes, scale, global_scale = quantize_weight(values)
    else:
        codes, scale = {
            PackedFormat.FP8_BLOCKS: quantize_fp8_blocks,
            PackedFormat.FP4_ROWS: quantize_fp4_rows,
            PackedFormat.MXFP8: quantize_fp8_rows,
        }[kind](values)
    rows, columns = values.shape
    return PackedMatrix(kind, (rows, columns), codes, scale.view(torch.uint8), global_scale, dtype)


def by_hand(matrix: PackedMatrix) -> np.ndarray:
    """float64 values from the stored bytes, one scale after the other."""
    raw = matrix.codes.view(torch.uint8).numpy()
    if matrix.format in (PackedFormat.FP4_ROWS, PackedFormat.NVFP4):
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = np.empty(matrix.shape)
        codes[:, 0::2], codes[:, 1::2] = table[raw & 15], table[raw >> 4]
    else:
        codes = matrix.codes.view(torch.float8_e4m3fn).double().numpy()
    if matrix.format is PackedFormat.NVFP4:
        assert matrix.global_scale is not None
        scale = matrix.scale.view(torch.float8_e4m3fn).double().numpy() * float(matrix.global_scale)
    else:
        scale = 2.0 ** (matrix.scale.numpy().astype(np.int64) - 127)
    if matrix.format is PackedFormat.FP8_BLOCKS:
        scale = scale.repeat(32, axis=0)[: matrix.shape[0]]
    group = 16 if matrix.format is PackedFormat.NVFP4 else 32
    return codes * scale.repeat(group, axis=1)[:, : matrix.shape[1]]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(1, 64), (33, 96), (4100, 64)])  # the last in several chunks
def test_decoded_values_are_the_stored_bytes(kind: PackedFormat, shape: tuple[int, int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    matrix = pack(values, kind, torch.float64)
    exact = by_hand(matrix)
    np.testing.assert_array_equal(matrix.dequantize().numpy(), exact)
    # No value is further off than the widest step of its format allows.
    assert np.abs(exact - values.numpy()).max() <= np.abs(values.numpy()).max() / 4
    for dtype in (torch.float32, torch.bfloat16):
        narrow = replace(matrix, dtype=dtype).dequantize()
        if kind is PackedFormat.NVFP4:  # scale · global rounds in float32
            torch.testing.assert_close(narrow.double(), torch.from_numpy(exact), rtol=4e-3, atol=0)
        else:
            assert torch.equal(narrow.double(), torch.from_numpy(exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMATS)
def test_tables_give_the_bits_of_the_formats(kind: PackedFormat, dtype: torch.dtype) -> None:
    """Every byte of codes, scales over the whole range: look-up against the plain decoders."""
    rows = 256
    codes = torch.arange(rows * 64, dtype=torch.int32).to(torch.uint8).view(rows, 64)
    draw = torch.Generator().manual_seed(3)
    scale_shape = {
        PackedFormat.FP8_BLOCKS: (8, 2),
        PackedFormat.FP4_ROWS: (rows, 4),
        PackedFormat.MXFP8: (rows, 2),
        PackedFormat.NVFP4: (rows, 8),
    }[kind]
    scale = torch.randint(0, 255, scale_shape, generator=draw).to(torch.uint8)
    columns = 128 if kind in (PackedFormat.FP4_ROWS, PackedFormat.NVFP4) else 64
    global_scale = torch.tensor(0.0123) if kind is PackedFormat.NVFP4 else None
    matrix = PackedMatrix(kind, (rows, columns), codes, scale, global_scale, dtype)
    plain = {
        PackedFormat.FP8_BLOCKS: dequantize_fp8_blocks,
        PackedFormat.FP4_ROWS: dequantize_fp4_rows,
        PackedFormat.MXFP8: dequantize_fp8_rows,
    }
    expected = (
        dequantize_weight(codes, scale, global_scale, dtype)
        if global_scale is not None
        else plain[kind](codes, scale, dtype)
    )
    torch.testing.assert_close(matrix.dequantize(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", FORMATS)
def test_bytes_at_rest(kind: PackedFormat) -> None:
    matrix = pack(torch.randn(2304, 640), kind, torch.bfloat16)
    per_value = matrix.nbytes / (2304 * 640)
    assert per_value == pytest.approx(BYTES_PER_VALUE[kind], rel=1e-4)
    limit = {PackedFormat.NVFP4: 0.30, PackedFormat.MXFP8: 0.55}.get(kind, 0.55)
    assert per_value <= limit * 2


def test_weight_bytes_of_the_released_model() -> None:
    """Everything that stays unquantised counts; embedding and head do not."""
    totals = dict.fromkeys(("bfloat16", "nvfp4", "mxfp8"), 0)
    for weight in all_weights(FULL):
        if weight.name in ("embed.weight", "head.weight"):
            continue
        plain = math.prod(weight.shape) * (4 if weight.storage == "f32" else 2)
        totals["bfloat16"] += plain
        for format in ("nvfp4", "mxfp8"):
            stays = weight.storage in ("bf16", "f32")
            stored = {} if stays else weight.requantized(format)
            totals[format] += plain if stays else sum(i.num_bytes for i in stored.values())
    assert totals["nvfp4"] <= 0.30 * totals["bfloat16"]
    assert totals["mxfp8"] <= 0.55 * totals["bfloat16"]
    # 4.5 and 8.25 bits of 16, and a little for what stays.
    assert totals["nvfp4"] / totals["bfloat16"] == pytest.approx(4.5 / 16, rel=2e-3)
    assert totals["mxfp8"] / totals["bfloat16"] == pytest.approx(8.25 / 16, rel=2e-3)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_give_the_bits_of_weights_decoded_at_load(
    kind: PackedFormat, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(21, 64, generator=draw).to(dtype)
    matrix = pack(torch.randn(96, 64, generator=draw), kind, dtype)
    loaded = LinearWeight(matrix.dequantize(), quantized_input=True)
    packed = PackedLinearWeight(matrix, quantized_input=True)
    assert torch.equal(linear(x, packed), linear(x, loaded))
    heads = x.view(21, 2, 32)
    grouped = pack(torch.randn(64, 32, generator=draw), kind, dtype)
    assert torch.equal(
        wo_a(heads, PackedLinearWeight(grouped, False), 2),
        wo_a(heads, LinearWeight(grouped.dequantize(), False), 2),
    )
    stacks = [
        [pack(torch.randn(shape, generator=draw), kind, dtype) for _ in range(5)]
        for shape in ((96, 64), (96, 64), (64, 96))
    ]
    ids = torch.rand(21, 5, generator=draw).argsort(dim=1)[:, :2]
    weights = torch.rand(21, 2, generator=draw)

    def run(experts: ExpertWeights, rows: slice) -> torch.Tensor:
        return moe(x[rows], ids[rows], weights[rows], experts, experts, swiglu_limit=7.0)

    packed_experts = PackedExpertWeights(*stacks, dtype, True)
    dense = [torch.stack([one.dequantize() for one in stack]) for stack in stacks]
    together = run(packed_experts, slice(None))
    assert torch.equal(together, run(ExpertWeights(*dense, True), slice(None)))
    alone = torch.cat([run(packed_experts, slice(row, row + 1)) for row in range(21)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", FORMATS)
def test_packed_weights_are_decoded_on_the_device_they_were_moved_to(
    kind: PackedFormat, dtype: torch.dtype
) -> None:
    """Fake tensors refuse an operation on tensors of two devices, as a GPU would."""
    x = torch.randn(3, 64)
    linears = PackedLinearWeight(pack(torch.randn(96, 64), kind, dtype), True)
    stack = [pack(torch.randn(64, 64), kind, dtype)]
    rows = PackedRows(torch.zeros(5, 36, dtype=torch.uint8), nvfp4_engram_record(64, 0.01))
    weights = (linears, PackedExpertWeights(stack, stack, stack, dtype, True), rows)
    on_device, experts, table = moved(weights, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = OPERATORS["linear"].reference(x.to("meta", dtype), on_device)
        assert (y.shape, y.dtype, y.device.type) == ((3, 96), dtype, "meta")
        assert experts.w2.device.type == "meta"
        read = table.read(torch.zeros(2, dtype=torch.int64, device="meta"), dtype)
        assert (read.shape, read.device.type) == ((2, 64), "meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_engine_computes_what_the_unpacked_one_does(
    released_engine: Path, dtype: torch.dtype
) -> None:
    engine = Engine.open(released_engine)
    tokens = np.arange(3, 300, 11)
    unpacked, packed = (
        run_forward(
            Network(engine.config, engine.load_weights(dtype, packed=keep)),
            tokens,
            ForwardMode.FULL,
        )
        for keep in (False, True)
    )
    assert unpacked.keys() == packed.keys()
    for name, values in unpacked.items():
        assert torch.equal(values, packed[name]), name


def test_expert_bytes_of_a_packed_engine(released_engine: Path) -> None:
    engine = Engine.open(released_engine)
    layer = engine.load_weights(torch.bfloat16, packed=True).layers[0]
    routed = layer.moe.routed
    assert isinstance(routed, PackedExpertWeights)
    config = engine.config
    values = config.moe_intermediate_size * config.hidden_size
    for stack in routed.matrices():
        assert sum(one.nbytes for one in stack) == config.n_routed_experts * values * 17 // 32
