"""What serving launches is what an engine's kernels are compiled from.

In a process of its own: where this one interprets kernels, it cannot name them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config_reader import read_config_file
from engine.tensor_source import SafetensorsSource
from python_backend.executor.launches import network_of_shapes, numbers, turns

pytest.importorskip("triton")

HERE = Path(__file__).parent
TINYFLASH = HERE.parents[1] / "examples" / "tinyflash" / "checkpoint"


def test_everything_that_random_requests_launch_is_foreseen() -> None:
    """Chunked prompts longer than any padded size, prefix hits, decoding of one to five requests,
    drafts of which some stay; with bounded replay and without."""
    found = output_of("launches_served.py")
    assert found["unforeseen"] == []
    # Every kernel of a step is among them, and nearly all of what is foreseen is served.
    assert found["served"] > 100
    assert found["foreseen"] < 2 * found["served"]


def test_scores_of_every_share_of_rows_are_foreseen() -> None:
    """Kernels of the released index keys load them for as many rows as a request has."""
    for found in output_of("scores_served.py"):
        assert found["unforeseen"] == []
        assert found["served"] > 10
        assert found["foreseen"] < 2 * found["served"]


def output_of(script: str) -> Any:
    """What a script beside this file prints where kernels are not interpreted."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(HERE.parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, str(HERE / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_wide_weights_have_the_dtype_that_their_values_need(tiny_dir: Path) -> None:
    """A GPU computes with gates in bfloat16 where that keeps them: TINY's random ones it does not,
    TinyFlash's were bfloat16 when they were stored."""
    stored = SafetensorsSource(tiny_dir).read("layers.0.ffn.gate.weight")
    assert not torch.equal(stored.bfloat16().float(), stored)
    assert gate_dtype(tiny_dir) == torch.float32
    assert SafetensorsSource(TINYFLASH).describe("layers.0.ffn.gate.weight").dtype == "BF16"
    assert gate_dtype(TINYFLASH) == torch.bfloat16


def gate_dtype(checkpoint: Path) -> torch.dtype:
    config, _ = read_config_file(checkpoint / "config.json")
    classes = np.zeros(config.vocab_size, dtype=np.int32)
    network = network_of_shapes(config, SafetensorsSource(checkpoint), classes, torch.bfloat16)
    gate = network.weights.layers[0].moe.gate
    assert gate.is_meta
    return gate.dtype


def test_numbers_are_of_every_kind_and_magnitude() -> None:
    found = numbers(1000)
    assert found[:16] == list(range(1, 17))
    assert found[-1] == 1000
    for size in (32, 64, 128, 256, 512):
        within = [n for n in found if size <= n < 2 * size]
        # The largest power of two, up to 16, that divides them.
        assert {min(n & -n, 16) for n in within} == {1, 2, 4, 8, 16}
    assert numbers(1) == [1]


def test_turns_come_round_to_every_number() -> None:
    met = list(turns([1, 2, 3], list(range(10))))
    assert {one for one, _ in met} == {1, 2, 3}
    assert {other for _, other in met} == set(range(10))
    assert len(set(met)) > 10  # not always in the same company
