"""Damaged checkpoints and wrong options through the command: one sentence, nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from builder.cli import main
from engine.safetensors_file import SafetensorsFile, SafetensorsWriter, TensorInfo

Refused = Callable[..., None]


@pytest.fixture
def checkpoint(released_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(released_dir, tmp_path / "a damaged checkpoint"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> Refused:
    """refused(*mentions, options=[…]): `engine` on the checkpoint fails with such a sentence."""

    def check(*mentions: str, options: list[str] | None = None) -> None:
        out = tmp_path / "engine"
        command = ["engine", "--checkpoint_dir", str(checkpoint), "--output_dir", str(out)]
        capsys.readouterr()
        assert main([*command, *(options or [])]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        for mention in mentions:
            assert mention in lines[0]
        assert not out.exists()
        assert not out.with_name("engine.partial").exists()

    return check


def change_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"] |= changes
    path.write_text(json.dumps(raw))


def shard_of(checkpoint: Path, name: str) -> Path:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    return checkpoint / str(index["weight_map"][name])


def replace_tensor(checkpoint: Path, name: str, dtype: str, value: torch.Tensor) -> None:
    """Store `value` in place of tensor `name`, in a valid file."""
    path = shard_of(checkpoint, name)
    old = SafetensorsFile(path)
    infos = dict(old.tensors) | {name: TensorInfo(dtype, tuple(value.shape))}
    new = path.with_suffix(".new")
    with SafetensorsWriter(new, infos) as writer:
        for one in infos:
            writer.write(one, value if one == name else old.read(one))
    new.rename(path)


def test_missing_shard(checkpoint: Path, refused: Refused) -> None:
    path = shard_of(checkpoint, "layers.3.attn.wq_a.weight")
    path.unlink()
    refused(path.name, "missing")


def test_truncated_shard(checkpoint: Path, refused: Refused) -> None:
    path = shard_of(checkpoint, "layers.3.attn.wq_a.weight")
    path.write_bytes(path.read_bytes()[:-1000])
    refused(path.name, "truncated")


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "mentions"),
    [
        ("norm.weight", "I32", (128,), ("norm.weight", "BF16", "I32 [128]")),
        ("norm.weight", "BF16", (64,), ("norm.weight", "[128]", "[64]")),
        ("layers.0.attn.wkv.weight", "F8_E4M3", (64, 64), ("wkv.weight", "F8_E4M3 [64, 128]")),
        ("layers.0.attn.wkv.weight", "I8", (64, 128), ("wkv.weight", "F8_E4M3 [64, 128]")),
        ("layers.0.attn.wkv.scale", "F8_E8M0", (1, 1), ("wkv.scale", "F8_E8M0 [2, 4]", "[1, 1]")),
        ("layers.0.attn.wkv.scale", "F32", (2, 4), ("wkv.scale", "F8_E8M0 [2, 4]")),
        (
            "layers.1.engram.embed.weight",
            "F8_E4M3",
            (659, 32),
            ("engram.embed.weight", "[660, 32]", "[659, 32]"),
        ),
    ],
)
def test_wrong_dtype_or_shape(
    checkpoint: Path,
    refused: Refused,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    mentions: tuple[str, ...],
) -> None:
    stored = {"I32": torch.int32, "BF16": torch.bfloat16, "F32": torch.float32, "I8": torch.int8}
    value = torch.zeros(shape, dtype=stored.get(dtype, torch.uint8))
    if dtype == "F8_E4M3":
        value = value.view(torch.float8_e4m3fn)
    replace_tensor(checkpoint, name, dtype, value)
    refused(*mentions)


def test_scale_that_is_not_there(checkpoint: Path, refused: Refused) -> None:
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["layers.0.attn.wkv.scale"]
    path.write_text(json.dumps(index))
    refused("layers.0.attn.wkv.scale")


@pytest.mark.parametrize(
    ("changes", "mentions"),
    [
        ({"attention_bias": True}, ("attention_bias",)),
        ({"num_dense_layers": 1}, ("num_dense_layers",)),
        ({"compress_ratios": [0, 0, 2, 2]}, ("compress_ratios", "14")),
        ({"candidate_topk_blocks": 2}, ("candidate_topk_blocks", "index_topk")),
        ({"engram_num_embeddings": [660, 865]}, ("engram_num_embeddings", "864", "865")),
        ({"engram_vocab_size": 102}, ("engram_num_embeddings",)),
        ({"num_hidden_layers": 13, "compress_ratios": [0, 0] + [2] * 4 + [1] * 7 + [0, 0]},
         ("layers.12",)),
        ({"hidden_size": 256}, ("embed.weight", "[512, 256]")),
    ],
)  # fmt: skip
def test_configuration(
    checkpoint: Path, refused: Refused, changes: dict[str, Any], mentions: tuple[str, ...]
) -> None:
    change_config(checkpoint, **changes)
    refused(*mentions)


def test_no_configuration(checkpoint: Path, refused: Refused) -> None:
    (checkpoint / "config.json").unlink()
    refused("config.json", "found none")


def test_ignored_key_and_tensor_warn(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(checkpoint, favourite_colour="blue")
    shutil.copytree(checkpoint, tmp_path / "extra")
    path = tmp_path / "extra" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= {"vision.a": "v.safetensors", "layers.0.hash.tid2eid": "v.safetensors"}
    path.write_text(json.dumps(index))
    infos = {name: TensorInfo("U8", (1,)) for name in ("vision.a", "layers.0.hash.tid2eid")}
    with SafetensorsWriter(path.parent / "v.safetensors", infos) as writer:
        for name in infos:
            writer.write(name, torch.zeros(1, dtype=torch.uint8))
    assert main(["inspect", "--checkpoint", str(tmp_path / "extra")]) == 0
    warnings = capsys.readouterr().err
    for mention in ("favourite_colour", "vision tower", "1 tensors", "tid2eid"):
        assert mention in warnings


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        (["--max_num_tokens", "15"], ("max_num_tokens", "16", "15")),
        (["--max-seq-len", "1025"], ("max_seq_len", "1024")),
        (["--max_batch_size", "0"], ("max_batch_size",)),
        (["--tp_size", "4"], ("tp_size", "o_groups")),
    ],
)
def test_limits_that_do_not_fit(
    refused: Refused, options: list[str], mentions: tuple[str, ...]
) -> None:
    refused(*mentions, options=options)


def test_token_classes(checkpoint: Path, refused: Refused, tmp_path: Path) -> None:
    np.save(tmp_path / "classes.npy", np.arange(512))
    refused("0 … 255", options=["--token_class", str(tmp_path / "classes.npy")])
    (checkpoint / "token_class.npy").unlink()
    refused("483 token classes", "256", "--token-class")
    (checkpoint / "tokenizer.json").unlink()
    refused("token_class.npy", "tokenizer.json", "--token-class")


def test_output_that_is_taken(
    released_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    for command in (
        ["engine", "--checkpoint_dir", str(released_dir)],
        ["init", "--config", "tiny"],
    ):
        assert main([*command, "--output_dir", str(tmp_path / "mine")]) == 1
        assert "not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_output_that_cannot_be_renamed_to(
    small_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told before the work: at its end rename(2) answers EBUSY."""
    commands = [
        ["engine", "--checkpoint_dir", str(small_dir)],
        ["quantize", "--checkpoint_dir", str(small_dir), "--format", "as-released"],
        ["init", "--config", "tiny"],
    ]
    (tmp_path / "volume").mkdir()
    monkeypatch.chdir(tmp_path / "volume")
    for command in commands:
        assert main([*command, "--output_dir", "."]) == 1
        assert "current directory or a mount point" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    for command in commands:
        assert main([*command, "--output_dir", "volume"]) == 1
        assert "current directory or a mount point" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["volume"]


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        (["--config", "huge"], ("tiny, medium, full", "huge")),
        (["--config", "tiny", "--layer-ids", "0,1,2"], ("candidate source",)),
        (["--config", "tiny", "--layer-ids", "0,x"], ("0,x",)),
        (["--config", "tiny", "--experts", "0"], ("n_routed_experts",)),
        (["--config", "tiny", "--engram-rows", "0"], ("engram_rows",)),
        (["--config", "tiny", "--tokenizer", "no such file"], ("no such file",)),
    ],
)
def test_init_options(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    mentions: tuple[str, ...],
) -> None:
    try:
        status = main(["init", "--output_dir", str(tmp_path / "out"), *options])
    except SystemExit as stopped:  # the parser's own complaint
        status = int(str(stopped.code))
    lines = capsys.readouterr().err.splitlines()
    assert status == 1
    assert len(lines) == 1
    for mention in mentions:
        assert mention in lines[0]
    assert not list(tmp_path.iterdir())


