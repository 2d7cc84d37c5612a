"""What the shipped checkpoint answers right: held-out questions through the serving core.

The floors lie below docs/accuracy.md by more than so few questions vary.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builder.cli import main as build
from examples.tinyflash import evaluate

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tinyflash" / "checkpoint"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = tmp_path_factory.mktemp("accuracy") / "engine"
    assert build(["engine", f"--checkpoint_dir={CHECKPOINT}", f"--output_dir={engine}"]) == 0
    return engine


@pytest.mark.parametrize(
    ("task", "limit", "more", "floor"),
    [
        ("arithmetic", 64, [], 0.93),
        ("retrieval", 3, ["--document-tokens", "2048", "2560"], 0.6),
    ],
)
def test_accuracy_has_a_floor(
    engine: Path, tmp_path: Path, task: str, limit: int, more: list[str], floor: float
) -> None:
    out = tmp_path / "report.json"
    asked = [f"--task={task}", f"--limit={limit}", *more]
    assert evaluate.main([f"--engine={engine}", *asked, f"--json={out}"]) == 0
    made = json.loads(out.read_text())
    assert (made["n"], made["num_cut_short"]) == (limit, 0)
    assert made["accuracy"] >= floor, [r for r in made["records"] if not r["correct"]]
