"""The quantize command: recipes, streaming, resuming, ModelOpt's bytes, bad input."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.checkpoint import Checkpoint
from builder.cli import main
from builder.progress import Progress
from builder.quantization import modelopt as quantize_modelopt
from builder.quantization.quantize import quantize_checkpoint
from builder.quantization.recipe import CLASSES, Recipe, weight_class
from builder.quantization.report import ClassTotals
from builder.values import check_values
from engine.tensor_source import CheckpointError
from plugins.linear import PackedFormat, PackedMatrix


def run(*options: str | Path) -> int:
    return main([str(option) for option in options])


def quantize(source: Path, output: Path, format: str = "as-released", *options: str | Path) -> int:
    return run(
        "quantize", "--checkpoint_dir", source, "--output_dir", output, "--format", format, *options
    )


def tensors(directory: Path) -> dict[str, bytes]:
    source = Checkpoint.open(directory).source
    return {
        name: source.read(name).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name in source.names()
    }


# -- recipes ---------------------------------------------------------------------------------------


def test_classes_of_weights(small_dir: Path) -> None:
    classes = {weight.name: weight_class(weight) for weight in Checkpoint.open(small_dir).weights}
    assert set(classes.values()) == {*CLASSES, None}
    assert classes["layers.0.ffn.experts.3.w2.weight"] == "experts"
    assert classes["layers.0.ffn.shared_experts.w1.weight"] == "shared_experts"
    assert classes["layers.0.attn.wq_b.weight"] == "linears"
    assert classes["layers.1.engram.wkv.weight"] == "linears"
    assert classes["layers.0.attn.wo_a.weight"] == "wo_a"
    assert classes["layers.2.attn.indexer.wq_b.weight"] == "indexer"
    assert classes["mtp.0.ffn.experts.0.w1.weight"] == "drafter"
    assert classes["layers.1.engram.embed.weight"] == "engram_rows"
    stays = [
        "embed.weight", "head.weight", "norm.weight", "layers.0.ffn.gate.weight",
        "layers.0.hc_attn_fn", "layers.0.attn.attn_sink", "layers.2.attn.indexer.wk.weight",
    ]  # fmt: skip
    assert {classes[name] for name in stays} == {None}


def test_last_pattern_decides_over_the_class(small_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "wo_a: source\ntensors:\n  'layers.*.w1.weight': mxfp8\n  'layers.3.*': source\n"
    )
    weights = Checkpoint.open(small_dir).weights
    recipe = Recipe.read(file).over(Recipe.named("nvfp4"))
    targets, warnings = recipe.targets(weights, "refuse")
    assert not warnings
    assert targets["layers.0.attn.wo_a.weight"] == "source"
    assert targets["layers.0.attn.wo_b.weight"] == "nvfp4"
    assert targets["layers.0.ffn.experts.0.w1.weight"] == "mxfp8"
    assert targets["layers.3.ffn.experts.0.w1.weight"] == "source"
    assert targets["layers.0.attn_norm.weight"] == "source"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("expert: nvfp4", "expert is not a class; expected experts, "),
        ("experts: int4", "expected one of nvfp4, nvfp4-w4a4, mxfp8, released, source, got int4"),
        ("tensors: {'layers.99.*': nvfp4}", "no tensor matches layers.99.*"),
        ("tensors: {'*.attn_norm.weight': nvfp4}", "layers.0.attn_norm.weight and the like"),
        ("- nvfp4", "expected lines of class: format, got list"),
        ("tensors: nvfp4", "expected lines of pattern: format under tensors"),
        ("experts: [", "is not YAML"),
        (
            "experts: nvfp4\nwo_a: source\nexperts: mxfp8",
            "experts is in line 1 and again in line 3",
        ),
        (
            "tensors:\n  '*.w1.*': nvfp4\n  '*.w1.*': mxfp8",
            "*.w1.* is in line 2 and again in line 3",
        ),
        ("experts: " + "[" * 500, "is nested too deeply"),
        (
            "experts: nvfp4  # F\xfcr alle",
            "is not UTF-8 text: 'utf-8' codec can't decode byte 0xfc",
        ),
    ],
)
def test_bad_recipes(
    text: str, said: str, small_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_bytes(text.encode("latin-1"))
    status = quantize(small_dir, tmp_path / "out", "nvfp4", "--recipe", tmp_path / "recipe.yaml")
    complaint = capsys.readouterr().err
    assert status == 1
    assert said in complaint
    assert complaint.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def test_class_without_weights_is_named(small_dir: Path) -> None:
    weights = [
        weight
        for weight in Checkpoint.open(small_dir).weights
        if not weight.name.startswith("mtp.")
    ]
    with pytest.raises(ValueError, match="no weights of class drafter"):
        Recipe({"drafter": "nvfp4"}, {}, "mine").check_matches(weights)


# -- the released layout, which needs no ModelOpt --------------------------------------------------


def test_float_weights_become_the_released_checkpoint(
    float_dir: Path, small_dir: Path, tmp_path: Path
) -> None:
    """The same random weights were written in both layouts by another part of the builder."""
    assert quantize(float_dir, tmp_path / "out") == 0
    made, expected = tensors(tmp_path / "out"), tensors(small_dir)
    assert made.keys() == expected.keys()
    quantized = {name for name in expected if name.removesuffix(".scale") != name}
    assert len(quantized) > 100
    for name in quantized:
        assert made[name] == expected[name], name
        weight = name.removesuffix(".scale") + ".weight"
        assert made[weight] == expected[weight], weight
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["classes"]["linears"]["saturated"] == 0
    # E4M3 has steps of 1/8 … 1/16 of a value: an error of 2.6 % for normal values.
    assert report["classes"]["linears"]["relative_error"] == pytest.approx(0.026, abs=0.002)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_released_weights_are_copied(small_dir: Path, tmp_path: Path) -> None:
    assert quantize(small_dir, tmp_path / "out") == 0
    assert tensors(tmp_path / "out") == tensors(small_dir)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["classes"] == {}


class _Stop(Progress):
    """Ctrl-C after so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.left = num_bytes

    def advance(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise KeyboardInterrupt


def test_interrupted_run_resumes_with_its_complete_shards(float_dir: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(float_dir)
    targets, _ = Recipe.named("as-released").targets(checkpoint.weights, "refuse")
    half = sum(path.stat().st_size for path in float_dir.glob("*.safetensors")) // 2
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, tmp_path / "out", targets, progress=_Stop(half))
    assert not (tmp_path / "out").exists()
    partial = tmp_path / "out.partial"
    complete = {path.name: path.stat().st_ino for path in partial.glob("*.safetensors")}
    assert 0 < len(complete) < len(list(float_dir.glob("*.safetensors")))
    assert len(list(partial.glob("*.safetensors.partial"))) == 1
    quantize_checkpoint(checkpoint, tmp_path / "out", targets, progress=Progress())
    assert quantize(float_dir, tmp_path / "at once") == 0
    assert tensors(tmp_path / "out") == tensors(tmp_path / "at once")
    assert (tmp_path / "out" / "report.json").read_text() == (
        tmp_path / "at once" / "report.json"
    ).read_text()
    for name, inode in complete.items():
        assert (tmp_path / "out" / name).stat().st_ino == inode
    assert not [path for path in (tmp_path / "out").iterdir() if "state" in path.name]
    assert not partial.exists()


def test_other_options_do_not_resume(float_dir: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(float_dir)
    targets, _ = Recipe.named("as-released").targets(checkpoint.weights, "refuse")
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, tmp_path / "out", targets, progress=_Stop(2 << 20))
    targets = dict.fromkeys(targets, "source")
    quantize_checkpoint(checkpoint, tmp_path / "out", targets, progress=Progress())
    assert tensors(tmp_path / "out") == tensors(float_dir)


def test_full_disk_is_told_before_anything_is_written(
    float_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 1, 99))
    assert quantize(float_dir, tmp_path / "out") == 1
    assert "and 99 are free; make room" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_disk_that_fills_up_leaves_no_checkpoint(
    float_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file size limit stands for the full disk: the kernel refuses the write."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        status = quantize(float_dir, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert status == 1
    complaint = capsys.readouterr().err
    assert "complete shards are kept; the same command goes on with the next" in complaint
    assert f"cannot use {tmp_path / 'out'}: File too large" in complaint
    assert not (tmp_path / "out").exists()
    (tmp_path / "out.partial" / "quantize.state.json").write_text('{"run')  # cut off by the disk
    assert quantize(float_dir, tmp_path / "out") == 0


def poison(directory: Path, name: str, row: int, value: float) -> None:
    """Set the first value of a row of a float32 tensor, in the file."""
    file = Checkpoint.open(directory).source.file_of(name)
    with file.path.open("r+b") as raw:
        (length,) = struct.unpack("<Q", raw.read(8))
        entry = json.loads(raw.read(length))[name]
        columns = math.prod(entry["shape"][1:])
        raw.seek(8 + length + entry["data_offsets"][0] + row * columns * 4)
        raw.write(struct.pack("<f", value))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_name_the_tensor(
    value: float, float_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(float_dir, tmp_path / "ckpt")
    name = "layers.3.attn.wq_b.weight"
    poison(tmp_path / "ckpt", name, 37, value)
    assert quantize(tmp_path / "ckpt", tmp_path / "out") == 1
    assert f"{name} holds a NaN or an infinity (in float32) in row 37" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "name", "row", "words"),
    [
        ("quantize", "layers.3.attn_norm.weight", 5, "NaN or an infinity in row 5"),
        ("engine", "layers.3.attn_norm.weight", 5, "NaN or an infinity in row 5"),
        ("engine", "layers.1.engram.embed.weight", 600, "NaN or an infinity in row 600"),
        ("engine", "layers.2.ffn.experts.1.w2.weight", 127, "NaN or an infinity in row 127"),
    ],
)
def test_engines_and_copies_of_nan_are_refused(
    command: str, name: str, row: int, words: str,
    float_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Norms are 1-D; quantize copies them."""
    shutil.copytree(float_dir, tmp_path / "ckpt")
    poison(tmp_path / "ckpt", name, row, float("nan"))
    if command == "quantize":
        assert quantize(tmp_path / "ckpt", tmp_path / "out") == 1
    else:
        made = ["--checkpoint_dir", str(tmp_path / "ckpt"), "--output_dir", str(tmp_path / "out")]
        assert main(["engine", *made]) == 1
    assert f"{name} holds a {words}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["layers.3.attn.wq_b.weight", "layers.3.attn_norm.weight"])
def test_huge_values_are_reported(
    name: str, float_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1e38 is finite, and any sum of its products is not."""
    shutil.copytree(float_dir, tmp_path / "ckpt")
    poison(tmp_path / "ckpt", name, 5, 1e38)
    warning = f"warning: {name} holds magnitudes of 1.3e+30 or more"
    assert quantize(tmp_path / "ckpt", tmp_path / "out") == 0
    assert warning in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["huge_tensors"] == [name]
    made = ["--checkpoint_dir", str(tmp_path / "out"), "--output_dir", str(tmp_path / "engine")]
    assert main(["engine", *made]) == 0
    stored = name.replace(".weight", ".scale") if "wq_b" in name else name  # there 2^118
    assert warning.replace(name, stored) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "codes", "answer"),
    [
        ("F8_E4M3", [0x7E, 0xFE, 0], False),  # ±448
        ("F8_E4M3", [0, 0x7F, 0], "row 1"),
        ("F8_E4M3", [0, 0, 0xFF], "row 2"),
        ("F8_E8M0", [0, 226, 127], False),  # 2^99
        ("F8_E8M0", [227, 1, 1], True),
        ("F8_E8M0", [254, 1, 255], "row 2"),
        ("I8", [0xFF, 0x7F, 0], False),
    ],
)
def test_stored_codes_that_are_no_numbers(dtype: str, codes: list[int], answer: bool | str) -> None:
    stored = torch.tensor(codes, dtype=torch.uint8)
    if isinstance(answer, str):
        with pytest.raises(CheckpointError, match=answer):
            check_values("x", stored, dtype)
    else:
        assert check_values("x", stored, dtype) is answer


