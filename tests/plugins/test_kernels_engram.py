"""The Engram kernels: row ids by big integers, table rows by their records, the gate in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_oracle import DEVICE, load_kernel, moved

from plugins.engram import engram_layout
from plugins.engram.cases import HASH_CASES, INJECT_CASES, HashCase, InjectCase
from plugins.formats.records import (
    RecordLayout,
    engram_record,
    index_fallback_record,
    nvfp4_engram_record,
)
from plugins.formats.rows import PackedRows, ValueRows

kernel = load_kernel("engram")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7}
TINY = engram_layout([1], max_ngram_size=4, n_heads=3, vocab_size=101, compressed_vocab_size=256)[1]
RELEASED = engram_layout(
    [1, 14], max_ngram_size=4, n_heads=8, vocab_size=16_000_000, compressed_vocab_size=99_092
)[14]


def row_ids(stream: list[int], position: int, case: HashCase, layout) -> list[int]:
    """The rows of one token by Python's integers."""
    value, ids, broken = 0, [], False
    heads = len(layout.primes) // case.reach
    for back in range(case.reach + 1):
        token = stream[position - back] if position >= back else -1
        broken = broken or token < 0 or token == case.dead_token_id
        value ^= (1 if broken else token // 2) * int(layout.multipliers[back])
        if back:
            for head in range((back - 1) * heads, back * heads):
                ids.append(value % int(layout.primes[head]) + int(layout.offsets[head]))
    return ids


@pytest.mark.parametrize("layout", [TINY, RELEASED], ids=["TINY", "released"])
@pytest.mark.parametrize("case", HASH_CASES, ids=lambda c: c.name)
def test_row_ids(case: HashCase, layout) -> None:
    ours = kernel.engram_rows(**moved(case.operands()), layout=layout)
    expected = [
        row_ids(stream.tolist(), position, case, layout)
        for stream, before in zip(case.streams(), case.before, strict=True)
        for position in range(before, len(stream))
    ]
    assert ours.dtype == torch.int64
    assert ours.tolist() == expected


LAYOUTS = {
    "FP8": engram_record(256),
    "FP8, small": engram_record(32),
    "NVFP4": nvfp4_engram_record(256, 0.37),
    "NVFP4, 48 wide": nvfp4_engram_record(48, 2.0**-20),
}


def records(layout: RecordLayout, rows: int) -> torch.Tensor:
    """Rows of 10^−9 … 10^9 on the device; every third is 0xFF, which no kernel may read."""
    draw = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, layout.width, generator=draw)
    values *= 10.0 ** torch.randint(-9, 10, (rows, 1), generator=draw)
    data = layout.pack(values)
    data[::3] = 0xFF
    return data.to(DEVICE)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_are_their_records(name: str, dtype: torch.dtype) -> None:
    layout = LAYOUTS[name]
    data = records(layout, 90)
    rows = torch.arange(90)[torch.arange(90) % 3 > 0].view(-1, 6).flip(0)
    rows[1, 2] = -1
    ours = kernel.engram_lookup(PackedRows(data, layout), rows.to(DEVICE), dtype)
    expected = layout.unpack(data.cpu()[rows.clamp(min=0)], torch.float32)
    expected[rows < 0] = 0
    # Two scales need more bits than bfloat16 has, and in the order of their product.
    rounds = "NVFP4" in name and dtype == torch.bfloat16
    rtol = TOLERANCE[dtype] if rounds else 0
    assert ours.shape == (10, 6 * layout.width)
    torch.testing.assert_close(ours.cpu().float(), expected.flatten(1), rtol=rtol, atol=0)


