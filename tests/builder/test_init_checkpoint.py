"""Random checkpoints in the released layout, read back by a decoder written here."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer

from builder.cli import main
from builder.layout import all_weights
from builder.presets import FULL, MEDIUM, PRESETS, TINY, slice_config, table_rows
from engine.config import ConfigError, ModelConfig
from engine.config_reader import read_config_file
from engine.config_validation import validate
from engine.safetensors_file import SafetensorsFile
from engine.tensor_source import (
    SafetensorsSource,
    engram_table,
    expert_weights,
    linear_weight,
)

Array = npt.NDArray[Any]


def raw_tensor(directory: Path, name: str) -> tuple[str, Array]:
    """(header dtype, bytes as uint8 [shape …, itemsize folded into the last dim])."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    data = (directory / index["weight_map"][name]).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    entry = json.loads(data[8 : 8 + length])[name]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    raw = np.frombuffer(data[begin:end], dtype=np.uint8)
    return entry["dtype"], raw.reshape(*entry["shape"][:-1], -1)


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    sign = -1.0 if code & 128 else 1.0
    if exponent == 0:
        return sign * mantissa / 512
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e8m0(codes: Array) -> Array:
    return np.exp2(codes.astype(np.float64) - 127)


E4M3_TABLE = np.array([e4m3(code) for code in range(256)])
E2M1_TABLE = np.array([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def test_fp8_linear_equals_an_independent_decode(released_dir: Path) -> None:
    dtype, codes = raw_tensor(released_dir, "layers.3.attn.wq_b.weight")
    scale_dtype, scale = raw_tensor(released_dir, "layers.3.attn.wq_b.scale")
    assert (dtype, scale_dtype) == ("F8_E4M3", "F8_E8M0")
    assert (codes.shape, scale.shape) == ((256, 64), (8, 2))
    expected = E4M3_TABLE[codes] * np.kron(e8m0(scale), np.ones((32, 32)))
    loaded = linear_weight(
        SafetensorsSource(released_dir), "layers.3.attn.wq_b", (256, 64), torch.float64
    )
    np.testing.assert_array_equal(loaded.value.numpy(), expected)
    # 16384 normal draws of std 1/8; a block's largest value uses E4M3's upper half.
    assert expected.std() == pytest.approx(0.125, rel=0.03)
    assert 224 < np.abs(E4M3_TABLE[codes]).max() <= 448


def test_fp4_experts_equal_an_independent_decode(released_dir: Path) -> None:
    loaded = expert_weights(
        SafetensorsSource(released_dir), "mtp.1.ffn.experts", 4, 64, 128, torch.float64
    )
    for expert in range(4):
        for name in ("w1", "w2", "w3"):
            prefix = f"mtp.1.ffn.experts.{expert}.{name}"
            dtype, packed = raw_tensor(released_dir, f"{prefix}.weight")
            _, scale = raw_tensor(released_dir, f"{prefix}.scale")
            assert dtype == "I8"
            codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
            expected = E2M1_TABLE[codes] * np.repeat(e8m0(scale), 32, axis=1)
            np.testing.assert_array_equal(getattr(loaded, name)[expert].numpy(), expected)


def test_engram_rows_equal_an_independent_decode(released_dir: Path) -> None:
    _, codes = raw_tensor(released_dir, "layers.4.engram.embed.weight")
    _, scale = raw_tensor(released_dir, "layers.4.engram.embed.scale")
    assert (codes.shape, scale.shape) == ((864, 32), (864, 1))
    expected = E4M3_TABLE[codes] * e8m0(scale)
    table = engram_table(
        SafetensorsSource(released_dir), "layers.4.engram.embed", 864, 32, torch.float64
    )
    np.testing.assert_array_equal(table.read(torch.arange(864), torch.float64).numpy(), expected)


def test_unquantised_tensors_keep_the_released_dtypes(released_dir: Path) -> None:
    dtypes = {
        "embed.weight": "BF16",
        "head.weight": "BF16",
        "layers.0.attn_norm.weight": "BF16",
        "layers.0.attn.attn_sink": "F32",
        "layers.0.hc_attn_fn": "F32",
        "layers.0.ffn.gate.weight": "BF16",
        "layers.0.ffn.gate.bias_vl": "F32",
        "layers.2.attn.compressor.wgate.weight": "BF16",
        "layers.1.engram.q_weight": "BF16",
        "mtp.1.markov_head.embed.weight": "BF16",
        "mtp.0.main_proj.weight": "F8_E4M3",
    }
    source = SafetensorsSource(released_dir)
    assert {name: source.describe(name).dtype for name in dtypes} == dtypes


def test_distributions(released_dir: Path) -> None:
    source = SafetensorsSource(released_dir)

    def stats(name: str) -> tuple[float, float]:
        values = source.read(name).double()
        return float(values.mean()), float(values.std())

    assert stats("embed.weight") == pytest.approx((0, 1), abs=0.02)
    assert stats("layers.0.hc_attn_fn") == pytest.approx((0, 2 / 512**0.5), abs=0.005)
    assert stats("layers.2.attn.compressor.wgate.weight") == pytest.approx(
        (0, 2 / 128**0.5), abs=0.01
    )
    assert stats("layers.0.attn_norm.weight") == pytest.approx((1, 0.1), abs=0.04)
    assert source.read("layers.0.attn.attn_sink").abs().min() > 0


def test_config_and_companions(released_dir: Path) -> None:
    config, warnings = read_config_file(released_dir / "config.json")
    assert (config, warnings) == (TINY, [])
    raw = json.loads((released_dir / "config.json").read_text())
    assert raw["quantization_config"]["weight_block_size"] == [32, 32]
    assert json.loads((released_dir / "generation_config.json").read_text())["eos_token_id"] == 1
    classes = np.load(released_dir / "token_class.npy")
    assert classes.tolist() == [token // 2 for token in range(512)]
    index = json.loads((released_dir / "model.safetensors.index.json").read_text())
    # embedding, 12 layers, head, 2 stages, 2 tables
    assert set(index["weight_map"].values()) == {
        f"model-{n:05d}-of-00018.safetensors" for n in range(1, 19)
    }


def test_seed_decides_every_byte(released_dir: Path, tmp_path: Path) -> None:
    for seed in ("5", "6"):
        assert main(["init", "--config", "tiny", "--output-dir", f"{tmp_path}/{seed}",
                     "--seed", seed]) == 0  # fmt: skip
    name = "model-00002-of-00018.safetensors"
    first = (released_dir / name).read_bytes()
    assert (tmp_path / "5" / name).read_bytes() == first
    assert (tmp_path / "6" / name).read_bytes() != first


def test_byte_tokenizer_round_trips_text(released_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(released_dir / "tokenizer.json"))
    for text in ("Hello, World", "naïve 漢字 🙂\n\ttab", "", " two  blanks "):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert len(ids) == len(text.encode())
        assert max(ids, default=0) < 512
        assert tokenizer.decode(ids) == text
    assert tokenizer.token_to_id("<｜begin▁of▁sentence｜>") == 0
    assert tokenizer.token_to_id("<｜end▁of▁sentence｜>") == 1
    assert tokenizer.token_to_id("<｜System｜>") == 500  # the draft's noise token, as released
    assert tokenizer.decode([0, 400, 1]) == "<400>"
    marked = tokenizer.encode("<｜User｜>x<think>").ids
    assert len(marked) == 3
    assert tokenizer.decode(marked) == "x<think>"


def test_given_tokenizer_is_copied(released_dir: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text((released_dir / "tokenizer.json").read_text())
    out = tmp_path / "out"
    assert main(["init", "--config", "tiny", "--output_dir", str(out), "--tokenizer", str(own),
                 "--format", "float32"]) == 0  # fmt: skip
    assert (out / "tokenizer.json").read_text() == own.read_text()
    assert not (out / "tokenizer_config.json").exists()
    assert SafetensorsSource(out).describe("layers.0.attn.wq_b.weight").dtype == "F32"


def test_presets_are_valid_and_their_tables_fit_the_hash() -> None:
    for config in PRESETS.values():
        validate(config)
        assert table_rows(config) == config.engram_num_embeddings


def test_tiny_preset_is_the_golden_configuration(tiny_config: ModelConfig) -> None:
    assert tiny_config == TINY


def test_layout_has_the_published_tensor_counts() -> None:
    """Tensors per layer by role, and all text tensors: 96,085 less 266 of the vision tower."""
    counts: dict[str, int] = {}
    for weight in all_weights(FULL):
        prefix = ".".join(weight.name.split(".")[:2])
        if not weight.name.endswith("engram.embed.weight"):
            counts[prefix] = counts.get(prefix, 0) + len(weight.released())
    roles = {0: 2334, 3: 2334, 24: 2337, 2: 2342, 20: 2341, 1: 2340 - 2, 14: 2348 - 2}
    assert {layer: counts[f"layers.{layer}"] for layer in roles} == roles
    assert sum(len(weight.released()) for weight in all_weights(FULL)) == 96085 - 266


def test_layout_names_and_shapes_are_the_golden_checkpoint(tiny_dir: Path) -> None:
    source = SafetensorsSource(tiny_dir)
    expected = {w.name: list(w.shape) for w in all_weights(TINY) if "bias_vl" not in w.name}
    assert {name: list(source.describe(name).shape) for name in source.names()} == expected


def test_slice_renumbers_roles() -> None:
    config = slice_config(
        FULL, layer_ids=[0, 1, 2, 3, 20, 21, 24, 36, 39], num_experts=16, engram_rows=24_000
    )
    assert config.compress_ratios == (0, 0, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0)
    assert (config.kv_source_layer_ids, config.candidate_source_layer_id) == ((2, 4), 4)
    assert config.index_source_layer_ids == (2, 4, 6, 7)
    assert (config.engram_layer_ids, config.dspark_target_layer_ids) == ((1,), (8,))
    assert (config.n_routed_experts, config.num_experts_per_tok) == (16, 6)
    assert 24_000 < config.engram_num_embeddings[0] < 30_000
    assert config.hidden_size == 5120


@pytest.mark.parametrize(
    ("layers", "mention"),
    [
        ([0, 1, 3, 20], "layer 3 reads from layer 2"),
        ([0, 1, 2, 20, 25], "layer 25 reads from layer 24"),
        ([0, 1, 2], "candidate source"),
        ([1, 0, 20], "ascending"),
        ([0, 40], "ascending"),
    ],
)
def test_slice_without_its_sources_is_refused(layers: list[int], mention: str) -> None:
    with pytest.raises(ConfigError, match=mention):
        slice_config(FULL, layer_ids=layers)


def test_medium_uses_the_released_records() -> None:
    assert (MEDIUM.head_dim, MEDIUM.index_head_dim, MEDIUM.sliding_window) == (512, 128, 128)
    values = sum(int(np.prod(weight.shape)) for weight in all_weights(MEDIUM))
    assert 60e6 < values < 90e6


def test_sliced_checkpoint_runs(tmp_path: Path) -> None:
    """A slice made by init is a whole model: it becomes an engine and runs."""
    checkpoint, engine, out = tmp_path / "ckpt", tmp_path / "engine", tmp_path / "out.safetensors"
    init = ["init", "--config", "tiny", "--experts", "3", "--engram-rows", "200"]
    init += ["--output_dir", str(checkpoint), "--layer-ids"]
    assert main([*init, "0,1,2,3,6,8,11"]) == 1  # 11 needs 10
    assert main([*init, "0,1,2,3,6,8,10"]) == 0
    assert main(["engine", "--checkpoint", str(checkpoint), "--output_dir", str(engine)]) == 0
    np.save(tmp_path / "t.npy", np.arange(40))
    forward = ["forward", "--engine", str(engine), "--tokens", str(tmp_path / "t.npy")]
    assert main([*forward, "--mode", "decoder-replay", "--out", str(out)]) == 0
    assert SafetensorsFile(out).tensors["logits"].shape == (8, 512)
