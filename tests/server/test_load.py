"""`make soak` and `make load` for a moment, both at once: the same scripts, side by side.

Each of the soak's rounds has requests of every kind, and each of the 256 streams a request, however
short. Whether memory grows is judged by the long soak alone: a minute is a server's start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.server.deployment import ROOT

pytestmark = pytest.mark.server

SCRIPTS = {
    "soak": ("--minutes=0.5", "--rounds=2", "--workers=6"),
    "load": ("--seconds=8", "--prompt=16", "--answer=4"),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("load")
    running = {
        name: subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "benchmarks" / "load" / f"{name}.py"), *options),
                *("--folder", str(folder / name), "--out", str(folder / f"{name}.json")),
            ],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, options in SCRIPTS.items()
    }
    said = {name: process.communicate(timeout=280)[0] for name, process in running.items()}
    assert all(process.returncode == 0 for process in running.values()), said
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in SCRIPTS}
    assert all(report["passed"] for report in found.values())
    return found


@pytest.mark.parametrize(("whose", "seconds"), [("short", 30), ("committed", 1200)])
def test_soak(request: pytest.FixtureRequest, whose: str, seconds: int) -> None:
    if whose == "short":
        report = request.getfixturevalue("reports")["soak"]
    else:
        report = json.loads((ROOT / "benchmarks" / "baselines" / "soak.json").read_text())
    accounts = report["accounts"]
    assert report["seconds"] >= seconds
    assert len(report["ends"]) == 13  # kinds of requests
    assert accounts["sent"] == sum(sum(ends.values()) for ends in report["ends"].values())
    assert accounts["refused"]["invalid_argument"] == report["ends"]["bad"]["invalid_argument"] > 0
    # Two faults that waited in the queue may fail in one step.
    assert 0 < accounts["failed_steps"] <= report["ends"]["fault"]["internal"]


def test_load_of_256_streams(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["load"]
    assert report["streams"] == 256 <= report["requests"]
    assert report["ends"] == {"answer": report["requests"]}
