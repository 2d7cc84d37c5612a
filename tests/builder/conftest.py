"""Checkpoints and engines of TINY, made once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.cli import main

SMALL = ["init", "--config", "tiny", "--experts", "4", "--seed", "5"]


@pytest.fixture(scope="session")
def released_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY in the released layout, seed 5, written by the command."""
    directory = tmp_path_factory.mktemp("init") / "tiny released"
    assert main(["init", "--config", "tiny", "--output_dir", str(directory), "--seed", "5"]) == 0
    return directory


@pytest.fixture(scope="session")
def released_engine(released_dir: Path) -> Path:
    """An engine of it. Tests that change an engine copy it first."""
    directory = released_dir.parent / "an engine"
    options = ["--checkpoint_dir", str(released_dir), "--output_dir", str(directory)]
    assert main(["engine", *options, "--max-batch-size", "4", "--max_seq_len", "512"]) == 0
    return directory


@pytest.fixture(scope="session")
def golden_engine(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the golden, unquantised checkpoint."""
    directory = tmp_path_factory.mktemp("golden") / "engine"
    classes = tiny_dir / "golden_quant.safetensors"
    assert main(["engine", "--checkpoint", str(tiny_dir), "--output_dir", str(directory),
                 "--token-class", str(classes)]) == 0  # fmt: skip
    return directory


@pytest.fixture(scope="session")
def float_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with four experts, unquantised."""
    directory = tmp_path_factory.mktemp("float") / "checkpoint"
    assert main([*SMALL, "--format", "float32", "--output_dir", str(directory)]) == 0
    return directory


@pytest.fixture(scope="session")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in the released layout."""
    directory = tmp_path_factory.mktemp("released") / "checkpoint"
    assert main([*SMALL, "--output_dir", str(directory)]) == 0
    return directory
