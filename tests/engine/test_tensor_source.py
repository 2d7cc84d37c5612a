"""Weight files: what is read is what was stored, and each damage is one sentence."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from safetensors.torch import load_file, save_file

from engine.safetensors_file import SafetensorsWriter, TensorInfo
from engine.tensor_source import (
    CheckpointError,
    SafetensorsSource,
    dense,
    engram_table,
    expert_weights,
    linear_weight,
)

TmpFactory = pytest.TempPathFactory

# Values of the codes, from the formats' definitions.
E4M3 = np.array(
    [
        (-1.0) ** (code >> 7)
        * (
            (code & 7) * 2.0**-9
            if (code >> 3) & 15 == 0
            else (1 + (code & 7) / 8) * 2.0 ** (((code >> 3) & 15) - 7)
        )
        for code in range(256)
    ]
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def write(path: Path, tensors: dict[str, tuple[str, torch.Tensor]]) -> Path:
    header = {name: TensorInfo(dtype, tuple(t.shape)) for name, (dtype, t) in tensors.items()}
    with SafetensorsWriter(path, header) as writer:
        for name, (_, tensor) in tensors.items():
            writer.write(name, tensor)
    return path


def fails(path: Path, *mentions: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(path)
    message = str(caught.value)
    assert "\n" not in message
    for mention in mentions:
        assert mention in message


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards and an index, in a directory with a space in its name."""
    directory = tmp_path / "a checkpoint"
    directory.mkdir()
    save_file({"a": torch.arange(6.0).view(2, 3)}, directory / "one.safetensors")
    save_file({"b": torch.ones(4), "c": torch.zeros(2)}, directory / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_reads_what_the_safetensors_library_reads(tiny_dir: Path) -> None:
    expected = load_file(tiny_dir / "model.safetensors")
    source = SafetensorsSource(tiny_dir)
    assert set(source.names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(source.read(name), tensor)


def test_writer_output_reads_in_the_safetensors_library(tmp_path: Path) -> None:
    values = torch.randn(5, 3, dtype=torch.float64)
    counts = torch.arange(7, dtype=torch.int8)
    path = tmp_path / "x.safetensors"
    infos = {"counts": TensorInfo("I8", (7,)), "values": TensorInfo("F64", (5, 3))}
    with SafetensorsWriter(path, infos) as writer:
        writer.write("values", values[:2])
        writer.write("counts", counts)
        writer.write("values", values[2:])
    stored = load_file(path)
    assert torch.equal(stored["values"], values)
    assert torch.equal(stored["counts"], counts)


def test_unfinished_writer_complains(tmp_path: Path) -> None:
    infos = {"values": TensorInfo("F32", (4,))}
    with (
        pytest.raises(ValueError, match="values"),
        SafetensorsWriter(tmp_path / "x", infos) as writer,
    ):
        writer.write("values", torch.zeros(3))


def test_shards_through_the_index(shards: Path) -> None:
    source = SafetensorsSource(shards)
    assert sorted(source.names()) == ["a", "b", "c"]
    assert source.read("a").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert "d" not in source
    with pytest.raises(CheckpointError, match=r"\bd\b"):
        source.read("d")


def test_missing_shard(shards: Path) -> None:
    (shards / "two.safetensors").unlink()
    fails(shards, "two.safetensors", "missing", "2 tensors")


def test_index_that_names_absent_tensors(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["d"] = "one.safetensors"
    index.write_text(json.dumps(raw))
    fails(shards, "one.safetensors", "lacks d")


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": []}', "[]"])
def test_damaged_index(shards: Path, text: str) -> None:
    (shards / "model.safetensors.index.json").write_text(text)
    fails(shards, "index.json", "weight_map")


@pytest.mark.parametrize("kept", [0, 4, 20, -1, -8])
def test_truncated_file(shards: Path, kept: int) -> None:
    path = shards / "one.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    fails(shards, "one.safetensors")


def test_file_with_bytes_at_its_end(shards: Path) -> None:
    path = shards / "one.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    fails(shards, "one.safetensors", "longer")


def header_file(path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_gets_through_or_crashes(tmp_path_factory: TmpFactory, data: DataObject) -> None:
    """Cut or overwritten anywhere before the data, a file is refused or still means the same."""
    directory = tmp_path_factory.mktemp("fuzz")
    path = directory / "x.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}, path)
    content = bytearray(path.read_bytes())
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    if data.draw(st.booleans(), label="cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1), label="length")]
    else:
        position = data.draw(st.integers(0, header_end - 1), label="position")
        content[position] = data.draw(st.integers(0, 255), label="byte")
    path.write_bytes(content)
    try:
        source = SafetensorsSource(path)
    except CheckpointError:
        return
    for name in source.names():
        tensor = source.read(name)
        assert tuple(tensor.shape) == source.describe(name).shape
        assert tensor.nbytes <= 40


@pytest.mark.parametrize(
    ("header", "mentions"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, ("a", "4 bytes")),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, ("a", "F4")),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, ("a", "gap")),
        ({"a": {"dtype": "F32"}}, ("a", "damaged")),
        ({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, ("a", "damaged")),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, ("a", "damaged")),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}, ("a", "damaged")),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, ("a", "damaged")),
        ({"a": []}, ("a", "damaged")),
        (["a"], ("header",)),
    ],
)
def test_damaged_header(tmp_path: Path, header: object, mentions: tuple[str, ...]) -> None:
    fails(header_file(tmp_path / "x.safetensors", header, bytes(8)), "x.safetensors", *mentions)


