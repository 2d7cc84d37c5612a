"""Quantisation through NVIDIA ModelOpt itself."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.checkpoint import Checkpoint
from builder.cli import main
from builder.progress import Progress
from builder.quantization.quantize import quantize_checkpoint
from builder.quantization.recipe import CLASSES, Target
from engine.directory import Engine
from engine.safetensors_file import SafetensorsFile
from python_backend.service import ServedModel


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


@pytest.fixture(scope="session", params=["nvfp4", "mxfp8"])
def quantized(
    request: pytest.FixtureRequest, float_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    output = tmp_path_factory.mktemp(request.param) / "checkpoint"
    assert quantize(float_dir, output, request.param) == 0
    return request.param, output


def test_modelopt_bytes_by_its_qtensors(quantized: tuple[str, Path], float_dir: Path) -> None:
    """ModelOpt's tensor classes on whole weights give the bytes that streaming wrote."""
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor

    format, directory = quantized
    source, made = Checkpoint.open(float_dir).source, Checkpoint.open(directory).source
    for base in (
        "layers.0.attn.wq_b", "layers.2.ffn.experts.1.w2", "layers.1.engram.embed",
        "mtp.0.main_proj", "layers.2.attn.indexer.wq_b", "layers.0.attn.wo_a",
    ):  # fmt: skip
        values = source.read(f"{base}.weight").clone()
        if format == "nvfp4":
            q, scale, whole = NVFP4QTensor.quantize(values, 16)
            assert torch.equal(made.read(f"{base}.weight_scale_2"), whole)
        else:
            q, scale = MXFP8QTensor.quantize(values)
        codes = made.read(f"{base}.weight")
        assert torch.equal(codes.view(torch.uint8), q._quantized_data.view(torch.uint8)), base
        stored = made.read(f"{base}.weight_scale")
        assert torch.equal(stored.view(torch.uint8), scale.view(torch.uint8).view(stored.shape))


def test_report_and_description(quantized: tuple[str, Path]) -> None:
    format, directory = quantized
    report = json.loads((directory / "report.json").read_text())
    # Known errors of the formats for normal values.
    error = {"nvfp4": 0.0945, "mxfp8": 0.0265}[format]
    assert set(report["classes"]) == set(CLASSES)
    for title, row in report["classes"].items():
        assert row["relative_error"] == pytest.approx(error, rel=0.04), title
        ratio = row["output_bytes"] / (2 * row["values"])
        assert ratio == pytest.approx({"nvfp4": 9 / 32, "mxfp8": 33 / 64}[format], rel=0.01)
        assert row["zero_scales"] == 0
    described = json.loads((directory / "hf_quant_config.json").read_text())
    assert described["producer"] == {"name": "modelopt", "version": "0.47.0"}
    quantization = described["quantization"]
    assert quantization["quant_algo"] == {"nvfp4": "W4A16_NVFP4", "mxfp8": "MXFP8"}[format]
    assert quantization["group_size"] == {"nvfp4": 16, "mxfp8": 32}[format]
    assert {"head", "embed", "layers.0.ffn.gate"} <= set(quantization["exclude_modules"])