@pytest.mark.parametrize("few", [60, 3072])
def test_many_rows_and_rows_apart(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as take programs of eight rows, or of four."""
    monkeypatch.setattr(kernel, "_FEW", few)
    layout = engram_record(32)
    data = records(layout, 600)
    wide = torch.full((600, layout.bytes_per_row + 7), 0xFF, dtype=torch.uint8, device=DEVICE)
    wide[:, : layout.bytes_per_row] = data
    table = PackedRows(wide[:, : layout.bytes_per_row], layout)
    rows = (torch.arange(198) % 200 * 3 + 1).view(-1, 6).to(DEVICE)
    ours = kernel.engram_lookup(table, rows, torch.float32)
    expected = layout.unpack(data[rows], torch.float32).flatten(1)
    assert torch.equal(ours, expected)


def test_values_float64_and_unknown_records() -> None:
    values = torch.arange(60.0).view(5, 12)
    rows = torch.tensor([[4, -1], [0, 2]], device=DEVICE)
    expected = [
        [*range(48, 60), *[0] * 12],
        [*range(12), *range(24, 36)],
    ]
    table = ValueRows(values.to(DEVICE))
    assert kernel.engram_lookup(table, rows, torch.bfloat16).tolist() == expected
    assert kernel.engram_lookup(table, rows, torch.float64).dtype == torch.float64
    layout = index_fallback_record(16)
    odd = PackedRows(layout.pack(torch.ones(5, 16)).to(DEVICE), layout)
    assert kernel.engram_lookup(odd, rows, torch.float32).sum() == 48


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_tables_in_memory_of_the_host() -> None:
    layout = engram_record(256)
    data = records(layout, 90).cpu()
    rows = (torch.arange(24) * 3 + 1).view(1, -1)
    expected = layout.unpack(data[rows], torch.float32).flatten(1)
    table = PackedRows(data.pin_memory(), layout)
    ours = kernel.engram_lookup(table, rows.to(DEVICE), torch.float32)
    assert torch.equal(ours.cpu(), expected)
    with pytest.raises(ValueError, match="pin the table"):
        kernel.engram_lookup(PackedRows(data, layout), rows.to(DEVICE), torch.float32)


def gated(operands: dict) -> np.ndarray:
    """One stream of one row at a time, in float64."""
    x, k = operands["streams"].double().numpy(), operands["keys"].double().numpy()
    weight = operands["q_weight"].double().numpy() * operands["k_weight"].double().numpy()
    result = x.copy()
    for t in range(x.shape[0]):
        for s in range(x.shape[1]):
            if operands["alive"] is not None and not operands["alive"][t]:
                continue
            norms = [
                math.sqrt((row**2).mean() + operands["norm_eps"]) for row in (x[t, s], k[t, s])
            ]
            score = (x[t, s] * weight[s] * k[t, s]).sum() / math.prod(norms) / math.sqrt(x.shape[2])
            root = math.copysign(math.sqrt(max(abs(score), 1e-6)), score) if score else 0.0
            result[t, s] += operands["value"][t].double().numpy() / (1 + math.exp(-root))
    return result


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((c, torch.float32) for c in INJECT_CASES), (INJECT_CASES[8], torch.bfloat16)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_gate(case: InjectCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    ours = kernel.engram_gate(**moved(operands))
    assert ours.dtype == dtype
    np.testing.assert_allclose(
        ours.double().cpu().numpy(), gated(operands), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    if operands["alive"] is not None:
        dead = ~operands["alive"]
        assert torch.equal(ours.cpu()[dead], operands["streams"][dead])


def test_gate_of_strided_operands_and_many_rows() -> None:
    """As the network hands them over: keys and value are parts of one projection."""
    operands = moved(InjectCase("", 11, 2, 40, dead=0.3).operands(torch.float32))
    whole = torch.cat([operands["keys"].flatten(1), operands["value"]], 1)
    keys, value = whole.split([80, 40], 1)
    strided = operands | {"keys": keys.unflatten(1, (2, 40)), "value": value}
    ours = kernel.engram_gate(**strided)
    on_host = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in operands.items()}
    np.testing.assert_allclose(ours.double().cpu().numpy(), gated(on_host), rtol=3e-6, atol=3e-6)
    alone = [
        kernel.engram_gate(
            **{
                name: x[t : t + 1] if name in ("streams", "keys", "value", "alive") else x
                for name, x in strided.items()
            }
        )
        for t in range(11)
    ]
    assert torch.equal(torch.cat(alone), ours)


def test_a_poisoned_key_poisons_its_stream() -> None:
    operands = moved(InjectCase("", 2, 2, 32).operands(torch.float32))
    operands["keys"][1, 0, 3] = torch.nan
    ours = kernel.engram_gate(**operands).isnan()
    assert ours[1, 0].all()
    assert ours.sum() == 32


def test_float64_and_gradients_run_the_reference() -> None:
    operands = moved(InjectCase("", 2, 2, 32).operands(torch.float64))
    assert kernel.engram_gate(**operands).dtype == torch.float64
    operands = moved(InjectCase("", 2, 2, 32).operands(torch.float32))
    operands["keys"].requires_grad_()
    kernel.engram_gate(**operands).sum().backward()
    assert torch.isfinite(operands["keys"].grad).all()
