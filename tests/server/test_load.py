"""Small versions of `make soak` and `make load`: the same scripts for some seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.deployment import ROOT

pytestmark = pytest.mark.server


def run(name: str, folder: Path, *options: str) -> dict[str, Any]:
    report = folder / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "load" / name)),
            *("--folder", str(folder / "run"), "--out", str(report), *options),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["passed"]
    return found


def test_soak(tmp_path: Path) -> None:
    report = run("soak.py", tmp_path, "--minutes=0.05", "--rounds=2", "--workers=6")
    accounts = report["accounts"]
    assert accounts["sent"] == sum(sum(ends.values()) for ends in report["ends"].values())
    assert accounts["refused"]["invalid_argument"] == report["ends"]["bad"]["invalid_argument"] > 0
    assert accounts["failed_steps"] == report["ends"]["fault"]["internal"] > 0


def test_load_of_256_streams(tmp_path: Path) -> None:
    report = run("load.py", tmp_path, "--seconds=1", "--prompt=16", "--answer=8")
    assert report["streams"] == 256 <= report["requests"]
    assert report["ends"] == {"answer": report["requests"]}