def test_rows_of_part_groups(small_dir: Path) -> None:
    """K = 24 is not whole groups of 16: kept and named, or refused."""
    from builder.layout import Init, Shard, WeightSpec

    odd = WeightSpec("odd.weight", (8, 24), "fp8", "attention", Shard.REPLICATED, Init.MATRIX)
    recipe = Recipe.named("nvfp4")
    targets, warnings = recipe.targets([odd], "keep")
    assert targets == {"odd.weight": "source"}
    assert warnings == [
        "odd.weight: nvfp4 takes rows of a multiple of 16 values, got 24; kept at its source "
        "precision"
    ]
    with pytest.raises(ValueError, match=r"odd\.weight: nvfp4 takes rows of a multiple of 16"):
        recipe.targets([odd], "refuse")


def test_report_counts_by_hand() -> None:
    """Two rows of 32 in MXFP8: step 1 with one value above 448, and a block of zeros."""
    source = torch.zeros(2, 32)
    source[0, :3] = torch.tensor([448.0, 450.0, 3.0])
    codes = torch.zeros(2, 32)
    codes[0, :3] = torch.tensor([448.0, 448.0, 3.0])
    scale = torch.tensor([[127], [0]], dtype=torch.uint8)
    matrix = PackedMatrix(
        PackedFormat.MXFP8, (2, 32), codes.to(torch.float8_e4m3fn), scale, None, torch.float32
    )
    totals = ClassTotals()
    totals.add_rows(source, matrix)
    assert (totals.saturated, totals.zero_blocks, totals.zero_scales) == (1, 1, 0)
    assert totals.squared_error == 4.0
    figures = totals.figures()
    assert figures["relative_error"] == pytest.approx(2 / np.sqrt(448**2 + 450**2 + 9))


def test_missing_modelopt_says_what_to_install(
    small_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "modelopt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "modelopt", None)  # its import fails
    quantize_modelopt.modelopt.cache_clear()
    assert quantize(small_dir, tmp_path / "out", "nvfp4") == 1
    complaint = capsys.readouterr().err
    assert "needs NVIDIA ModelOpt, tested with 0.47.0, and it cannot be imported" in complaint
    assert "pip install '.[quantize]'" in complaint
    assert not list(tmp_path.iterdir())


def test_output_must_be_free(small_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    assert quantize(small_dir, tmp_path / "out") == 1
    assert os.listdir(tmp_path / "out") == ["mine"]