def test_empty_directory(tmp_path: Path) -> None:
    fails(tmp_path, "model.safetensors")


def test_one_name_in_two_files(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    fails(tmp_path, "x.safetensors", "y.safetensors")


def test_dense_converts_and_owns_its_memory(shards: Path) -> None:
    source = SafetensorsSource(shards)
    values = dense(source, "a", (2, 3), torch.float32)
    values.zero_()
    assert source.read("a").sum() == 15
    assert dense(source, "a", (2, 3), torch.float64).dtype == torch.float64
    with pytest.raises(CheckpointError, match=r"a: expected .*\[3, 2\], got F32 \[2, 3\]"):
        dense(source, "a", (3, 2), torch.float32)


def test_dense_refuses_codes(tmp_path: Path) -> None:
    source = SafetensorsSource(
        write(tmp_path / "x.safetensors", {"a": ("I8", torch.zeros(2, dtype=torch.int8))})
    )
    with pytest.raises(CheckpointError, match=r"a: expected .*BF16.*got I8"):
        dense(source, "a", (2,), torch.float32)


def random_bytes(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def test_fp8_linear(tmp_path: Path) -> None:
    codes = random_bytes(64, 96, seed=1)
    codes[codes & 0x7F == 0x7F] = 0  # the two NaN codes
    scale = random_bytes(2, 3, seed=2) % 40 + 100
    path = write(
        tmp_path / "x.safetensors",
        {
            "l.weight": ("F8_E4M3", codes.view(torch.float8_e4m3fn)),
            "l.scale": ("F8_E8M0", scale),
        },
    )
    source = SafetensorsSource(path)
    spread = np.kron(2.0 ** (scale.numpy().astype(float) - 127), np.ones((32, 32)))
    expected = E4M3[codes.numpy()] * spread
    weight = linear_weight(source, "l", (64, 96), torch.float64)
    assert weight.quantized_input
    np.testing.assert_array_equal(weight.value.numpy(), expected)
    in_bf16 = linear_weight(source, "l", (64, 96), torch.bfloat16, activation_quant=False)
    assert not in_bf16.quantized_input
    np.testing.assert_array_equal(in_bf16.value.double().numpy(), expected)
    with pytest.raises(CheckpointError, match=r"l\.weight: expected F8_E4M3 \[96, 64\]"):
        linear_weight(source, "l", (96, 64), torch.float64)


def test_fp8_linear_with_a_wrong_scale_grid(tmp_path: Path) -> None:
    codes = torch.zeros(64, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    coarse = torch.zeros(1, 1, dtype=torch.uint8)
    path = write(
        tmp_path / "x.safetensors",
        {"l.weight": ("F8_E4M3", codes), "l.scale": ("F8_E8M0", coarse)},
    )
    with pytest.raises(
        CheckpointError, match=r"l\.scale: expected F8_E8M0 \[2, 2\], got .*\[1, 1\]"
    ):
        linear_weight(SafetensorsSource(path), "l", (64, 64), torch.float32)


def test_unquantised_linear_takes_unrounded_inputs(tiny_dir: Path) -> None:
    source = SafetensorsSource(tiny_dir)
    weight = linear_weight(source, "layers.0.attn.wq_a", (64, 128), torch.float64)
    assert not weight.quantized_input
    assert torch.equal(weight.value, source.read("layers.0.attn.wq_a.weight").double())


def test_fp4_experts(tmp_path: Path) -> None:
    hidden, inter, experts = 64, 32, 3
    tensors: dict[str, tuple[str, torch.Tensor]] = {}
    expected: dict[str, list[np.ndarray]] = {"w1": [], "w2": [], "w3": []}
    for expert in range(experts):
        for number, name in enumerate(expected):
            rows, columns = (hidden, inter) if name == "w2" else (inter, hidden)
            packed = random_bytes(rows, columns // 2, seed=10 * expert + number)
            scale = random_bytes(rows, columns // 32, seed=100 * expert + number) % 40 + 100
            tensors[f"e.{expert}.{name}.weight"] = ("I8", packed.view(torch.int8))
            tensors[f"e.{expert}.{name}.scale"] = ("F8_E8M0", scale)
            values = np.empty((rows, columns))
            values[:, 0::2] = E2M1[packed.numpy() & 15]  # the even input is the low nibble
            values[:, 1::2] = E2M1[packed.numpy() >> 4]
            factors = 2.0 ** (scale.numpy().astype(float) - 127)
            expected[name].append(values * np.repeat(factors, 32, axis=1))
    source = SafetensorsSource(write(tmp_path / "x.safetensors", tensors))
    weights = expert_weights(source, "e", experts, inter, hidden, torch.float64)
    assert weights.quantized_input
    for name, stacked in expected.items():
        np.testing.assert_array_equal(getattr(weights, name).numpy(), np.stack(stacked))
    with pytest.raises(CheckpointError, match=r"e\.3\.w1"):
        expert_weights(source, "e", 4, inter, hidden, torch.float64)


def test_engram_table_from_fp8_rows(tmp_path: Path) -> None:
    codes = random_bytes(50, 64, seed=3)
    codes[codes & 0x7F == 0x7F] = 0
    scale = random_bytes(50, 2, seed=4) % 40 + 100
    path = write(
        tmp_path / "x.safetensors",
        {
            "t.weight": ("F8_E4M3", codes.view(torch.float8_e4m3fn)),
            "t.scale": ("F8_E8M0", scale),
        },
    )
    table = engram_table(SafetensorsSource(path), "t", 50, 64, torch.float32)
    slots = torch.tensor([[49, 0], [7, -1]])
    factors = np.repeat(2.0 ** (scale.numpy().astype(float) - 127), 32, axis=1)
    expected = (E4M3[codes.numpy()] * factors)[slots.clamp(min=0).numpy()]
    expected[1, 1] = 0
    np.testing.assert_array_equal(table.read(slots, torch.float64).numpy(), expected)
    with pytest.raises(CheckpointError, match=r"t\.weight: expected .*\[51, 64\]"):
        engram_table(SafetensorsSource(path), "t", 51, 64, torch.float32)


def test_floats_are_unmapped_when_they_were_copied(tmp_path: Path) -> None:
    """Codes stay mapped as long as their file is read; the file is longer than a page."""
    path = write(
        tmp_path / "x.safetensors",
        {
            "norm.weight": ("F32", torch.arange(3000, dtype=torch.float32)),
            "l.weight": ("F8_E4M3", random_bytes(64, 64, seed=1).view(torch.float8_e4m3fn)),
        },
    )

    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    source = SafetensorsSource(path)
    stored = source.read("norm.weight")
    assert is_mapped()
    assert torch.equal(stored, torch.arange(3000, dtype=torch.float32))
    del stored
    copy = dense(source, "norm.weight", (3000,), torch.float32)
    assert not is_mapped()
    assert copy[2999] == 2999
    codes = source.read("l.weight")
    del codes
    assert is_mapped()


def test_reading_does_not_change_the_file(shards: Path) -> None:
    path = shards / "one.safetensors"
    before = path.read_bytes()
    SafetensorsSource(shards).read("a").zero_()
    assert path.read_bytes() == before


def test_a_shard_that_is_a_directory(shards: Path) -> None:
    (shards / "one.safetensors").unlink()
    (shards / "one.safetensors").mkdir()
    fails(shards, "one.safetensors")
    shutil.rmtree(shards / "one.safetensors")
