"""Calibrated NVFP4 inputs: scales by hand, data files, resuming, refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from tokenizers import Tokenizer

from builder.checkpoint import Checkpoint
from builder.cli import main
from builder.progress import Progress
from builder.quantization.calibrate import CalibrationData, input_scales
from builder.quantization.quantize import quantize_checkpoint
from builder.quantization.recipe import Recipe
from builder.quantization.watch import watched_weights
from engine.config import ModelConfig
from engine.directory import Engine
from engine.network import Network, load_weights
from engine.network.run import ForwardMode, run_forward
from engine.network.weights import NetworkWeights
from engine.safetensors_file import SafetensorsFile
from engine.tensor_source import CheckpointError, TensorSource
from plugins.formats.nvfp4 import round_input
from tests.builder.test_quantize import poison, tensors

TOKENS = np.random.default_rng(3).integers(3, 500, 90)


def run(*options: str | Path) -> int:
    return main([str(option) for option in options])


def calibrate(source: Path, output: Path, data: Path, *options: str | Path) -> int:
    return run(
        "quantize", "--checkpoint_dir", source, "--output_dir", output,
        "--format", "nvfp4-w4a4", "--calib_dataset", data, *options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, TOKENS)
    return path


@pytest.fixture(scope="module")
def calibrated(float_dir: Path, data_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("w4a4") / "checkpoint"
    assert calibrate(float_dir, output, data_file) == 0
    return output


def scale_of(directory: Path, name: str) -> float:
    return float(Checkpoint.open(directory).source.read(f"{name}.input_scale"))


def normed(rows: np.ndarray, weight: torch.Tensor, eps: float) -> np.ndarray:
    mean = np.mean(rows**2, axis=-1, keepdims=True)
    return rows / np.sqrt(mean + eps) * weight.double().numpy()


def test_scales_of_the_first_layer_by_hand(calibrated: Path, float_dir: Path) -> None:
    """Layer 0 sees the normed embedding, its wq_b the normed product with wq_a; 2688 = 6 · 448."""
    checkpoint = Checkpoint.open(float_dir)
    read, eps = checkpoint.source.read, checkpoint.config.rms_norm_eps
    rows = read("embed.weight").double().numpy()[TOKENS]
    u = normed(rows, read("layers.0.attn_norm.weight"), eps)
    for name in ("wq_a", "wkv"):
        expected = np.abs(u).max() / 2688
        assert scale_of(calibrated, f"layers.0.attn.{name}") == pytest.approx(expected, rel=1e-5)
    latent = u @ read("layers.0.attn.wq_a.weight").double().numpy().T
    latent = normed(latent, read("layers.0.attn.q_norm.weight"), eps)
    expected = np.abs(latent).max() / 2688
    assert scale_of(calibrated, "layers.0.attn.wq_b") == pytest.approx(expected, rel=1e-5)


def test_scales_of_experts(calibrated: Path) -> None:
    """Every token goes to the shared expert and to some of the others, with the same input."""
    source = Checkpoint.open(calibrated).source

    def scale(name: str) -> float:
        return float(source.read(f"{name}.input_scale"))

    for layer in range(12):
        prefix = f"layers.{layer}.ffn"
        shared = scale(f"{prefix}.shared_experts.w1")
        routed = [scale(f"{prefix}.experts.{e}.w1") for e in range(4)]
        assert max(routed) == shared == scale(f"{prefix}.shared_experts.w3")
        assert routed == [scale(f"{prefix}.experts.{e}.w3") for e in range(4)]
        assert scale(f"{prefix}.experts.0.w2") > 0


def test_only_calibrated_classes_have_scales(calibrated: Path, float_dir: Path) -> None:
    before, after = tensors(float_dir), tensors(calibrated)
    scaled = {name.removesuffix(".input_scale") for name in after if "input_scale" in name}
    assert scaled == {
        name.removesuffix(".weight_scale")
        for name in after
        if name.endswith(".weight_scale")
        and not name.startswith("mtp.")
        and ".wo_a." not in name
        and ".engram.embed." not in name
    }
    described = json.loads((calibrated / "hf_quant_config.json").read_text())["quantization"]
    assert described["quant_algo"] == "MIXED_PRECISION"
    layers = described["quantized_layers"]
    assert layers["layers.0.attn.wq_a"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert layers["layers.0.attn.wo_a"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert before["norm.weight"] == after["norm.weight"]


def test_weights_alone_again_drops_the_scales(calibrated: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("quantize", "--checkpoint_dir", calibrated, "--output_dir", out,
               "--format", "nvfp4") == 0  # fmt: skip
    before = tensors(calibrated)
    assert tensors(out) == {n: data for n, data in before.items() if "input_scale" not in n}
    described = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert described["quant_algo"] == "W4A16_NVFP4"


def test_engines_use_the_scales(calibrated: Path, float_dir: Path, tmp_path: Path) -> None:
    """Calibration changes no weight. An engine rounds its inputs to NVFP4 under the scales, packed
    or decoded, and computes what NVFP4 weights give where inputs are left unrounded."""
    assert run(
        "quantize", "--checkpoint_dir", float_dir, "--output_dir", tmp_path / "plain",
        "--format", "nvfp4",
    ) == 0  # fmt: skip
    plain, made = tensors(tmp_path / "plain"), tensors(calibrated)
    assert {name: made[name] for name in plain} == plain
    assert run(
        "engine", "--checkpoint_dir", calibrated, "--output_dir", tmp_path / "e",
        "--tp_size", "2", "--max_seq_len", "512",
    ) == 0  # fmt: skip
    for rank in range(2):
        file = SafetensorsFile(tmp_path / "e" / f"rank{rank}.safetensors")
        for name in ("layers.0.attn.wo_b", "layers.3.ffn.shared_experts.w1"):
            assert float(file.read(f"{name}.input_scale")) == scale_of(calibrated, name)
    run("engine", "--checkpoint_dir", calibrated, "--output_dir", tmp_path / "one")
    engine, checkpoint = Engine.open(tmp_path / "one"), Checkpoint.open(tmp_path / "plain")
    assert engine.quantization == {  # wo_a, the drafter and the tables are weight-only
        "linears": "nvfp4 and nvfp4-w4a4",
        "experts": "nvfp4 and nvfp4-w4a4",
        "engram_rows": "nvfp4",
    }
    weights = engine.load_weights(torch.float32, packed=True)
    layer = weights.layers[3]
    scale = torch.tensor(scale_of(calibrated, "layers.3.attn.wo_b"))
    assert torch.equal(layer.attention.wo_b.input_scale, scale)
    assert layer.attention.wo_a.input_scale is None
    pairs = [[scale_of(calibrated, f"layers.3.ffn.experts.{e}.{w}") for w in ("w1", "w2")]
             for e in range(4)]  # fmt: skip
    assert torch.equal(layer.moe.routed.input_scale, torch.tensor(pairs))
    scaled = logits(engine.config, weights)
    decoded = engine.load_weights(torch.float32)
    assert torch.equal(decoded.layers[3].moe.routed.input_scale, torch.tensor(pairs))
    assert torch.equal(logits(engine.config, decoded), scaled)
    source, classes = checkpoint.source, engine.token_class
    plain = load_weights(engine.config, source, classes, torch.float32)
    assert not torch.equal(logits(engine.config, plain), scaled)
    unrounded = load_weights(engine.config, source, classes, torch.float32, activation_quant=False)
    off = engine.load_weights(torch.float32, activation_quant=False)
    assert torch.equal(logits(engine.config, off), logits(engine.config, unrounded))


def logits(config: ModelConfig, weights: NetworkWeights) -> torch.Tensor:
    return run_forward(Network(config, weights), TOKENS[:20], ForwardMode.FULL)["logits"]


@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
def test_inputs_are_rounded_as_modelopt_rounds(size: float) -> None:
    """Its activation quantizer needs a GPU; its tensors do the same: block scales as they come,
    over a given global scale. Some blocks are beyond it, some are nothing beside it, some zero."""
    x = size * torch.randn(64, 128, generator=torch.Generator().manual_seed(5))
    x[3] *= 1e-6
    x[5, :40] = 0
    scale = torch.tensor(2.5 / 2688)
    tensor, block, _ = NVFP4QTensor.quantize(x, 16, None, scale)
    expected = tensor.dequantize(
        dtype=torch.float32, scale=block, double_scale=scale, block_sizes={-1: 16}
    )
    assert torch.equal(round_input(x, scale), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers.0.attn.wq_a": 0.0}, "layers.0.attn.wq_a.input_scale: expected a positive scale"),
        ({"layers.0.attn.wq_a": torch.nan}, "expected a positive scale, got nan"),
        ({"layers.1.ffn.shared_experts.w3": None}, "layers.1.ffn.shared_experts: expected input"),
        (dict.fromkeys(f"layers.2.ffn.experts.1.{w}" for w in ("w1", "w2", "w3")),
         "layers.2.ffn.experts: expected input scales of all 4 experts or of none, got 3"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(
    calibrated: Path, change: dict[str, float | None], words: str
) -> None:
    checkpoint = Checkpoint.open(calibrated)
    classes, _ = checkpoint.token_class(None)
    source = _Changed(checkpoint.source, {f"{n}.input_scale": v for n, v in change.items()})
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load_weights(checkpoint.config, source, classes, torch.float32, packed=True)


class _Changed:
    """A source with some scales replaced or, where None, left out."""

    def __init__(self, source: TensorSource, change: dict[str, float | None]) -> None:
        self._source = source
        self._change = change
        self.describe = source.describe

    def __contains__(self, name: str) -> bool:
        return self._change.get(name, 1) is not None and name in self._source

    def read(self, name: str) -> torch.Tensor:
        value = self._change.get(name)
        return self._source.read(name) if value is None else torch.tensor(value)


def test_experts_without_tokens_take_the_largest_of_their_layer(float_dir: Path) -> None:
    checkpoint = Checkpoint.open(float_dir)
    names = [f"layers.0.ffn.experts.{expert}.w1" for expert in range(4)]
    scales, warnings = input_scales(checkpoint, names, CalibrationData((TOKENS[:1],)), Progress())
    chosen = checkpoint.config.num_experts_per_tok
    assert warnings == [
        f"{4 - chosen} expert inputs saw no token and take the largest scale of their layer; "
        "more calibration data would reach them"
    ]
    assert len(set(scales.values())) == 1  # one token: all experts share its input


def test_watching_changes_no_bit(float_dir: Path) -> None:
    checkpoint = Checkpoint.open(float_dir)
    classes, _ = checkpoint.token_class(None)
    weights = load_weights(checkpoint.config, checkpoint.source, classes, torch.float32)
    seen: list[torch.Tensor] = []
    watched = watched_weights(weights, {"layers.3.attn.wo_b": seen.append})
    plain, observed = (
        run_forward(Network(checkpoint.config, one), TOKENS, ForwardMode.FULL)["logits"]
        for one in (weights, watched)
    )
    assert torch.equal(plain, observed)
    assert type(observed) is torch.Tensor
    config = checkpoint.config
    width = config.o_groups * config.o_lora_rank
    assert {rows.shape for rows in seen} == {(16, width)}  # tiles of rows
    assert len(seen) == -(-len(TOKENS) // 16)
    with pytest.raises(ValueError, match=r"got layers\.3\.attn\.wo_a"):
        watched_weights(weights, {"layers.3.attn.wo_a": seen.append})


def test_data_files_hold_the_same_tokens(float_dir: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(float_dir)
    text = "Sara saved 84 dollars – " * 40
    ids = Tokenizer.from_file(str(float_dir / "tokenizer.json")).encode(text).ids
    assert len(ids) > 512
    (tmp_path / "a.txt").write_text(text)
    lines = [json.dumps({"text": text}), "", json.dumps({"input_ids": ids[:7]})]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    np.save(tmp_path / "c.npy", np.array([ids, ids], dtype=np.int32))
    pieces = [ids[start : start + 512] for start in range(0, len(ids), 512)]
    for name, expected in (
        ("a.txt", pieces),
        ("b.jsonl", [*pieces, ids[:7]]),
        ("c.npy", [*pieces, *pieces]),
    ):
        data = CalibrationData.read(tmp_path / name, checkpoint)
        assert [piece.tolist() for piece in data.pieces] == expected, name


def test_interrupted_run_keeps_its_scales(
    calibrated: Path,
    float_dir: Path,
    data_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Checkpoint.open(float_dir)
    targets, _ = Recipe.named("nvfp4-w4a4").targets(checkpoint.weights, "refuse")
    data = CalibrationData.read(data_file, checkpoint)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("builder.quantization.quantize._Run.write_shard", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(
                checkpoint, tmp_path / "out", targets, progress=Progress(), data=data
            )
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(
        "builder.quantization.quantize.input_scales", stop
    )  # must not be needed again
    assert calibrate(float_dir, tmp_path / "out", data_file) == 0
    assert tensors(tmp_path / "out") == tensors(calibrated)
    assert not list((tmp_path / "out").glob("quantize.*"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.npy", None, "expected a file at "),
        ("a.csv", b"1,2", "expected .txt, .jsonl or .npy, got a.csv"),
        ("a.npy", b"no array", "is not a .npy array"),
        ("a.txt", b"", "holds no tokens"),
        ("a.txt", b"\xff\xfe", "expected UTF-8 text in a.txt"),
        ("a.jsonl", b'{"text": "x"}\n{"prompt": "x"}', 'or {"input_ids": [1, 2, …]} in a.jsonl'),
        ("a.jsonl", b'{"text": "x"}\n{"prompt": "x"}', "line 2"),
        ("a.jsonl", b'{"input_ids": [1, true]}', "line 1"),
        ("a.jsonl", b'{"input_ids": [3, 512]}', "expected ids 0 … 511 in "),
    ],
)
def test_bad_data(
    name: str,
    content: bytes | None,
    said: str,
    float_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert calibrate(float_dir, tmp_path / "out", tmp_path / name) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("dsv41-build: calib_dataset: ")
    assert said in complaint
    assert complaint.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def test_data_where_it_has_no_use_or_is_missing(
    float_dir: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["quantize", "--checkpoint_dir", float_dir, "--output_dir", tmp_path / "out"]
    assert run(*options, "--format", "mxfp8", "--calib_dataset", data_file) == 1
    assert "mxfp8 quantises weights only, which takes no data" in capsys.readouterr().err
    assert run(*options, "--format", "nvfp4-w4a4") == 1
    assert "nvfp4-w4a4 measures the inputs of linear layers on data" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text("wo_a: nvfp4-w4a4")
    recipe = ("--recipe", tmp_path / "recipe.yaml")
    assert calibrate(float_dir, tmp_path / "out", data_file, *recipe) == 1
    assert "layers.0.attn.wo_a.weight cannot be nvfp4-w4a4" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_text_without_a_tokenizer(
    float_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(float_dir, tmp_path / "ckpt")
    (tmp_path / "ckpt" / "tokenizer.json").unlink()
    (tmp_path / "a.txt").write_text("words")
    assert calibrate(tmp_path / "ckpt", tmp_path / "out", tmp_path / "a.txt") == 1
    assert "a.txt is text, and " in capsys.readouterr().err


def test_inputs_that_are_not_finite_name_the_layer(
    float_dir: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(float_dir, tmp_path / "ckpt")
    poison(tmp_path / "ckpt", "layers.0.attn.wq_a.weight", 5, float("nan"))
    assert calibrate(tmp_path / "ckpt", tmp_path / "out", data_file) == 1
    assert "layers.0.attn.wq_b: its inputs are not finite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
