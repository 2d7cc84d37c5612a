"""`dsv41-build engine`: what lands in the directory, and what happens to damaged ones."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.checkpoint import Checkpoint
from builder.cli import main
from builder.pack import check_world_size, rank_tensors
from builder.presets import FULL, TINY
from engine.config import ConfigError
from engine.directory import Engine, EngineError
from engine.manifest import Manifest
from engine.network import Network, load_weights
from engine.network.run import ForwardMode, run_forward


@pytest.fixture
def engine_copy(released_engine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(released_engine, tmp_path / "copy of an engine"))


def refused(path: Path, *mentions: str, verify: bool = False) -> None:
    with pytest.raises(EngineError) as caught:
        Engine.open(path, verify=verify)
    message = str(caught.value)
    assert "\n" not in message
    for mention in mentions:
        assert mention in message


def test_files_and_settings(released_engine: Path) -> None:
    assert {path.name for path in released_engine.iterdir()} == {
        "config.json", "engram.1.bin", "engram.4.bin", "generation_config.json", "manifest.json",
        "rank0.safetensors", "token_class.npy", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    engine = Engine.open(released_engine, verify=True)
    assert engine.config == TINY
    assert (engine.build.max_batch_size, engine.build.max_seq_len) == (4, 512)
    assert engine.quantization == {"linears": "fp8", "experts": "fp4", "engram_rows": "fp8"}
    assert engine.generation_config["eos_token_id"] == 1
    assert engine.tokenizer_path == released_engine / "tokenizer.json"
    assert engine.token_class.tolist() == [token // 2 for token in range(512)]


def test_manifest_has_every_file_hashed(released_engine: Path) -> None:
    files = json.loads((released_engine / "manifest.json").read_text())["files"]
    assert set(files) == {p.name for p in released_engine.iterdir()} - {"manifest.json"}
    for name, entry in files.items():
        content = (released_engine / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_table_file_is_records_without_a_header(released_dir: Path, released_engine: Path) -> None:
    source = Checkpoint.open(released_dir).source
    codes = source.read("layers.4.engram.embed.weight").view(torch.uint8).numpy()
    scale = source.read("layers.4.engram.embed.scale").numpy()
    stored = np.fromfile(released_engine / "engram.4.bin", dtype=np.uint8).reshape(864, 33)
    np.testing.assert_array_equal(stored[:, :32], codes)
    np.testing.assert_array_equal(stored[:, 32:], scale)


@pytest.mark.parametrize("fixture", ["golden_engine", "released_engine"])
def test_engine_computes_what_its_checkpoint_computes(
    fixture: str, tiny_dir: Path, released_dir: Path, request: pytest.FixtureRequest
) -> None:
    engine = Engine.open(request.getfixturevalue(fixture))
    checkpoint = Checkpoint.open(tiny_dir if fixture == "golden_engine" else released_dir)
    tokens = np.arange(3, 300, 11)
    results = []
    for weights in (
        engine.load_weights(torch.float64),
        load_weights(checkpoint.config, checkpoint.source, engine.token_class, torch.float64),
    ):
        network = Network(engine.config, weights)
        results.append(run_forward(network, tokens, ForwardMode.FULL)["logits"])
    assert torch.equal(*results)


def test_unquantised_engine_keeps_float_rows(golden_engine: Path, tiny_dir: Path) -> None:
    engine = Engine.open(golden_engine)
    assert engine.quantization == {"linears": "f32", "experts": "f32", "engram_rows": "f32"}
    assert engine.tokenizer_path is None
    rows = np.fromfile(golden_engine / "engram.1.bin", dtype=np.float32).reshape(660, 32)
    stored = Checkpoint.open(tiny_dir).source.read("layers.1.engram.embed.weight")
    np.testing.assert_array_equal(rows, stored.numpy())


def test_quantised_linears_round_their_inputs(released_engine: Path) -> None:
    engine = Engine.open(released_engine)
    layer = engine.load_weights(torch.float32).layers[0]
    assert layer.attention.wq_b.quantized_input
    assert layer.moe.routed.quantized_input
    off = engine.load_weights(torch.float32, activation_quant=False).layers[0]
    assert not off.attention.wq_b.quantized_input
    assert not off.moe.routed.quantized_input


def test_configuration_has_the_shape_of_tensorrt_llms_engines(released_engine: Path) -> None:
    raw = json.loads((released_engine / "config.json").read_text())
    pretrained = raw["pretrained_config"]
    assert pretrained["architecture"] == "DeepseekV41ForCausalLM"
    assert pretrained["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert (pretrained["hidden_size"], pretrained["num_hidden_layers"]) == (128, 12)
    assert pretrained["quantization"] == {"linears": "fp8", "experts": "fp4", "engram_rows": "fp8"}
    limits = {"max_batch_size": 4, "max_num_tokens": 8192, "max_seq_len": 512}
    assert raw["build_config"] == limits


def test_not_an_engine(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "nothing", "dsv41-build engine")
    refused(tmp_path, "manifest.json", "not a finished engine")


def test_half_written_engine(engine_copy: Path) -> None:
    (engine_copy / "manifest.json").unlink()
    refused(engine_copy, "not a finished engine")


def test_temporary_name(engine_copy: Path) -> None:
    refused(engine_copy.rename(engine_copy.with_name("e.partial")), "never finished")


def test_missing_file(engine_copy: Path) -> None:
    (engine_copy / "engram.1.bin").unlink()
    refused(engine_copy, "engram.1.bin", "missing")


@pytest.mark.parametrize("name", ["config.json", "token_class.npy", "rank0.safetensors"])
def test_altered_file(engine_copy: Path, name: str) -> None:
    content = bytearray((engine_copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (engine_copy / name).write_bytes(content)
    refused(engine_copy, name, "altered")


def test_shortened_file(engine_copy: Path) -> None:
    content = (engine_copy / "engram.4.bin").read_bytes()
    (engine_copy / "engram.4.bin").write_bytes(content[:-1])
    refused(engine_copy, "engram.4.bin", "altered", str(len(content)))


def test_large_files_are_hashed_when_loaded_or_asked_to(
    engine_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.manifest._ALWAYS_HASHED_BYTES", 100_000)
    content = bytearray((engine_copy / "rank0.safetensors").read_bytes())
    content[-1] ^= 1
    (engine_copy / "rank0.safetensors").write_bytes(content)
    engine = Engine.open(engine_copy)
    assert engine.config == TINY
    with pytest.raises(EngineError, match=r"rank0\.safetensors was altered"):
        engine.load_weights(torch.float32)
    refused(engine_copy, "rank0.safetensors", "altered", verify=True)


def test_loading_reports_what_it_reads_and_hashes(
    engine_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.manifest._ALWAYS_HASHED_BYTES", 100_000)
    engine, read = Engine.open(engine_copy), list[int]()
    engine.load_weights(torch.float32, advance=read.append)
    # The first expert of a layer is read twice, to learn the format of all.
    assert engine.weight_bytes() <= sum(read) <= 1.01 * engine.weight_bytes()


@pytest.mark.parametrize(("version", "word"), [(3, "newer"), (1, "too old")])
def test_other_format_version(engine_copy: Path, version: int, word: str) -> None:
    path = engine_copy / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": version}))
    refused(engine_copy, f"format {version}", word)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format_version": 2, "files": []}'])
def test_damaged_manifest(engine_copy: Path, text: str) -> None:
    (engine_copy / "manifest.json").write_text(text)
    refused(engine_copy, "manifest.json", "altered")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_build_leaves_no_engine(
    released_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    outside = signal.getsignal(signal.SIGTERM)

    def crash(*_: object) -> None:
        assert signal.getsignal(sent) is signal.default_int_handler
        signal.raise_signal(sent)

    out = tmp_path / "engine"
    command = ["engine", "--checkpoint", str(released_dir), "--output_dir", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", crash)
        assert main(command) == 1
    assert signal.getsignal(signal.SIGTERM) is outside
    assert not out.exists()
    assert list(tmp_path.iterdir()) == []
    killed = tmp_path / "engine.partial"
    killed.mkdir()
    (killed / "rank0.safetensors").write_bytes(b"half")
    refused(killed, "never finished")
    assert main(command) == 0  # and what a killed run left is no obstacle
    assert Engine.open(out, verify=True).config == TINY
    assert not (tmp_path / "engine.partial").exists()


def test_interrupted_while_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_to_import(monkeypatch, "builder.commands", KeyboardInterrupt())
    assert main(["inspect", "--config", "tiny"]) == 1
    assert capsys.readouterr().err == "dsv41-build: interrupted\n"


def test_in_the_installation_of_the_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_to_import(monkeypatch, "builder.commands", ModuleNotFoundError("No torch", name="torch"))
    assert main(["inspect", "--config", "tiny"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "dsv41-build: torch is not installed; in a checkout, pip install '.[server]'"


def fail_to_import(monkeypatch: pytest.MonkeyPatch, module: str, error: BaseException) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == module:
                raise error

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


# -- ranks -----------------------------------------------------------------------------------------


def whole_from_ranks(directory: Path, world_size: int) -> dict[str, list[torch.Tensor]]:
    checkpoint = Checkpoint.open(directory)
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(world_size):
        for tensor in rank_tensors(
            checkpoint.weights, checkpoint.config, checkpoint.source, rank, world_size
        ):
            value = tensor.read(checkpoint.source)
            assert tuple(value.shape) == tensor.info.shape
            parts.setdefault(tensor.name, []).append(value)
    return parts


def test_ranks_put_together_are_the_checkpoint(released_dir: Path) -> None:
    source = Checkpoint.open(released_dir).source
    parts = whole_from_ranks(released_dir, 2)
    tables = {n for n in source.names() if "engram.embed" in n}
    assert set(parts) == set(source.names()) - tables
    rules = {"columns": 0, "rows": 0, "whole": 0, "replicated": 0}
    for name, pieces in parts.items():
        whole = source.read(name).view(torch.uint8)
        raw = [piece.view(torch.uint8) for piece in pieces]
        if len(raw) == 1:
            rule, matches = "whole", torch.equal(raw[0], whole)
        elif raw[0].shape == whole.shape:
            rule, matches = "replicated", all(torch.equal(one, whole) for one in raw)
        elif raw[0].shape[0] < whole.shape[0]:
            rule, matches = "columns", torch.equal(torch.cat(raw), whole)
        else:
            rule, matches = "rows", torch.equal(torch.cat(raw, dim=1), whole)
        assert matches, name
        rules[rule] += 1
    blocks = 12 + 2
    # Per block: wq_b, wo_a and two shared projections in columns (values and scales) and the
    # sinks; wo_b and one shared projection in rows. Embedding, head, Markov head in columns.
    assert rules["columns"] == blocks * (4 * 2 + 1) + 3
    assert rules["rows"] == blocks * 2 * 2
    assert rules["whole"] == (12 * 8 + 2 * 4) * 3 * 2


def test_partial_sums_of_ranks_are_the_layer(golden_engine: Path, tiny_dir: Path) -> None:
    """Output projection and shared expert: ranks compute alone, their results add up."""
    parts = whole_from_ranks(tiny_dir, 2)
    source = Checkpoint.open(tiny_dir).source
    attn, shared = "layers.5.attn", "layers.5.ffn.shared_experts"
    qr, u = torch.randn(3, 64), torch.randn(3, 128)

    def project(wq_b: torch.Tensor, wo_a: torch.Tensor, wo_b: torch.Tensor) -> torch.Tensor:
        heads = qr @ wq_b.T  # stands for the heads' outputs, head-major
        groups = wo_a.shape[0] // 32
        z = torch.einsum("tgk,gnk->tgn", heads.view(3, groups, 128), wo_a.view(groups, 32, 128))
        return z.flatten(1) @ wo_b.T

    def expert(w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(u @ w1.T) * (u @ w3.T)) @ w2.T

    for function, prefix, names in (
        (project, attn, ("wq_b", "wo_a", "wo_b")),
        (expert, shared, ("w1", "w3", "w2")),
    ):
        full = [f"{prefix}.{name}.weight" for name in names]
        expected = function(*(source.read(name) for name in full))
        summed = sum(function(*(parts[name][rank] for name in full)) for rank in range(2))
        torch.testing.assert_close(summed, expected, rtol=1e-4, atol=1e-4)


def test_engine_of_two_ranks_is_built_but_not_run(released_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    assert main(["engine", "--checkpoint", str(released_dir), "--output_dir", str(out),
                 "--tp_size", "2"]) == 0  # fmt: skip
    engine = Engine.open(out)
    assert engine.source(1).describe("layers.0.attn.wq_b.weight").shape == (128, 64)
    assert "layers.0.ffn.experts.4.w1.weight" in engine.source(1)
    assert "layers.0.ffn.experts.3.w1.weight" not in engine.source(1)
    with pytest.raises(EngineError, match="2 ranks"):
        engine.load_weights(torch.float32)
    with pytest.raises(EngineError, match="rank"):
        engine.source(2)


def test_world_sizes_of_the_released_model() -> None:
    for world_size in (1, 2, 4, 8):
        check_world_size(FULL, world_size)
    with pytest.raises(ConfigError, match=r"tp_size.*o_groups"):
        check_world_size(FULL, 16)
    with pytest.raises(ConfigError, match="tp_size"):
        check_world_size(FULL, 3)
