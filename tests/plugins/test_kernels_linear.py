"""The linear kernels against products in float64 of exactly rounded inputs and decoded weights."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable

import pytest
import torch
from kernel_oracle import DEVICE, load_kernel, moved, moved_weight

from plugins.formats import mxfp8, nvfp4
from plugins.linear import LinearWeight, PackedFormat, PackedLinearWeight
from plugins.linear.cases import CASES, PACKED_CASES, LinearCase, PackedCase, packed_weight
from plugins.linear.kernel_split import split_rows
from plugins.wo_a.cases import CASES as WO_A_CASES
from plugins.wo_a.cases import PACKED_CASES as PACKED_WO_A_CASES
from plugins.wo_a.cases import WoACase

kernel = load_kernel("linear")
kernel_planes = importlib.import_module("plugins.linear.kernel_planes")
kernel_codes = importlib.import_module("plugins.linear.kernel_codes")
wo_a = load_kernel("wo_a").wo_a

DTYPES = (torch.float32, torch.bfloat16)
# The interpreter cuts float32 down to bfloat16 instead of rounding.
HALF = 2.0**-8 if DEVICE == "cuda" else 2.0**-7
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: HALF}


def compare(
    ours: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, share: int = 32
) -> None:
    """One rounding of the result, and of sums whose terms partly cancel."""
    value = weight.double()
    expected, terms = x @ value.T, x.abs() @ value.T.abs()
    assert ours.dtype == dtype
    assert ours.shape == expected.shape
    error = (ours.double().cpu() - expected).abs()
    assert (error <= TOLERANCE[dtype] * (expected.abs() + terms / share)).all()


def share_of(stored: PackedFormat | None) -> int:
    """How many terms' worth of error is allowed. Values of NVFP4 with a global scale are cut by the
    interpreter too, and such errors add up; E4M3 products of a device keep 13 bits of a sum."""
    if DEVICE == "cpu":
        return 2 if stored is PackedFormat.NVFP4 else 32
    return 8 if stored in (PackedFormat.FP8_BLOCKS, PackedFormat.MXFP8) else 32


def seen(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """What the weight multiplies; the formats themselves are tested against rational arithmetic."""
    if weight.input_scale is not None:
        return nvfp4.round_input(x, weight.input_scale).double()
    x = x.double()
    return mxfp8.ACTIVATION.round(x) if weight.quantized_input else x


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_dense_weights_equal_the_definition(case: LinearCase) -> None:
    operands = case.operands(torch.float32)
    ours = kernel.linear(**moved(operands))
    weight = operands["weight"]
    compare(ours, seen(operands["x"], weight), weight.value, torch.float32)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((c, torch.bfloat16) for c in PACKED_CASES),
        *((c, torch.float32) for c in PACKED_CASES[1::3]),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_packed_weights_equal_the_definition(case: PackedCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    ours = kernel.linear(**moved(operands))
    weight = operands["weight"]
    value = weight.value
    if case.stored is PackedFormat.NVFP4 and case.in_features % kernel.PLANE_STEP == 0:
        # The global scale multiplies sums, not values that bfloat16 would then round.
        value = dataclasses.replace(weight.packed, dtype=torch.float32).dequantize()
    compare(ours, seen(operands["x"], weight), value, dtype, share_of(case.stored))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((c, torch.float32) for c in WO_A_CASES),
        *((c, torch.bfloat16) for c in PACKED_WO_A_CASES),
        (PACKED_WO_A_CASES[0], torch.float32),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_groups_meet_their_own_weight(case: WoACase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    ours = wo_a(**moved(operands)).unflatten(1, (case.groups, case.rank))
    weight, joined = operands["weight"], operands["o"].flatten(1)
    x = seen(joined, weight).unflatten(1, (case.groups, joined.shape[1] // case.groups))
    values = weight.value.unflatten(0, (case.groups, case.rank))
    for group in range(case.groups):
        compare(ours[:, group], x[:, group], values[group], dtype, share_of(case.stored))


@pytest.mark.parametrize("stored", PackedFormat, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoded_values_are_the_references(stored: PackedFormat, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(4)
    for shape in ((40, 160), (33, 512)):
        values = (
            torch.randn(shape, generator=draw) * 10.0 ** torch.arange(shape[0]).sub(35)[:, None]
        )
        weight = packed_weight(values, stored, dtype)
        ours = kernel.decode(kernel.packed_weight(moved_weight(weight)), dtype)
        # With a global scale a value may need more bits than bfloat16 has.
        cut = stored is PackedFormat.NVFP4 and dtype == torch.bfloat16 and DEVICE == "cpu"
        torch.testing.assert_close(ours.cpu(), weight.value, rtol=HALF if cut else 0, atol=0)


def test_calibrated_inputs_are_rounded_under_their_scale() -> None:
    case = PackedCase("", 3, 288, 40, PackedFormat.NVFP4)
    operands = case.operands(torch.float32)
    weight = operands["weight"]
    operands["weight"] = PackedLinearWeight(weight.packed, True, torch.tensor(0.004))
    ours = kernel.linear(**moved(operands))
    assert not torch.equal(ours, kernel.linear(**moved({**operands, "weight": weight})))
    compare(ours, seen(operands["x"], operands["weight"]), weight.value, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_are_rounded_as_the_reference_rounds(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    rows = torch.randn(17, 96, generator=draw) * 10.0 ** torch.arange(-32, 36, 4)[:, None]
    rows[3, 40], rows[4, 70], rows[5, 0] = torch.nan, torch.inf, -torch.inf
    rows[6, :32] = torch.linspace(-0.02, 0.02, 32)  # ties and subnormals of E4M3
    rows[7] = torch.arange(96) - 48.0
    rows = rows.to(dtype)
    ours = kernel.round_rows(rows.to(DEVICE))
    expected = mxfp8.ACTIVATION.round(rows)
    torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "DECODED_ROWS", 0)


def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_LEAST", 128)


def by_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PLANE_STEP", 1024)


@pytest.mark.parametrize("path", [decoded, in_parts, by_values], ids=lambda f: f.__name__)
def test_every_path_gives_the_product(
    path: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path(monkeypatch)
    operands = PackedCase("", 5, 512, 70, PackedFormat.FP8_BLOCKS).operands(torch.bfloat16)
    ours = kernel.linear(**moved(operands))
    weight = operands["weight"]
    share = share_of(PackedFormat.FP8_BLOCKS)
    compare(ours, seen(operands["x"], weight), weight.value, torch.bfloat16, share)


def followed(assembly: str, registers: dict[str, torch.Tensor]) -> None:
    """Run the instructions, which no interpreter knows, on int64 tensors that hold 32 bits."""

    def product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        assert (c == 0x80008000).all()  # adding −0 changes nothing
        result = torch.zeros_like(a)
        for half in (0, 16):
            bits = [(x >> half).to(torch.int16).view(torch.bfloat16) for x in (a, b)]
            value = (bits[0].float() * bits[1].float()).to(torch.bfloat16)  # exact in float32
            result |= (value.view(torch.int16).long() & 0xFFFF) << half
        return result

    def halves(a: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([a & 0xFF, a >> 8]).to(torch.uint8).view(torch.float8_e4m3fn)
        low, high = codes.to(torch.float16).view(torch.int16).long() & 0xFFFF
        return low | high << 16

    operations = {
        "cvt": halves,
        "mov": lambda a: a,
        "shl": lambda a, n: a << n & 0xFFFFFFFF,
        "shr": lambda a, n: a >> n,
        "and": lambda a, b: a & b,
        "lop3": lambda a, b, c, table: (a & b) | c if int(table[0]) == 0xEA else None,
        "fma": product,
    }
    like = registers["word"]
    for name, text in re.findall(r"(\w+)\.[\w.]+ ([^;]*);", assembly):
        if name == "reg":
            continue
        if text.startswith("{"):
            low, high, both = text.replace("{", "").replace("}", "").split(", ")
            registers[low], registers[high] = registers[both] & 0xFFFF, registers[both] >> 16
            continue
        target, *operands = text.split(", ")
        values = [
            registers[x] if x in registers else torch.full_like(like, int(x, 0)) for x in operands
        ]
        registers[target] = operations[name](*values)


@pytest.mark.parametrize("planes", [2, 4])
def test_the_inline_assembly_takes_words_apart(planes: int) -> None:
    """Every word of 16 bits, in either half of 32 bits; 480 stands where E4M3 has NaN."""
    word = torch.arange(65_536)
    other = word * 40_503 % 65_536
    if planes == 2:
        codes = torch.stack([word & 0xFF, word >> 8], dim=1)
        value = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        value = torch.where(value.isnan(), 480.0 - 960.0 * (codes >> 7), value)
    else:
        codes = torch.stack([word >> 4 * i & 15 for i in range(4)], dim=1)
        value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))
    source = ("E4M3_PLANES", "E2M1_PLANES")[planes // 4]
    for scale in (1.0, 2.0**-110, 2.0**119):
        bits = torch.tensor(scale).to(torch.bfloat16).view(torch.int16).long()
        registers = {f"${planes}": word | other << 16, f"${planes + 1}": bits * 0x10001}
        registers["word"] = word
        followed(getattr(kernel_planes, source).value, registers)
        for plane in range(planes):
            for half, words in ((0, word), (16, other)):
                ours = (registers[f"${plane}"] >> half).to(torch.int16).view(torch.bfloat16)
                expected = (value[words, plane] * scale).to(torch.bfloat16)
                assert torch.equal(ours, expected)


def test_the_inline_assembly_of_halves_takes_eight_codes_apart() -> None:
    """The even ones, then the odd ones, as 2^−6 of their values."""
    word = torch.arange(65_536)
    other = word * 40_503 % 65_536
    codes = torch.stack([w >> 4 * i & 15 for w in (word, other) for i in range(4)], dim=1)
    value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))
    registers = {"$4": word | other << 16, "word": word}
    followed(kernel_codes.E2M1_HALVES.value, registers)
    for place, code in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        bits = registers[f"${place // 2}"] >> 16 * (place % 2)
        ours = bits.to(torch.int16).view(torch.float16)
        assert torch.equal(ours, (value[:, code] / kernel_codes.E2M1_UNIT.value).half())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [([5], [7, 0, 5]), ([15, 0, 5, 8, 4, 1, 12, 2, 3],)], ids=len)
def test_a_row_depends_on_itself_only(rows: tuple[list[int], ...], dtype: torch.dtype) -> None:
    """Among up to 8 rows, or 9 to 16: fewer, in another order, beside rows that are not numbers."""
    count = max(map(max, rows)) + 1
    operands = moved(PackedCase("", count, 256, 40, PackedFormat.MXFP8).operands(dtype))
    x, weight = operands["x"], operands["weight"]
    whole = kernel.linear(x, weight)
    for some in rows:
        assert torch.equal(kernel.linear(x[some], weight), whole[some])
    x[3, 7] = torch.nan
    poisoned = kernel.linear(x, weight)
    assert poisoned[3].isnan().all()
    poisoned[3] = whole[3]
    assert torch.equal(poisoned, whole)


@pytest.mark.parametrize("count", [0, 1, 3, 8, 11])
@pytest.mark.parametrize(
    "stored",
    [
        (PackedFormat.FP8_BLOCKS, PackedFormat.FP8_BLOCKS),
        (PackedFormat.FP8_BLOCKS, PackedFormat.FP4_ROWS),
        (PackedFormat.FP4_ROWS, PackedFormat.FP4_ROWS),
        (PackedFormat.NVFP4, PackedFormat.NVFP4),
    ],
    ids=lambda stored: "-".join(one.value for one in stored),
)
def test_a_pair_gives_the_bits_of_either_layer(
    stored: tuple[PackedFormat, PackedFormat], count: int
) -> None:
    """Also where the formats differ, so that no launch takes both."""
    first, second = (
        moved(PackedCase("", count, 1024, outputs, one).operands(torch.bfloat16))
        for outputs, one in zip((48, 70), stored, strict=True)
    )
    x = first["x"]
    ours = kernel.linear_pair(x, first["weight"], second["weight"])
    assert torch.equal(ours[0], kernel.linear(x, first["weight"]))
    assert torch.equal(ours[1], kernel.linear(x, second["weight"]))


@pytest.mark.parametrize("stored", [PackedFormat.FP8_BLOCKS, PackedFormat.FP4_ROWS])
@pytest.mark.parametrize("count", [1, 8, 16])
def test_a_diagonal_weight_gives_the_rounded_rows(count: int, stored: PackedFormat) -> None:
    draw = torch.Generator().manual_seed(6)
    rows = torch.randn(count, 256, generator=draw)
    rows *= 10.0 ** torch.linspace(-30, 25, count)[:, None]
    rows[0, :32] = torch.linspace(-0.02, 0.02, 32)  # ties and subnormals of E4M3
    rows[-1, 64:] = torch.arange(192) - 96.0
    rows = rows.to(torch.bfloat16)
    weight = moved_weight(packed_weight(torch.eye(256), stored, torch.bfloat16))
    ours = kernel.linear(rows.to(DEVICE), weight).cpu()
    assert torch.equal(ours, mxfp8.ACTIVATION.round(rows))


def test_float64_gradients_and_parts_of_groups_run_the_reference() -> None:
    operands = moved(CASES[1].operands(torch.float64))
    assert kernel.linear(**operands).dtype == torch.float64
    operands = moved(CASES[1].operands(torch.float32))
    operands["x"].requires_grad_()
    kernel.linear(**operands).sum().backward()
    assert torch.isfinite(operands["x"].grad).all()
    weight = LinearWeight(torch.ones(4, 40, device=DEVICE), quantized_input=True)
    with pytest.raises(ValueError, match="multiple of 32"):
        kernel.linear(torch.ones(1, 40, device=DEVICE), weight)


def test_a_weight_kept_as_bfloat16_gives_the_bits_of_float32() -> None:
    """float32 inputs of every size, times a weight that is kept in half the bytes."""
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(72, 200, generator=generator).to(torch.bfloat16)
    for rows in (0, 1, 5, 33):
        x = torch.randn(rows, 400, generator=generator)[:, ::2]
        x = x * 2.0 ** torch.randint(-20, 20, x.shape, generator=generator)
        kept = LinearWeight(value.to(DEVICE), quantized_input=False)
        ours = kernel.linear(x.to(DEVICE), kept)
        compare(ours, x.double(), value, torch.float32)


def test_three_parts_add_up_to_a_float32() -> None:
    x = torch.randn(7, 300, generator=torch.Generator().manual_seed(4))
    x[0, :4] = torch.tensor([0.0, 1.0, 2.0**-100, 1.0 + 2.0**-23])
    parts = split_rows(x.to(DEVICE)).double().cpu()
    assert torch.equal(parts.sum(0), x.double())
