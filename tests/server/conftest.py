"""One engine for all server tests: the golden TINY model with a byte-level tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from builder.byte_tokenizer import byte_tokenizer, tokenizer_config
from builder.cli import main
from engine.config_reader import read_config_file
from tests.server.deployment import TINY


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a folder with spaces in its name."""
    folder = tmp_path_factory.mktemp("server") / "an engine"
    checkpoint = folder.parent / "checkpoint"
    checkpoint.mkdir()
    for path in TINY.iterdir():
        shutil.copy(path, checkpoint)
    config, _ = read_config_file(TINY / "config.json")
    byte_tokenizer(config).save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(config)))
    classes = str(TINY / "golden_quant.safetensors")
    options = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(folder)]
    assert main(["engine", *options, "--token_class", classes]) == 0
    return folder