def test_tokenizer_of_another_model(checkpoint: Path, refused: Refused) -> None:
    path = checkpoint / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"]["one more"] = 512
    path.write_text(json.dumps(raw))
    refused("tokenizer.json", "512", "513")
    path.write_text("{")
    refused("tokenizer.json", "not a tokenizer")


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "chat_sections.json"]
)
def test_damaged_companion(checkpoint: Path, refused: Refused, name: str, text: str) -> None:
    (checkpoint / name).write_bytes(text.encode(errors="surrogateescape"))
    refused(name, "JSON")


@pytest.mark.parametrize(
    ("tools", "response_format", "mention"),
    [
        ("no place", "{schema}", "with {schemas} in it once"),
        ("{schemas}", "{schema} {schema}", "with {schema} in it once"),
        ("{schemas}", None, "expected response_format of"),
    ],
)
def test_chat_sections_without_their_places(
    checkpoint: Path, refused: Refused, tools: object, response_format: object, mention: str
) -> None:
    path = checkpoint / "chat_sections.json"
    path.write_text(json.dumps({"tools": tools, "response_format": response_format}))
    refused(mention, f"{path} to be a text with")
    path.write_text(json.dumps({"tools": "{schemas}"}))
    refused(f"a JSON object of tools and response_format in {path}")


def test_engine_given_as_checkpoint(
    released_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--checkpoint", str(released_engine)]) == 1
    assert "--engine" in capsys.readouterr().err


def test_configuration_that_is_not_text(checkpoint: Path, refused: Refused) -> None:
    (checkpoint / "config.json").write_bytes(b"\xff\xfe{")
    refused("config.json", "JSON")


def test_nothing_is_kept_of_what_never_began(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A place that takes no directory: one sentence, and no word of complete shards."""
    out = checkpoint / "config.json" / "out"
    command = ["quantize", "--format", "as-released", "--checkpoint_dir", str(checkpoint)]
    assert main([*command, "--output_dir", str(out)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"dsv41-build: cannot use {out}.partial: Not a directory"


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
        "generation_config.json", "chat_sections.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", [b"\xff\xfe{\x00", b"[" * 100_000, b""])
def test_files_that_are_not_json(
    name: str, text: bytes, checkpoint: Path, refused: Refused
) -> None:
    (checkpoint / name).write_bytes(text)
    refused(str(checkpoint / name))


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"", "No data left"), (b"PK\x03\x04", "zip file"), (b"PK\x05\x06" + bytes(18), "an archive")],
)
def test_token_classes_that_are_no_array(
    text: bytes, said: str, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "classes.npy").write_bytes(text)
    refused("classes.npy", said, options=["--token_class", str(tmp_path / "classes.npy")])
