"""The expert kernels: routing against Python, products against float64, the whole operator."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from expert_oracle import experts, in_float64, no_experts, on_device, relative
from kernel_oracle import DEVICE, load_kernel

from plugins.formats import mxfp8
from plugins.moe import ExpertWeights, PackedExpertWeights, moe
from plugins.moe.cases import CASES, MoeCase

kernel = load_kernel("moe")
# Where the operator's module loads, so do its others.
NAMES = ("device_weights", "kernel_float8", "kernel_product", "kernel_route")
device_weights, kernel_float8, kernel_product, kernel_route = (
    importlib.import_module(f"plugins.moe.{name}") for name in NAMES
)
kernel_shared = importlib.import_module("plugins.moe.kernel_shared")

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case(case: MoeCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    ours = kernel.moe(**on_device(operands))
    assert ours.dtype == dtype
    assert ours.shape == (case.rows, case.width)
    # A code at a rounding border may flip in narrow types; the interpreter cuts off bfloat16.
    limit = 2e-6 if dtype == torch.float32 and not case.quantized_input else 3e-2
    assert relative(ours, in_float64(operands)) < limit


@pytest.mark.parametrize(
    ("routed", "shared", "spread", "stored"),
    [
        ("fp4", "fp8", 5, device_weights.FLOAT8),
        ("fp4", "fp8", 14, 2),
        ("nvfp4", "mxfp8", 3, 3),
        ("mxfp8", "nvfp4", 3, 1),
    ],
)
def test_packed_experts(routed: str, shared: str, spread: int, stored: int) -> None:
    dtype = torch.bfloat16
    of = experts(4, 128, 128, routed, dtype, spread)
    known = device_weights.device_experts(of, dtype)
    assert known.gate_up.stored == known.down.stored == stored
    draw = torch.Generator().manual_seed(1)
    operands = {
        "u": torch.randn(3, 128, generator=draw).to(dtype),
        "ids": torch.rand(3, 4, generator=draw).argsort(1)[:, :2],
        "weights": torch.rand(3, 2, generator=draw),
        "routed": of,
        "shared": experts(1, 128, 128, shared, dtype),
        "swiglu_limit": 10.0,
    }
    ours = kernel.moe(**on_device(operands))
    assert relative(ours, in_float64(operands)) < 4e-2


@pytest.mark.parametrize(
    ("name", "spread", "tolerance"),
    [("fp4", 9, 3e-6), ("fp4", 14, 1e-6), ("mxfp8", 0, 1e-6), ("fp8", 0, 1e-6)],
)
def test_products_of_packed_weights_are_exact_up_to_summation(
    name: str, spread: int, tolerance: float
) -> None:
    """`down` alone: its inputs need no rounding, and these weights none in bfloat16."""
    dtype, count, hidden, inter = torch.bfloat16, 2, 160, 256
    of = device_weights.device_experts(experts(count, hidden, inter, name, dtype, spread), dtype)
    none = device_weights.device_experts(no_experts(hidden, inter, dtype), dtype)
    assert (of.down.stored == device_weights.FLOAT8) == (name == "fp4" and spread == 9)
    draw = torch.Generator().manual_seed(2)
    activation = torch.randn(5, inter, generator=draw) * 10.0 ** torch.arange(-2.0, 3.0)[:, None]
    activation = mxfp8.ACTIVATION.round(activation.to(dtype))
    rounding = kernel._rounding(activation.to(DEVICE), of, none, of.down.stored, 5)
    a = kernel._round(rounding, none.table.device)
    segments = torch.tensor([[1, 0, 3], [0, 3, 2]], dtype=torch.int32, device=DEVICE)
    y = torch.full((5, hidden), torch.nan, device=DEVICE)
    kernel_product.down[(1, 2, 2)](
        a.values, a.shared, a.codes, a.powers, segments, of.table, of.down_exponents, none.table,
        y, 5, 5, SHARED=0, WIDTH=hidden, INTER=inter, STORED=of.down.stored, WORDS=of.down.words,
        SHARED_STORED=device_weights.VALUES, SHARED_WORDS=False, TILE=128, INNER=128, ROWS=16,
        SHARED_ROWS=16, SHARED_INNER=128, HARDWARE=kernel._hardware(y.device),
        DOT=kernel.tl.bfloat16,
        WARPS=4, WIDEN=kernel.INTERPRETED, **kernel._launch(y.device),
    )  # fmt: skip
    w2 = experts(count, hidden, inter, name, dtype, spread).w2.cpu().double()
    expected = torch.cat([activation[:3].double() @ w2[1].T, activation[3:].double() @ w2[0].T])
    for row, right in zip(y, expected, strict=True):
        # On a GPU, sums of 256 products inside the tensor core keep 14 bits.
        assert relative(row, right) < (1e-3 if DEVICE == "cuda" else tolerance)


@pytest.mark.parametrize("stored", ["fp8", "mxfp8", "values"])
def test_shared_experts_of_many_rows_stand_apart(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_shared, "DECODED_ROWS", 3)
    dtype = torch.bfloat16
    operands = MoeCase("many", 3, 128, 128, 4, 2, shared=2).operands(dtype)
    operands["routed"] = experts(4, 128, 128, "fp4", dtype)
    if stored != "values":
        operands["shared"] = experts(2, 128, 128, stored, dtype)
    ours = kernel.moe(**on_device(operands))
    assert relative(ours, in_float64(operands)) < 3e-2


@pytest.mark.parametrize(
    ("rows", "width"), [(120, 256)] if DEVICE == "cpu" else [(120, 512), (230, 512)]
)
def test_many_rows_of_an_expert(rows: int, width: int) -> None:
    """On compute capability 9.0 by kernel_hopper.py: blocks that are full and one that is not."""
    dtype, of = torch.bfloat16, experts(3, width, width, "fp4", torch.bfloat16, spread=5)
    draw = torch.Generator().manual_seed(4)
    operands = on_device(
        {
            "u": torch.randn(rows, width, generator=draw).to(dtype),
            "ids": torch.rand(rows, 3, generator=draw).argsort(1)[:, :2],
            "weights": torch.rand(rows, 2, generator=draw),
            "routed": of,
            "shared": experts(1, width, width, "fp8", dtype),
            "swiglu_limit": 10.0,
        }
    )
    known = device_weights.device_experts(of, dtype)
    on_hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    assert kernel._takes_hopper(operands["u"], known, 2 * rows) == on_hopper
    whole = kernel.moe(**operands)
    assert relative(whole, in_float64(operands)) < 4e-2
    if DEVICE == "cuda":  # the interpreter has no races
        assert torch.equal(kernel.moe(**operands), whole)
    operands["u"][7, 5] = torch.nan
    poisoned = kernel.moe(**operands)
    assert poisoned[7].isnan().all()
    others = torch.arange(rows, device=whole.device) != 7
    assert torch.equal(poisoned[others], whole[others])


def test_without_shared_experts() -> None:
    operands = MoeCase("no shared", 4, 64, 32, 4, 2).operands(torch.float32)
    operands["shared"] = no_experts(64, 32, torch.float32)
    expected = in_float64(operands)
    assert relative(kernel.moe(**on_device(operands)), expected) < 2e-6
    none = torch.empty(0, 32, 64)
    operands["shared"] = ExpertWeights(none, none, none.transpose(1, 2), quantized_input=False)
    assert relative(moe(**operands), expected) < 2e-6


@pytest.mark.parametrize("rows", [1, 5, 21])
@pytest.mark.parametrize("spread", ["random", "one expert", "highest first"])
def test_pairs_are_grouped_by_expert(rows: int, spread: str) -> None:
    """Chunks of 16 pairs, so that experts and counts cross their borders."""
    count, k = 7, 3
    ids = MoeCase("route", rows, 32, 32, count, k, spread=spread).operands(torch.float32)["ids"]
    pairs, hit = rows * k, min(count, rows * k)
    segments = torch.full((hit, 3), -7, dtype=torch.int32, device=DEVICE)
    order, places = torch.full((2, pairs), -7, dtype=torch.int32, device=DEVICE)
    number = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    on_device = ids.to(DEVICE)

    def route(segments: torch.Tensor, most: int) -> None:
        """Without rows to round."""
        x = torch.zeros(1, 128, device=DEVICE)
        kernel_route.route[(hit,)](
            on_device, pairs, count, hit, segments, number, order, places, x, 128, x, x, x, x, 0, 0,
            16, 16, most, 128, 128, 0, False, False, False, False, False, False,
        )  # fmt: skip

    route(segments, 0)
    flat = ids.flatten().tolist()
    expected = sorted(range(pairs), key=lambda pair: (flat[pair], pair))
    assert order.tolist() == expected
    assert [expected[place] for place in places.tolist()] == list(range(pairs))
    chosen = sorted(set(flat))
    wanted = [[e, sum(x < e for x in flat), flat.count(e)] for e in chosen]
    assert segments[: len(chosen)].tolist() == wanted
    assert segments[len(chosen) :, 2].tolist() == [0] * (hit - len(chosen))

    parts = torch.full((hit + pairs // 4, 3), -7, dtype=torch.int32, device=DEVICE)
    route(parts, 4)
    assert order.tolist() == expected
    wanted = [
        [expert, start + first, min(4, size - first)]
        for expert, start, size in wanted
        for first in range(0, size, 4)
    ]
    assert number.tolist() == [len(wanted)]
    assert parts.tolist() == wanted + [[-7] * 3] * (len(parts) - len(wanted))


def test_the_inline_assembly_looks_codes_up() -> None:
    """No interpreter runs it, so its instructions are followed here: eight nibbles become the
    negatives of their values times 2^shift, for every shift and every byte at every place."""
    lines = re.findall(r"(\w+)\.\w+(?:\.\w+)? ([^;]*);", kernel_float8.EIGHT_CODES.value)
    lines = [line for line in lines if line[0] != "reg"]
    assert len(lines) == 10

    def permuted(low: int, high: int, selector: int) -> int:
        table = (low | high << 32).to_bytes(8, "little")
        result = 0
        for place in range(4):
            nibble = selector >> 4 * place & 15
            byte = table[nibble & 7]
            byte = (0xFF if byte & 0x80 else 0) if nibble & 8 else byte
            result |= byte << 8 * place
        return result

    operations = {
        "mov": lambda a: a,
        "mad": lambda a, b, c: a * b + c & 0xFFFFFFFF,
        "and": lambda a, b: a & b,
        "shr": lambda a, b: a >> b,
        "prmt": permuted,
    }
    for shift in range(6 - device_weights.SPREAD, 7):
        tables = {
            "$3": shift * 0x08080800 + 0x3C383000 & 0xFFFFFFFF,
            "$7": shift * 0x08080808 + 0x4C484440 & 0xFFFFFFFF,
        }
        for first in range(0, 256, 4):
            word = int.from_bytes(range(first, first + 4), "little")
            registers = {"$2": word, **tables}
            for name, text in lines:
                target, *operands = text.split(", ")
                values = [registers[x] if x in registers else int(x, 0) for x in operands]
                registers[target] = operations[name](*values)
            codes = [*registers["$0"].to_bytes(4, "little"), *registers["$1"].to_bytes(4, "little")]
            ours = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            nibbles = [word >> 4 * i & 15 for i in range(8)]
            values = [E2M1[n & 7] * (-1 if n & 8 else 1) for n in nibbles]
            assert torch.equal(ours, -torch.tensor(values) * 2.0**shift)


def test_a_row_does_not_depend_on_the_batch() -> None:
    """Bit for bit on a GPU. The interpreter multiplies with numpy, whose sums on some CPUs depend
    on where in a tile a row lies."""
    operands = on_device(MoeCase("batch", 21, 64, 32, 4, 2).operands(torch.float32))
    whole = kernel.moe(**operands)
    for part in (slice(3, 4), slice(0, 9)):
        some = {name: operands[name][part] for name in ("u", "ids", "weights")}
        alone = kernel.moe(**{**operands, **some})
        if DEVICE == "cuda":
            assert torch.equal(alone, whole[part])
        else:
            torch.testing.assert_close(alone, whole[part], rtol=1e-6, atol=1e-6)


def test_a_poisoned_row_poisons_no_other_and_unchosen_experts_are_not_read() -> None:
    dtype = torch.bfloat16
    of = experts(4, 128, 128, "fp4", dtype)
    draw = torch.Generator().manual_seed(3)
    operands = on_device(
        {
            "u": torch.randn(3, 128, generator=draw).to(dtype),
            "ids": torch.tensor([[0, 2], [2, 0], [0, 2]]),
            "weights": torch.rand(3, 2, generator=draw),
            "routed": of,
            "shared": experts(1, 128, 128, "fp8", dtype),
            "swiglu_limit": 10.0,
        }
    )
    whole = kernel.moe(**operands)
    operands["u"][1, 5] = torch.nan
    for matrices in of.matrices():
        for unread in (1, 3):
            matrices[unread].scale.view(torch.uint8).fill_(255)
    ours = kernel.moe(**operands)
    assert ours[1].isnan().all()
    assert torch.equal(ours[[0, 2]], whole[[0, 2]])


def test_experts_with_calibrated_inputs_are_recorded_as_no_launch() -> None:
    """Over meta tensors, by which an engine's kernels are found, the reference cannot run."""
    operands = MoeCase("calibrated", 3, 32, 32, 4, 2).operands(torch.bfloat16)
    for name in ("routed", "shared"):
        of = operands[name]
        weights = (x.to("meta") for x in (of.w1, of.w3, of.w2))
        scale = torch.ones(of.count, 2, device="meta")
        operands[name] = ExpertWeights(*weights, quantized_input=True, input_scale=scale)
    for name in ("u", "ids", "weights"):
        operands[name] = operands[name].to("meta")
    ours = moe(**operands)
    assert ours.is_meta
    assert (ours.shape, ours.dtype) == ((3, 32), torch.bfloat16)


def test_mixed_formats_and_float64_run_the_reference() -> None:
    of = experts(2, 64, 64, "fp8", torch.bfloat16)
    w1, w3, w2 = of.matrices()
    mixed = PackedExpertWeights((w1[0], w1[1].to(torch.bfloat16)), w3, w2, torch.bfloat16, True)
    assert device_weights.device_experts(mixed, torch.bfloat16) is None
    assert device_weights.device_experts(of, torch.float32) is None
    operands = MoeCase("wide", 2, 32, 32, 4, 2).operands(torch.float64)
    ours = kernel.moe(**on_device(operands))
    assert relative(ours, in_float64(operands)) < 1e-12
