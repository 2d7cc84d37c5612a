"""`dsv41-build forward` against the golden vectors, which nothing here produced."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from builder.cli import main

TOLERANCE = 1e-9
Golden = dict[str, Any]
GoldenOf = Callable[[bool], Golden]


@pytest.fixture(scope="module")
def tokens_file(golden_of: GoldenOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "golden tokens.npy"
    np.save(path, golden_of(True)["tokens"].numpy().astype(np.int32))
    return path


def options(tiny_dir: Path, tokens: Path, out: Path, *more: str) -> list[str]:
    classes = tiny_dir / "golden_quant.safetensors"
    return [
        "forward", "--checkpoint", str(tiny_dir), "--token-class", str(classes),
        "--tokens", str(tokens), "--out", str(out), *more,
    ]  # fmt: skip


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(
    ("mode", "hit", "name"),
    [
        ("full", 0, "logits_full"),
        ("decoder-replay", 0, "logits_decoder_replay"),
        ("encoder-replay", 40, "logits_encoder_replay"),
        ("both", 40, "logits_both_replays"),
    ],
)
def test_every_mode_equals_the_golden_vectors(
    tiny_dir: Path,
    tokens_file: Path,
    golden_of: GoldenOf,
    tmp_path: Path,
    quantize: bool,
    mode: str,
    hit: int,
    name: str,
) -> None:
    out = tmp_path / "with a space" / "out.safetensors"
    out.parent.mkdir()
    more = ["--dtype", "float64", "--mode", mode]
    more += ["--hit", str(hit)] if hit else []
    more += [] if quantize else ["--no-cache-quant"]
    assert main(options(tiny_dir, tokens_file, out, *more)) == 0
    assert [path.name for path in out.parent.iterdir()] == ["out.safetensors"]
    got, golden = load_file(out), golden_of(quantize)
    close(got["logits"], golden[name])
    assert all(torch.equal(got[n], golden[n]) for n in golden if n.startswith("engram_rows."))
    if mode == "full":
        assert torch.equal(got["draft_tokens"], golden["draft_tokens"])
        close(got["draft_confidence"], golden["draft_confidence"])
    if mode in ("full", "decoder-replay"):
        for entries in ("main_kv.2", "main_kv.4", "main_kv.6", "index_k.2", "index_k.6"):
            close(got[entries], golden[entries])


def test_engine_gives_the_same(
    golden_engine: Path, tokens_file: Path, golden_of: GoldenOf, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    assert main(["forward", "--engine", str(golden_engine), "--tokens", str(tokens_file),
                 "--mode", "decoder-replay", "--dtype", "float64",
                 "--out", str(out)]) == 0  # fmt: skip
    close(load_file(out)["logits"], golden_of(True)["logits_decoder_replay"])


def test_float32_without_cache_quantisation_keeps_every_argmax(
    tiny_dir: Path, tokens_file: Path, golden_of: GoldenOf, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    more = ["--dtype", "float32", "--no_cache_quant"]
    assert main(options(tiny_dir, tokens_file, out, *more)) == 0
    expected = golden_of(False)["logits_full"]
    got = load_file(out)["logits"]
    assert got.dtype == torch.float32
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_activation_rounding_is_on_for_quantised_weights(
    released_engine: Path, tokens_file: Path, tmp_path: Path
) -> None:
    results = []
    for number, more in enumerate(([], ["--no-activation-quant"])):
        out = tmp_path / f"{number}.safetensors"
        assert main(["forward", "--engine", str(released_engine), "--tokens", str(tokens_file),
                     "--out", str(out), *more]) == 0  # fmt: skip
        results.append(load_file(out)["logits"])
    assert not torch.equal(*results)


# -- bad input: one sentence, status 1, no file ----------------------------------------------------


def sentence(capsys: pytest.CaptureFixture[str], status: int, *mentions: str) -> None:
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning:" not in line]
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith("dsv41-build")
    for mention in mentions:
        assert mention in lines[0]


@pytest.mark.parametrize(
    ("tokens", "mentions"),
    [
        (np.array([], dtype=np.int32), ("tokens", "at least one")),
        (np.array([3, 512]), ("tokens", "0 … 511", "512", "position 1")),
        (np.array([-1, 3]), ("tokens", "-1", "position 0")),
        (np.array([[1, 2]]), ("tokens", "one dimension")),
        (np.array([1.0, 2.0]), ("tokens", "float64")),
        (np.ones(1025, dtype=np.int64), ("tokens", "1024")),
    ],
)
def test_bad_tokens(
    tiny_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tokens: np.ndarray,
    mentions: tuple[str, ...],
) -> None:
    path, out = tmp_path / "tokens.npy", tmp_path / "out.safetensors"
    np.save(path, tokens)
    sentence(capsys, main(options(tiny_dir, path, out)), *mentions)
    assert not out.exists()


@pytest.mark.parametrize(
    ("more", "mentions"),
    [
        (["--mode", "both", "--hit", "61"], ("hit", "0 … 60", "61")),
        (["--mode", "encoder-replay", "--hit", "-8"], ("hit", "-8")),
        (["--mode", "full", "--hit", "40"], ("hit", "full")),
        (["--replay_length", "0"], ("replay_length", "0")),
    ],
)
def test_bad_hit(
    tiny_dir: Path,
    tokens_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    mentions: tuple[str, ...],
) -> None:
    out = tmp_path / "out.safetensors"
    sentence(capsys, main(options(tiny_dir, tokens_file, out, *more)), *mentions)
    assert not out.exists()


def test_paths_that_cannot_be_used(
    tiny_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, out = tmp_path / "no.npy", tmp_path / "out.safetensors"
    sentence(capsys, main(options(tiny_dir, missing, out)), "no.npy")
    (tmp_path / "text.npy").write_text("1 2 3")
    sentence(capsys, main(options(tiny_dir, tmp_path / "text.npy", out)), "text.npy")
    nowhere = tmp_path / "no directory" / "out.safetensors"
    sentence(capsys, main(options(tiny_dir, tokens_file, nowhere)), "out")


def test_a_result_that_cannot_be_written_leaves_nothing(
    tiny_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk: files may not grow beyond 4 KiB, the result has more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        status = main(options(tiny_dir, tokens_file, tmp_path / "out.safetensors"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sentence(capsys, status, "out")
    assert not list(tmp_path.iterdir())


def test_missing_token_classes(
    tiny_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["forward", "--checkpoint", str(tiny_dir), "--tokens", str(tokens_file),
                   "--out", str(tmp_path / "out.safetensors")])  # fmt: skip
    sentence(capsys, status, "--token-class")


def test_from_a_shell(tiny_dir: Path, tokens_file: Path, tmp_path: Path) -> None:
    """As a process: status and one sentence, no traceback."""
    command = [sys.executable, "-m", "builder.cli"]
    good = options(tiny_dir, tokens_file, tmp_path / "out.safetensors", "--dtype", "bfloat16")
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}

    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, env=environment, check=False
        )

    done = run(good)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_file(tmp_path / "out.safetensors")["main_kv.2"].dtype == torch.bfloat16
    for arguments in (["forward"], [*good, "--mode", "sideways"], [*good, "--frob"], []):
        failed = run(arguments)
        assert failed.returncode == 1
        assert len(failed.stderr.splitlines()) == 1
        assert "--help" in failed.stderr
