"""Every kernel compiles for sm_90, and some of each kind for the others, where there is no GPU,
and fits the memory of its block.

In a process of its own: where this one interprets kernels, it cannot compile them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
MULTIPLY = ("attention", "index", "linear", "experts", "mhc", "gate")
DO_NOT = (
    "attention join",
    "attention join, kept order",
    "index float8 pack",
    "linear spread",
    "linear round",
    "linear decode",
    "linear row of values",
    "linear long row",
    "linear long row MXFP8",
    "linear long row of a group",
    "linear join",
    "linear split",
    "linear sum",
)
NARROW = (
    "attention small",
    "attention float32",
    "linear float32",
    "linear one row",
    "linear one row FP4",
    "linear one row NVFP4",
    "linear few rows",
    "linear few rows FP4",
    "linear few rows NVFP4",
)  # wgmma takes 64 rows
# A shared expert's programs of few rows take sixteen or 32 rows of its weights, beside wider ones.
MIXED = ("experts down", "experts up")
# Shared memory that one block may take, of CUDA's table of compute capabilities: 163, 227, 227 and
# 99 KiB.
SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}


@pytest.mark.timeout(900)  # two minutes where nothing else runs
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_ahead_of_time(capability: int, tmp_path: Path) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(HERE.parents[1]), environment.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    limit = SHARED_MEMORY[capability]
    command = [sys.executable, str(HERE / "kernels_ahead.py"), str(capability), str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == {80: 9, 90: 108}.get(capability, 11)
    for row in rows:
        assert 0 <= row["shared"] <= limit, row
        # A kernel that asks for more than there is can become a lone trap.
        if row["kernel"].startswith(MULTIPLY) and row["kernel"] not in DO_NOT:
            wide = capability == 90 and row["kernel"] not in NARROW
            expected = ["mma.sync", "wgmma"] if row["kernel"] in MIXED else ["wgmma"]
            assert row["by"] == expected if wide else row["by"], row
        else:
            assert row["by"] == [], row
        assert row["instructions"] > 50, row
