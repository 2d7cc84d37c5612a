"""The verify command: figures by hand, thresholds, and engines that do not belong."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.cli import main
from builder.verify import Limits, compare_logits

NOTHING = Limits(None, None, None, None)


def test_figures_by_hand() -> None:
    """Two positions over two tokens: p = (¾, ¼) against (½, ½), and the same row twice."""
    reference = torch.tensor([[math.log(3.0), 0.0], [0.0, 2.0]])
    got = compare_logits(reference, torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
    assert got.positions == 2
    assert got.max_error == pytest.approx(1.0, rel=1e-6)
    assert got.mean_error == pytest.approx((math.log(3.0) - 1 + 1) / 4, rel=1e-6)
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert got.kl == pytest.approx((kl, 0.0), abs=1e-7)
    assert got.mean_kl == pytest.approx(kl / 2, rel=1e-6)
    assert got.max_kl == pytest.approx(kl, rel=1e-6)
    # (log 3, 0) and (1, 1) enclose 45 degrees.
    assert got.min_cosine == pytest.approx(math.sqrt(0.5), rel=1e-6)
    assert got.mean_cosine == pytest.approx((1 + math.sqrt(0.5)) / 2, rel=1e-6)
    assert got.agreement == 1.0
    swapped = compare_logits(reference, reference.flip(-1))
    assert swapped.agreement == 0.0


def test_limits() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 1.0]])
    other = logits + torch.tensor([[0.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    found = compare_logits(logits, other)
    assert found.failures(NOTHING) == []
    kept = Limits(max_error=3.0, min_cosine=0.3, min_agreement=0.5, max_kl=2.0)
    assert found.failures(kept) == []
    broken = Limits(max_error=2.9, min_cosine=0.4, min_agreement=0.6, max_kl=0.1)
    names = [failure.split()[0] for failure in found.failures(broken)]
    assert names == ["max_error", "min_cosine", "agreement", "mean_kl"]
    assert "expected at most 2.9" in found.failures(broken)[0]
    assert "expected at least 0.6" in found.failures(broken)[2]


def test_nan_keeps_no_limit() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    found = compare_logits(logits, torch.tensor([[math.nan, 2.0]]))
    names = [failure.split()[0] for failure in found.failures(Limits(1e9, -1.0, None, 1e9))]
    assert names == ["max_error", "min_cosine", "mean_kl"]


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    np.save(tmp_path / "tokens.npy", np.arange(3, 150, 5))
    return str(tmp_path / "tokens.npy")


def test_packed_engine_of_the_same_checkpoint_is_equal(
    released_dir: Path, released_engine: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["verify", "--engine", str(released_engine), "--checkpoint", str(released_dir)]
    limits = ["--max_error", "0", "--min_agreement", "1", "--max-kl", "0", "--min_cosine", "0.999"]
    assert main([*options, "--tokens", tokens, *limits, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["positions"] == 30
    assert report["max_error"] == 0
    assert len(report["kl"]) == 30


def test_other_weights_fail_the_limits(
    released_engine: Path, tmp_path: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert main(["init", "--config", "tiny", "--seed", "6", "--output_dir", str(other)]) == 0
    options = ["verify", "--engine", str(released_engine), "--checkpoint", str(other)]
    assert main([*options, "--tokens", tokens]) == 0
    assert "arg max agreement" in capsys.readouterr().out
    assert main([*options, "--tokens", tokens, "--min_agreement", "0.9"]) == 1
    assert "verify: agreement is 0" in capsys.readouterr().err


def test_engine_of_another_model(
    released_engine: Path, small_dir: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--engine", str(released_engine), "--checkpoint", str(small_dir)]
    assert main(["verify", *options, "--tokens", tokens]) == 1
    assert "another configuration" in capsys.readouterr().err


def test_tokens_outside_the_vocabulary(
    released_dir: Path, released_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "bad.npy", np.array([1, 2, 10**6]))
    options = ["--engine", str(released_engine), "--checkpoint", str(released_dir)]
    assert main(["verify", *options, "--tokens", str(tmp_path / "bad.npy")]) == 1
    assert "1000000 at position 2" in capsys.readouterr().err


def test_more_tokens_than_the_model_takes(
    released_dir: Path, released_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "long.npy", np.ones(1025, dtype=np.int32))
    options = ["--engine", str(released_engine), "--checkpoint", str(released_dir)]
    assert main(["verify", *options, "--tokens", str(tmp_path / "long.npy")]) == 1
    assert "expected 1 … 1024 ids" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_finite_has_no_say(
    released_dir: Path,
    released_engine: Path,
    tmp_path: Path,
    tokens: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where both are NaN the arg max agrees."""
    bad = Path(shutil.copytree(released_dir, tmp_path / "bad"))
    (shard,) = (file for file in bad.glob("*.safetensors") if b'"norm.weight"' in file.read_bytes())
    tensors = load_file(shard)
    tensors["norm.weight"][3] = math.nan
    save_file(tensors, shard, {"format": "pt"})
    options = ["--engine", str(released_engine), "--checkpoint", str(bad)]
    assert main(["verify", *options, "--tokens", tokens]) == 1
    assert "got a NaN or an infinity at position 0" in capsys.readouterr().err
