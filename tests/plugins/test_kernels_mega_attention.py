"""The attention kernel against a per-head oracle in float64, on packed pages and plain values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_oracle import oracle
from kernel_oracle import DEVICE, load_kernel, moved, paged

from plugins.device.rows import device_rows
from plugins.formats.records import main_record, window_record
from plugins.formats.rows import RowStore, ValueRows
from plugins.mega_attention.cases import CASES, AttentionCase

kernel = load_kernel("mega_attention")

MODELS = (
    AttentionCase("TINY", 5, 4, 64, 16, 8, 4, holes=0.3, first_position=1000),
    AttentionCase("TinyFlash", 3, 8, 128, 16, 16, 16, holes=0.3, first_position=16_000),
    AttentionCase("released sizes", 2, 64, 512, 64, 128, 512, holes=0.1, first_position=855_000),
    AttentionCase("released sizes, few keys", 2, 64, 512, 64, 128, 512, holes=0.98),
    AttentionCase("released sizes, window only", 1, 64, 512, 64, 128, None),
    AttentionCase("sinks", 3, 64, 64, 16, 8, 4, holes=0.5, sink="mixed"),
)
# Products of bfloat16 operands: rotated queries and probabilities carry eight bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def compare(ours: torch.Tensor, operands: dict, heads: range, tolerance: float) -> None:
    for t in range(ours.shape[0]):
        for h in heads:
            np.testing.assert_allclose(
                ours[t, h].double().cpu().numpy(),
                oracle(operands, t, h),
                rtol=tolerance / 2,
                atol=tolerance,
                err_msg=f"row {t}, head {h}",
            )


def packed(case: AttentionCase, dtype: torch.dtype = torch.bfloat16) -> tuple[dict, dict]:
    """Operands over packed pages on the device, and what they stand for."""
    expected = case.operands(dtype)
    operands = moved(expected)
    for name, record, rows in (("window", window_record, 8), ("main", main_record, 5)):
        if expected[name] is not None:
            store, values = paged(expected[name], record(case.width), rows)
            operands[name], expected[name] = store, values
    return operands, expected


@pytest.fixture(params=[0, 1000], ids=["whole rows", "cut into chunks"])
def split_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(kernel, "SPLIT_ROWS", request.param)
    monkeypatch.setattr(kernel.hopper, "CHUNKS", ((request.param, 320),))
    monkeypatch.setattr(kernel.few, "CUTS", ())
    return int(request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("split_rows")
def test_matches_the_per_head_oracle(case: AttentionCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    ours = kernel.mega_attention(**moved(operands))
    assert ours.dtype == dtype
    assert ours.shape == operands["q"].shape
    if case.query_scale > 10:
        # Scores of ±500: bfloat16 queries are off by one whole unit, float32 ones by 3e-5.
        assert torch.isfinite(ours).all()
        if dtype == torch.bfloat16:
            return
    heads = range(0, case.heads, max(1, case.heads // 4))
    compare(ours, operands, heads, TOLERANCE[dtype] * (50 if case.query_scale > 10 else 1))


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("split_rows")
def test_packed_pages_of_real_sizes(case: AttentionCase, dtype: torch.dtype) -> None:
    """Packed FP8 window rows and FP4 entries, of which only the named ones may be read."""
    operands, expected = packed(case, dtype)
    ours = kernel.mega_attention(**operands)
    heads = range(0, case.heads, max(1, case.heads // 3))
    compare(ours, expected, heads, TOLERANCE[dtype])


@pytest.mark.usefixtures("split_rows")
def test_a_row_depends_on_itself_only() -> None:
    """Alone, with others in another order, and with key sets padded by slots −1: the same bits,
    as long as both launches cut their rows into chunks or neither does."""
    case = AttentionCase("batch", 7, 4, 64, 16, 8, 200)
    operands = moved(case.operands(torch.float32))
    names = ("q", "positions", "window_slots", "main_slots")
    whole = kernel.mega_attention(**operands)
    order = torch.tensor([6, 2, 3])
    some = {name: operands[name][order] for name in names}
    some["main_slots"] = torch.nn.functional.pad(some["main_slots"], (0, 300), value=-1)
    assert torch.equal(kernel.mega_attention(**{**operands, **some}), whole[order])


WARP_GROUPS = (
    AttentionCase("many holes", 3, 64, 512, 64, 128, 512, holes=0.5, first_position=1_048_573),
    AttentionCase("odd sizes, few heads", 2, 5, 512, 64, 40, 201, holes=0.1),
    AttentionCase("a wide window", 2, 64, 512, 64, 200, 100, sink="mixed"),
    AttentionCase("window only", 2, 64, 512, 64, 128, None),
    AttentionCase("no key at all", 2, 64, 512, 64, 128, 512, holes=1.0),
    AttentionCase("sink takes all", 2, 64, 512, 64, 128, 512, sink="+inf"),
)


def stores(operands: dict) -> list[RowStore]:
    return [operands[name] for name in ("window", "main") if operands[name] is not None]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper",
)
@pytest.mark.parametrize("chunk", [0, 320])
class TestWarpGroups:
    """The Gluon kernels of whole rows (0) and of long parts, which nothing interprets."""

    @pytest.fixture(autouse=True)
    def _cut(self, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
        chunks = ((1000, chunk),) if chunk else ()
        monkeypatch.setattr(kernel.hopper, "CHUNKS", chunks)
        monkeypatch.setattr(kernel.few, "CUTS", ())

    @pytest.mark.parametrize("case", WARP_GROUPS, ids=lambda case: case.name)
    def test_matches_the_per_head_oracle(self, case: AttentionCase) -> None:
        operands, expected = packed(case)
        window, *main = map(device_rows, stores(operands))
        assert kernel.hopper.takes(operands["q"], 64, window, *(main or [None]))
        ours = kernel.mega_attention(**operands)
        compare(ours, expected, range(0, case.heads, 3), TOLERANCE[torch.bfloat16])

    @pytest.mark.parametrize(("window", "entries"), [(128, 192), (128, 512), (40, 1), (0, 7)])
    def test_a_row_depends_on_itself_only(self, window: int, entries: int) -> None:
        """More rows than programs, tiles odd and even in number, or one; then some of the rows in
        another order, their key sets padded."""
        operands, _ = packed(AttentionCase("batch", 301, 64, 512, 64, window, entries, holes=0.1))
        names = ("q", "positions", "window_slots", "main_slots")
        whole = kernel.mega_attention(**operands)
        assert torch.equal(kernel.mega_attention(**operands), whole)
        order = torch.tensor([300, 2, 150])
        some = {name: operands[name][order] for name in names}
        for name, keys in (("window_slots", 130), ("main_slots", 301)):
            some[name] = torch.nn.functional.pad(some[name], (0, keys), value=-1)
        assert torch.equal(kernel.mega_attention(**{**operands, **some}), whole[order])

    def test_rows_without_slots(self) -> None:
        operands, _ = packed(AttentionCase("no slots", 301, 64, 512, 64, 0, None))
        assert not kernel.mega_attention(**operands).any()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper",
)
@pytest.mark.parametrize(("keys", "heads"), [(64, 16), (64, 32), (128, 32), (128, 64)])
class TestFewRows:
    """The Gluon kernel of few rows, which nothing interprets."""

    @pytest.fixture(autouse=True)
    def _cut(self, keys: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel.few, "CUTS", ((1000, keys, heads),))

    @pytest.mark.parametrize("case", WARP_GROUPS, ids=lambda case: case.name)
    def test_matches_the_per_head_oracle(self, case: AttentionCase) -> None:
        operands, expected = packed(case)
        ours = kernel.mega_attention(**operands)
        compare(ours, expected, range(0, case.heads, 3), TOLERANCE[torch.bfloat16])

    def test_more_parts_than_the_join_adds_at_a_time(self) -> None:
        operands, expected = packed(AttentionCase("long", 1, 64, 512, 64, 128, 2200, holes=0.1))
        ours = kernel.mega_attention(**operands)
        compare(ours, expected, range(0, 64, 9), TOLERANCE[torch.bfloat16])

    def test_a_row_depends_on_itself_only(self) -> None:
        operands, _ = packed(AttentionCase("batch", 9, 64, 512, 64, 128, 192, holes=0.1))
        names = ("q", "positions", "window_slots", "main_slots")
        whole = kernel.mega_attention(**operands)
        assert torch.equal(kernel.mega_attention(**operands), whole)
        order = torch.tensor([8, 2, 5])
        some = {name: operands[name][order] for name in names}
        for name, keys in (("window_slots", 130), ("main_slots", 301)):
            some[name] = torch.nn.functional.pad(some[name], (0, keys), value=-1)
        assert torch.equal(kernel.mega_attention(**{**operands, **some}), whole[order])


def test_the_inputs_are_left_alone_and_strides_are_followed() -> None:
    case = AttentionCase("strides", 3, 4, 64, 16, 8, 4)
    operands = moved(case.operands(torch.float32))
    whole = kernel.mega_attention(**operands)
    wide = torch.full((3, 9, 80), torch.nan, device=DEVICE)
    wide[:, 2:6, 7:71] = operands["q"]
    slots = torch.full((3, 2, 9), -7, device=DEVICE)
    slots[:, 1, :4] = operands["main_slots"]
    strided = {"q": wide[:, 2:6, 7:71], "main_slots": slots[:, 1, :4]}
    assert torch.equal(kernel.mega_attention(**{**operands, **strided}), whole)
    assert torch.equal(wide[:, 2:6, 7:71], operands["q"])


def test_float64_gradients_and_unknown_stores_run_the_reference() -> None:
    operands = moved(AttentionCase("wide", 2, 2, 16, 8, 3, 2).operands(torch.float64))
    operands["window"].values.nan_to_num_(1.0)
    ours = kernel.mega_attention(**operands)
    assert ours.dtype == torch.float64
    operands["q"].requires_grad_()
    kernel.mega_attention(**operands).sum().backward()
    assert torch.isfinite(operands["q"].grad).all()
    narrow = moved(AttentionCase("narrow", 2, 2, 16, 8, 3, 2).operands(torch.float32))
    narrow["window"] = ValueRows(narrow["window"].values.double())
    assert torch.isfinite(kernel.mega_attention(**narrow)).all()