def test_modelopts_export_writes_the_same_tensors(
    quantized: tuple[str, Path], float_dir: Path
) -> None:
    """ModelOpt's checkpoint export, experts included: names, bytes, and its description. It gives
    the two matrices on an expert's input one global scale, for kernels that fuse them."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.quant_utils import get_quant_config, preprocess_linear_fusion
    from modelopt.torch.export.unified_export_hf import _process_quantized_modules

    format, directory = quantized
    source, made = Checkpoint.open(float_dir).source, Checkpoint.open(directory).source
    experts = ("layers.2.ffn.experts.1", "layers.3.ffn.shared_experts", "layers.5.ffn.experts.0")
    names = ["layers.0.attn.wq_b", *(f"{e}.{part}" for e in experts for part in ("w1", "w2", "w3"))]
    model = torch.nn.Module()
    for name in names:
        values = source.read(f"{name}.weight").clone()
        linear = torch.nn.Linear(values.shape[1], values.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(values)
        place = model
        *path, last = name.split(".")
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, torch.nn.Module())
            place = place.get_submodule(part)
        place.add_module(last, linear)
    config = mtq.W4A16_NVFP4_CFG if format == "nvfp4" else mtq.MXFP8_DEFAULT_CFG
    model = mtq.quantize(model, config)
    described = get_quant_config(model)["quantization"]
    ours = json.loads((directory / "hf_quant_config.json").read_text())["quantization"]
    assert {**described, "exclude_modules": ours["exclude_modules"]} == ours
    if format == "nvfp4":
        for expert in experts:
            pair = [model.get_submodule(f"{expert}.{part}") for part in ("w1", "w3")]
            preprocess_linear_fusion(pair)
            first, second = (made.read(f"{expert}.{part}.weight_scale_2") for part in ("w1", "w3"))
            assert torch.equal(first, second)
    _process_quantized_modules(model, torch.float32)
    exported = {name: t for name, t in model.state_dict().items() if "quantizer" not in name}
    assert exported.keys() == {name for name in made.names() if name.rpartition(".")[0] in names}
    for name, tensor in exported.items():
        stored = made.read(name).view(-1).view(torch.uint8)
        assert torch.equal(tensor.contiguous().view(-1).view(torch.uint8), stored), name


@pytest.mark.parametrize("tp_size", [1, 2])
def test_quantised_checkpoint_becomes_an_engine(
    quantized: tuple[str, Path], tp_size: int, tmp_path: Path
) -> None:
    format, directory = quantized
    assert run(
        "engine", "--checkpoint_dir", directory, "--output_dir", tmp_path / "e",
        "--tp_size", str(tp_size), "--max_seq_len", "512",
    ) == 0  # fmt: skip
    engine = Engine.open(tmp_path / "e")
    kinds = {"linears": format, "experts": format, "engram_rows": format}
    assert engine.quantization == kinds
    if tp_size == 1:
        np.save(tmp_path / "t.npy", np.arange(3, 200, 7))
        verify = ["verify", "--engine", tmp_path / "e", "--tokens", tmp_path / "t.npy"]
        same = ("--max_error", "0", "--min_agreement", "1")
        assert run(*verify, "--checkpoint", directory, *same) == 0
        served = ServedModel.open(tmp_path / "e", {})
        served.start()
        try:
            served.warm_up()  # raises when no token comes
        finally:
            served.stop()
    else:
        rank = SafetensorsFile(tmp_path / "e" / "rank1.safetensors").tensors
        whole = Checkpoint.open(directory).source.describe("layers.0.attn.wo_b.weight_scale")
        part = rank["layers.0.attn.wo_b.weight_scale"]
        assert part.shape == (whole.shape[0], whole.shape[1] // 2)


def test_nvfp4_experts_beside_the_released_rest(small_dir: Path, tmp_path: Path) -> None:
    assert quantize(small_dir, tmp_path / "out", "nvfp4-experts") == 0
    before, after = tensors(small_dir), tensors(tmp_path / "out")
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed == {n for n in before if ".experts." in n and n.startswith("layers.")}
    described = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert described["quant_algo"] == "W4A16_NVFP4"

    def excluded(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in described["exclude_modules"])

    assert excluded("mtp.0.ffn.experts.0.w1")
    assert excluded("layers.2.attn.wo_a")
    assert not excluded("layers.2.ffn.experts.3.w2")


def test_streaming_in_small_chunks_writes_the_same(
    quantized: tuple[str, Path], float_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 64 rows of 64: NVFP4's global scale comes from all of them."""
    format, directory = quantized
    monkeypatch.setattr("builder.quantization.quantize._CHUNK_VALUES", 4096)
    checkpoint = Checkpoint.open(float_dir)
    targets = dict.fromkeys([weight.name for weight in checkpoint.weights], "source")
    names = ("layers.0.attn.wq_b", "layers.4.engram.embed")
    targets |= {f"{name}.weight": format for name in names}
    quantize_checkpoint(checkpoint, tmp_path / "out", targets, progress=Progress())
    made, whole = tensors(tmp_path / "out"), tensors(directory)
    for name in made:
        if name.startswith(names):
            assert made[name] == whole[name], name


def test_from_one_layout_of_modelopts_to_the_other(small_dir: Path, tmp_path: Path) -> None:
    """Their scales have one name. MXFP8 keeps released values, so NVFP4 through it is the same."""
    names = {f"layers.0.{part}.weight" for part in ("attn.wq_b", "ffn.experts.1.w2")}

    def requantized(source: Path, format: Target, name: str) -> Path:
        checkpoint = Checkpoint.open(source)
        targets: dict[str, Target] = {
            weight.name: format if weight.name in names else "source"
            for weight in checkpoint.weights
        }
        quantize_checkpoint(checkpoint, tmp_path / name, targets, progress=Progress())
        return tmp_path / name

    between = requantized(small_dir, "mxfp8", "between")
    made = tensors(requantized(between, "nvfp4", "made"))
    assert made == tensors(requantized(small_dir, "nvfp4", "expected"))
    assert requantized(tmp_path / "made", "mxfp8", "back").is_dir()


def test_zeros_and_extremes(float_dir: Path, tmp_path: Path) -> None:
    from builder.quantization.modelopt import quantize_rows

    zeros = torch.zeros(32, 64)
    for format in ("nvfp4", "mxfp8"):
        rows = quantize_rows("zeros", zeros, format, 0.0)
        assert torch.equal(rows.matrix.dequantize(), zeros)
    some = torch.zeros(32, 64)
    some[3, 40] = -2.0
    for format in ("nvfp4", "mxfp8"):
        assert torch.equal(quantize_rows("some", some, format, 2.0).matrix.dequantize(), some)
    with pytest.raises(ValueError, match="tiny: its largest magnitude 1e-36 is too small"):
        quantize_rows("tiny", torch.full((32, 64), 1e-36), "nvfp4", 1e-36)
    largest = torch.finfo(torch.float32).max
    with pytest.raises(ValueError, match=r"huge: its largest magnitude 3\.4e\+38 overflows"):
        quantize_rows("huge", torch.full((32, 64), largest), "mxfp8", largest)


def test_another_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from builder.quantization import modelopt as quantize_modelopt

    assert quantize_modelopt.check_modelopt() == []
    monkeypatch.setattr(quantize_modelopt, "version", lambda _: "0.50.1")
    (warning,) = quantize_modelopt.check_modelopt()
    assert "ModelOpt 0.50.1 is installed, and 0.47.0 is what was tested" in warning


def test_version_that_cannot_be_used_is_told(
    float_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As 0.41 does, which has no such configuration."""
    import modelopt.torch.quantization as mtq

    from builder.quantization import modelopt as quantize_modelopt

    monkeypatch.setattr(quantize_modelopt, "version", lambda _: "0.41.0")
    monkeypatch.delattr(mtq, "W4A16_NVFP4_CFG")
    assert quantize(float_dir, tmp_path / "out", "nvfp4") == 1
    complaint = capsys.readouterr().err
    assert "ModelOpt 0.41.0 cannot be used here: " in complaint
    assert "0.47.0 is what was tested" in complaint
    assert not (tmp_path / "out").exists()
