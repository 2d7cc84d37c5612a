"""The CPU benchmarks run, and end with one JSON object that carries times, floor and peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu"


def run(script: str, *options: str) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def test_admission() -> None:
    result = run("admission.py", "--tokens", "8192", "--samples", "3")
    assert (result["benchmark"], result["tokens"]) == ("admission", 8192)
    for name in ("cold_ms", "hit_ms"):
        assert result[name] > 0
        assert result["floor"][name] > 0
    assert "nano-vllm" in result["peer"]


def test_scheduler_step() -> None:
    result = run("scheduler_step.py", "--requests", "4", "--steps", "5")
    assert (result["benchmark"], result["requests"]) == ("scheduler_step", 4)
    assert result["with_delivery_us"] > 0
    assert result["us_per_request"] > 0
    assert result["with_drafts_us"] > 0
    assert result["floor"]["us_per_request"] > 0


def test_sampling() -> None:
    result = run("sampling.py", "--requests", "6", "--vocab", "64", "--steps", "3")
    assert (result["benchmark"], result["requests"], result["vocab"]) == ("sampling", 6, 64)
    for batch in ("greedy", "temperature", "mixed", "everything"):
        assert result[f"{batch}_ms"] > 0


def test_grammar() -> None:
    result = run("grammar.py", "--requests", "3", "--vocab", "600", "--steps", "4")
    assert (result["benchmark"], result["requests"], result["vocab"]) == ("grammar", 3, 600)
    for name in ("first_ms", "new_ms", "again_ms", "masks_ms", "append_ms", "drafts_ms"):
        assert result[name] > 0
    assert result["floor"]["choose_ms"] > 0


@pytest.mark.parametrize("script", ["admission.py", "scheduler_step.py"])
def test_senseless_sizes_are_refused(script: str) -> None:
    option = "--tokens" if script == "admission.py" else "--requests"
    finished = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), option, "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 2
    assert f"expected {option} ≥" in finished.stderr


def test_draft_schedule() -> None:
    result = run("draft_schedule.py", "--requests", "2", "--rounds", "1", "--tokens", "4")
    (case,) = result["cases"]
    assert (result["benchmark"], case["requests"]) == ("draft_schedule", 2)
    assert case["off"]["verified"] == 0 < case["threshold"]["verified"]
    assert all(case[way]["tokens_per_s"] > 0 for way in ("off", "threshold", "schedule"))
